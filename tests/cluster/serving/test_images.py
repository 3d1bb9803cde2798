"""Images in prompts to replicas give the results of one engine. Without Ray.

A replica is called in this process: see `in_process`.
"""

import asyncio
import base64
import gc
import io
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cluster.index import PromptKeys, prefix_keys
from headstart.cluster.serving.images import _Encoded
from headstart.cluster.serving.messages import AnswerRequest
from headstart.engine.image_cache import EncoderKey, PromptImages, SentImage
from headstart.engine.outputs import RequestOutput
from headstart.engine.request import RequestGroup
from headstart.errors import EngineError, RequestError
from tests.cluster.serving.in_process import (
    GREEDY,
    OPTIONS,
    Replicas,
    ask,
    llm_of,
    prompt,
    visible_parts,
)
from tests.cluster.serving.scripted import Put
from tests.engine.images.test_generate import FAMILIES, Oracle
from tests.frontend.images.test_similar import as_jpeg, spots
from tests.tiny_vision import IDS, make_image, save_tiny_vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture
def replicas(folder: Path) -> Iterator[Replicas]:
    replicas = Replicas(folder)
    yield replicas
    replicas.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(folder, **OPTIONS)
    yield llm
    llm.close()


def data_url(seed: int, width: int = 40, height: int = 32) -> str:
    file = io.BytesIO()
    make_image(seed, width, height).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(*parts: Any) -> dict[str, Any]:
    """Build a user's message, in which a number stands for an image."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def sent_images(request: AnswerRequest) -> tuple[SentImage, ...]:
    """Return the images of a message."""
    assert isinstance(request.images, Put)
    images: tuple[SentImage, ...] = request.images.value.images
    return images


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_hashes_and_hits_match_one_engine(name: str, tmp_path: Path) -> None:
    """The prompts have one image or several, and repeat some of them.

    The answers also match transformers.
    """
    folder = save_tiny_vision(name, tmp_path)
    prompts: list[Any] = [
        prompt("What is on @ here?", make_image(1), name=name),
        prompt("What is on @ here, say?", make_image(1), name=name),
        prompt("What is on @ here?", make_image(2), name=name),
        prompt("@ and @: which one?", make_image(3, 24, 60), make_image(1), name=name),
        prompt("@ and @: which one, then?", make_image(3, 24, 60), make_image(1), name=name),
        "No image at all.",
    ]
    alone, replicas = AsyncLLM(folder, **OPTIONS), Replicas(folder)
    expected = [visible_parts(ask(alone, prompt_)) for prompt_ in prompts]
    assert [visible_parts(ask(replicas.llm, prompt_)) for prompt_ in prompts] == expected
    oracle = Oracle(name, folder)
    for prompt_, (tokens, *_) in zip(prompts[:-1], expected, strict=False):
        answer = oracle.answer(prompt_["prompt"], prompt_["multi_modal_data"]["image"])
        assert tokens == [answer[: GREEDY.max_tokens]]
    cached = [prompt_[2] for prompt_ in expected]
    assert cached[0] == 0 and cached[1] >= 16 and cached[4] >= 32, "nothing was hit"
    assert expected[0][0] != expected[2][0], "the image changes nothing"
    for prompt_ in prompts:
        group = replicas.frontend.prepare(prompt_, GREEDY)
        own = alone.frontend.prepare(prompt_, GREEDY).requests[0].sequence
        names = alone.engine.manager.block_hashes(own)
        keys = PromptKeys(replicas.frontend.facts.hasher, group.requests[0].sequence)
        assert list(keys) == list(prefix_keys(names)) and len(names) > 0
    alone.close()
    replicas.close()


def test_a_tower_may_return_more_rows_than_patches(tmp_path: Path) -> None:
    """The count is known only after encoding: LLaVA's tower may keep the class token."""
    folder = save_tiny_vision("llava", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_feature_select_strategy"] = "full"
    (folder / "config.json").write_text(json.dumps(settings))
    alone, replicas = AsyncLLM(folder, **OPTIONS), Replicas(folder)
    inputs = prompt("What is on @ here?", make_image(1), name="llava")
    assert visible_parts(ask(replicas.llm, inputs)) == (
        expected := visible_parts(ask(alone, inputs))
    )
    assert expected[3][0].num_tokens == 17
    alone.close()
    replicas.close()


def test_a_chat_continues_after_an_image(replicas: Replicas, alone: AsyncLLM) -> None:
    """The next turn hits all earlier turns, in replicas as in one engine."""
    turns: list[Any] = [shown("What is ", 1, "?")]
    length = 0
    for text in ("And now?", "Really?"):
        theirs, ours = ask(alone, turns), ask(replicas.llm, turns)
        assert visible_parts(ours) == visible_parts(theirs)
        assert ours.num_cached_tokens >= length
        length = len(ours.prompt_token_ids)
        reply = {"role": "assistant", "content": ours.outputs[0].text}
        turns = [*turns, reply, shown(text, 2)]


def test_a_message_contains_pixels_and_no_embeddings(replicas: Replicas) -> None:
    image = make_image(1, 48, 40)
    ask(replicas.llm, prompt("@", image))
    [sent] = sent_images(replicas.handle.requests[0])
    assert np.array_equal(sent.pixels, np.asarray(image))
    assert 48 * 40 * 3 < replicas.handle.sizes[0] < 48 * 40 * 3 + 4096
    ask(replicas.llm, "No image.")
    assert replicas.handle.requests[1].images is None


@pytest.mark.parametrize(
    "inputs",
    [
        prompt("@", b"no image"),
        prompt("@ @", make_image(1)),
        prompt("@@@@", *map(make_image, range(4))),
        prompt("@", make_image(1, 1000, 4)),
        prompt("@", make_image(1), multi_modal_uuids={"image": [3]}),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        {"prompt_token_ids": [IDS["<|image_pad|>"], 5]},
    ],
)
def test_a_prompt_that_one_engine_refuses_is_not_sent(
    replicas: Replicas, alone: AsyncLLM, inputs: Any
) -> None:
    with pytest.raises(RequestError) as theirs:
        ask(alone, inputs)
    with pytest.raises(RequestError) as ours:
        ask(replicas.llm, inputs)
    assert str(ours.value) == str(theirs.value)
    assert not replicas.handle.requests


def test_an_image_that_never_fits_is_not_sent(folder: Path) -> None:
    replicas = Replicas(folder, encoder_cache_rows=4)
    with pytest.raises(RequestError, match="the encoder cache holds 4"):
        ask(replicas.llm, prompt("@", make_image(1)))
    assert not replicas.handle.requests
    replicas.close()


def test_a_request_takes_its_images_to_another_replica(replicas: Replicas, alone: AsyncLLM) -> None:
    inputs = prompt("What is on @ here?", make_image(1))
    replicas.handle.lost = 2
    assert visible_parts(ask(replicas.llm, inputs))[0] == visible_parts(ask(alone, inputs))[0]
    assert [request.attempt for request in replicas.handle.requests] == [0, 1, 2]
    digests = {sent_images(request)[0].digest for request in replicas.handle.requests}
    assert len(digests) == 1


def test_a_replica_of_another_model_refuses(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embeddings would be cached under another model's hashes."""
    monkeypatch.setattr(replicas.frontend.images, "_fingerprint", b"another")
    with pytest.raises(EngineError, match="have different models or"):
        ask(replicas.llm, prompt("@", make_image(1)))
    assert replicas.num_encoded == 0


def test_a_replica_of_a_text_model_refuses_images(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model differs from that of the replica which described itself to the server."""
    monkeypatch.setattr(llm_of(replicas.replica).frontend, "images", None)
    with pytest.raises(EngineError, match="the replica's model takes only text"):
        ask(replicas.llm, prompt("@", make_image(1)))


def test_the_server_frees_pixels_that_it_has_sent(replicas: Replicas) -> None:
    """Regression: pixels stayed in the server's memory as well as in Ray's store."""

    async def check_pixels() -> list[bool]:
        request = await replicas.llm.prepare(prompt("@", make_image(1)), GREEDY)
        pixels = weakref.ref(pixels_of(request))
        in_memory = [pixels() is not None]
        async for _ in replicas.llm.outputs(request):
            gc.collect()
            in_memory.append(pixels() is not None)
        return in_memory

    first, *later = asyncio.run(check_pixels())
    assert first and len(later) > 1 and not any(later)


def pixels_of(request: RequestGroup) -> Any:
    """Return the pixels of its first image."""
    assert request.extras is not None
    assert isinstance(request.extras.embeddings, PromptImages)
    return request.extras.embeddings.images[0].image.pixels


def test_tenants_do_not_see_each_others_images(replicas: Replicas) -> None:
    """Neither blocks nor embeddings of another tenant are hit; those of the same tenant are."""
    inputs = prompt("What is on @ here?", make_image(1))
    results = [
        (ask(replicas.llm, {**inputs, "cache_salt": salt}).num_cached_tokens, replicas.num_encoded)
        for salt in ("a", "b", "a")
    ]
    assert [cached > 0 for cached, _ in results] == [False, False, True]
    assert [encoded for _, encoded in results] == [1, 2, 2]


def test_an_image_at_another_position_is_not_encoded_again(replicas: Replicas) -> None:
    for text in ("@", "Here is @.", "And @, then."):
        ask(replicas.llm, prompt(text, make_image(1)))
    assert replicas.num_encoded == 1


def test_a_copy_replaces_an_image_that_a_replica_has(replicas: Replicas) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, similar_images=True)
    image = spots(1)
    first = ask(replicas.llm, prompt("@", image), params)
    other = ask(replicas.llm, prompt("@", as_jpeg(image)))
    again = ask(replicas.llm, prompt("Say: @", as_jpeg(image)), params)
    assert not first.images[0].is_similar and not other.images[0].is_similar
    assert again.images[0].is_similar and again.images[0].digest == first.images[0].digest
    assert other.images[0].digest != first.images[0].digest
    assert replicas.num_encoded == 2
    [sent] = sent_images(replicas.handle.requests[-1])
    assert np.array_equal(sent.pixels, np.asarray(image)), "the copy's pixels were sent"


def test_forget_inputs_drops_images_of_the_server_and_its_replicas(replicas: Replicas) -> None:
    inputs = prompt("@", make_image(1))
    ask(replicas.llm, inputs)
    assert asyncio.run(replicas.llm.reset_prefix_cache())
    ask(replicas.llm, inputs)
    assert replicas.num_encoded == 1
    asyncio.run(replicas.llm.forget_inputs())
    assert asyncio.run(replicas.llm.reset_prefix_cache())
    ask(replicas.llm, inputs)
    assert replicas.num_encoded == 2


def test_a_generated_placeholder_is_an_ordinary_token(replicas: Replicas, alone: AsyncLLM) -> None:
    """Regression: in the next turn, a replica took its id for a missing image."""
    pad = IDS["<|image_pad|>"]
    params = GREEDY.clone()
    params.logit_bias, params.skip_special_tokens = {pad: 100.0}, False
    for llm in (alone, replicas.llm):
        first = ask(llm, [shown("Say it.")], params)
        assert set(first.outputs[0].token_ids) == {pad}
        reply = {"role": "assistant", "content": first.outputs[0].text}
        answers = [
            visible_parts(ask(llm, [shown("Say it."), reply, shown(turn)])) for turn in ("And?", 3)
        ]
        counts = [answer[1].count(pad) for answer in answers]
        assert counts[0] == len(first.outputs[0].token_ids) < counts[1]
        if llm is alone:
            expected = answers
    assert answers == expected


@pytest.mark.parametrize("first", ["one engine", "a replica"])
def test_an_engine_and_a_replica_share_images_in_a_store(
    folder: Path, tmp_path: Path, first: str
) -> None:
    """Each loads the image's blocks and embeddings that the other computed."""
    inputs = prompt("What is on @ here? Say it in a few words.", make_image(1))

    def answer(which: str) -> tuple[RequestOutput, int]:
        options = {"cache_dir": str(tmp_path)}
        replicas = Replicas(folder, **options) if which == "a replica" else None
        llm = AsyncLLM(folder, **OPTIONS, **options) if replicas is None else replicas.llm
        outputs = ask(llm, inputs), ask(llm, {**prompt("@", make_image(1))})
        images = (llm if replicas is None else llm_of(replicas.replica)).frontend.images
        assert images is not None
        replicas.close() if replicas is not None else llm.close()
        return outputs[0], images.cache.num_encoded

    other = "a replica" if first == "one engine" else "one engine"
    (computed, encoded), (loaded, anew) = answer(first), answer(other)
    assert loaded.outputs[0].token_ids == computed.outputs[0].token_ids
    assert (computed.num_loaded_tokens, encoded) == (0, 1)
    assert loaded.num_loaded_tokens >= 32 and anew == 0


def test_the_server_knows_as_many_images_as_a_replica_can_cache() -> None:
    encoded = _Encoded(10)
    keys = [EncoderKey("a", bytes([i])) for i in range(4)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        encoded.add(key, 4)
    assert [key in encoded for key in keys] == [True, False, True, False]
    encoded.clear()
    assert not any(key in encoded for key in keys)
