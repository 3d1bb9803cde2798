"""Images in prompts to replicas: as one engine takes them. Without Ray.

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
from tests.cluster.serving.in_process import GREEDY, OPTIONS, Replicas, ask, llm_of, prompt, told
from tests.cluster.serving.scripted import Put
from tests.engine.images.test_generate import FAMILIES, Oracle
from tests.frontend.images.test_similar import as_jpeg, spots
from tests.tiny_vision import IDS, make_image, save_tiny_vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture
def replicas(folder: Path) -> Iterator[Replicas]:
    made = Replicas(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, **OPTIONS)
    yield made
    made.close()


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


def sent_images(asked: AnswerRequest) -> tuple[SentImage, ...]:
    """The images of a message."""
    assert isinstance(asked.images, Put)
    found: tuple[SentImage, ...] = asked.images.value.images
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_names_and_hits_are_those_of_one_engine(name: str, tmp_path: Path) -> None:
    """One image and several, of other sizes, and a second question about the same ones.

    The answers are those of transformers, too.
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
    expected = [told(ask(alone, one)) for one in prompts]
    assert [told(ask(replicas.llm, one)) for one in prompts] == expected
    oracle = Oracle(name, folder)
    for one, (tokens, *_) in zip(prompts[:-1], expected, strict=False):
        answer = oracle.answer(one["prompt"], one["multi_modal_data"]["image"])
        assert tokens == [answer[: GREEDY.max_tokens]]
    cached = [one[2] for one in expected]
    assert cached[0] == 0 and cached[1] >= 16 and cached[4] >= 32, "nothing was hit"
    assert expected[0][0] != expected[2][0], "the image changes nothing"
    for one in prompts:
        group = replicas.frontend.prepare(one, GREEDY)
        own = alone.frontend.prepare(one, GREEDY).requests[0].sequence
        names = alone.engine.manager.block_hashes(own)
        keys = PromptKeys(replicas.frontend.facts.hasher, group.requests[0].sequence)
        assert list(keys) == list(prefix_keys(names)) and len(names) > 0
    alone.close()
    replicas.close()


def test_a_tower_may_give_more_rows_than_an_image_has_patches(tmp_path: Path) -> None:
    """Only encoding an image shows it: LLaVA's may keep the class token."""
    folder = save_tiny_vision("llava", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_feature_select_strategy"] = "full"
    (folder / "config.json").write_text(json.dumps(settings))
    alone, replicas = AsyncLLM(folder, **OPTIONS), Replicas(folder)
    asked = prompt("What is on @ here?", make_image(1), name="llava")
    assert told(ask(replicas.llm, asked)) == (expected := told(ask(alone, asked)))
    assert expected[3][0].num_tokens == 17
    alone.close()
    replicas.close()


def test_chats_go_on_where_an_image_was_shown(replicas: Replicas, alone: AsyncLLM) -> None:
    """The next turn hits all earlier turns, in replicas as in one engine."""
    turns: list[Any] = [shown("What is ", 1, "?")]
    said = 0
    for text in ("And now?", "Really?"):
        theirs, ours = ask(alone, turns), ask(replicas.llm, turns)
        assert told(ours) == told(theirs)
        assert ours.num_cached_tokens >= said
        said = len(ours.prompt_token_ids)
        reply = {"role": "assistant", "content": ours.outputs[0].text}
        turns = [*turns, reply, shown(text, 2)]


def test_a_message_has_pixels_and_nothing_that_is_made_of_them(replicas: Replicas) -> None:
    image = make_image(1, 48, 40)
    ask(replicas.llm, prompt("@", image))
    [sent] = sent_images(replicas.handle.asked[0])
    assert np.array_equal(sent.pixels, np.asarray(image))
    assert 48 * 40 * 3 < replicas.handle.sizes[0] < 48 * 40 * 3 + 4096
    ask(replicas.llm, "No image.")
    assert replicas.handle.asked[1].images is None


@pytest.mark.parametrize(
    "given",
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
def test_what_one_engine_refuses_is_sent_nowhere(
    replicas: Replicas, alone: AsyncLLM, given: Any
) -> None:
    with pytest.raises(RequestError) as theirs:
        ask(alone, given)
    with pytest.raises(RequestError) as ours:
        ask(replicas.llm, given)
    assert str(ours.value) == str(theirs.value)
    assert not replicas.handle.asked


def test_an_image_that_never_has_room_is_sent_nowhere(folder: Path) -> None:
    replicas = Replicas(folder, encoder_cache_rows=4)
    with pytest.raises(RequestError, match="the encoder cache holds 4"):
        ask(replicas.llm, prompt("@", make_image(1)))
    assert not replicas.handle.asked
    replicas.close()


def test_a_request_takes_its_images_to_another_replica(replicas: Replicas, alone: AsyncLLM) -> None:
    asked = prompt("What is on @ here?", make_image(1))
    replicas.handle.lost = 2
    assert told(ask(replicas.llm, asked))[0] == told(ask(alone, asked))[0]
    assert [one.attempt for one in replicas.handle.asked] == [0, 1, 2]
    digests = {sent_images(one)[0].digest for one in replicas.handle.asked}
    assert len(digests) == 1


def test_a_replica_of_another_model_refuses(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would be found under the names of others."""
    monkeypatch.setattr(replicas.frontend.images, "_fingerprint", b"another")
    with pytest.raises(EngineError, match="have different models or"):
        ask(replicas.llm, prompt("@", make_image(1)))
    assert replicas.num_encoded == 0


def test_a_replica_of_a_model_that_sees_nothing_refuses(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are others than those of the replica that the server asked."""
    monkeypatch.setattr(llm_of(replicas.replica).frontend, "images", None)
    with pytest.raises(EngineError, match="the replica's model takes only text"):
        ask(replicas.llm, prompt("@", make_image(1)))


def test_the_server_keeps_no_pixels_of_what_it_has_sent(replicas: Replicas) -> None:
    """They lie in Ray's store while the request runs, and were in the server's memory as well."""

    async def ask_and_look() -> list[bool]:
        request = await replicas.llm.prepare(prompt("@", make_image(1)), GREEDY)
        pixels = weakref.ref(pixels_of(request))
        kept = [pixels() is not None]
        async for _ in replicas.llm.outputs(request):
            gc.collect()
            kept.append(pixels() is not None)
        return kept

    first, *later = asyncio.run(ask_and_look())
    assert first and len(later) > 1 and not any(later)


def pixels_of(request: RequestGroup) -> Any:
    """Return the pixels of its first image."""
    assert request.extras is not None
    assert isinstance(request.extras.embeddings, PromptImages)
    return request.extras.embeddings.images[0].image.pixels


def test_tenants_do_not_see_each_others_images(replicas: Replicas) -> None:
    """Neither blocks nor embeddings of another tenant are hit; those of the same tenant are."""
    asked = prompt("What is on @ here?", make_image(1))
    found = [
        (ask(replicas.llm, {**asked, "cache_salt": salt}).num_cached_tokens, replicas.num_encoded)
        for salt in ("a", "b", "a")
    ]
    assert [cached > 0 for cached, _ in found] == [False, False, True]
    assert [encoded for _, encoded in found] == [1, 2, 2]


def test_an_image_at_another_place_is_not_encoded_again(replicas: Replicas) -> None:
    for text in ("@", "Here is @.", "And @, then."):
        ask(replicas.llm, prompt(text, make_image(1)))
    assert replicas.num_encoded == 1


def test_a_copy_takes_the_place_of_an_image_that_a_replica_has(replicas: Replicas) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, similar_images=True)
    image = spots(1)
    first = ask(replicas.llm, prompt("@", image), params)
    other = ask(replicas.llm, prompt("@", as_jpeg(image)))
    again = ask(replicas.llm, prompt("Say: @", as_jpeg(image)), params)
    assert not first.images[0].is_similar and not other.images[0].is_similar
    assert again.images[0].is_similar and again.images[0].digest == first.images[0].digest
    assert other.images[0].digest != first.images[0].digest
    assert replicas.num_encoded == 2
    [sent] = sent_images(replicas.handle.asked[-1])
    assert np.array_equal(sent.pixels, np.asarray(image)), "the copy's pixels were sent"


def test_inputs_are_forgotten_by_the_server_and_its_replicas(replicas: Replicas) -> None:
    asked = prompt("@", make_image(1))
    ask(replicas.llm, asked)
    assert asyncio.run(replicas.llm.reset_prefix_cache())
    ask(replicas.llm, asked)
    assert replicas.num_encoded == 1
    asyncio.run(replicas.llm.forget_inputs())
    assert asyncio.run(replicas.llm.reset_prefix_cache())
    ask(replicas.llm, asked)
    assert replicas.num_encoded == 2


def test_a_placeholder_that_a_model_said_is_a_token_like_any_other(
    replicas: Replicas, alone: AsyncLLM
) -> None:
    """The next turn has its id; a replica took it for an image that is missing."""
    pad = IDS["<|image_pad|>"]
    params = GREEDY.clone()
    params.logit_bias, params.skip_special_tokens = {pad: 100.0}, False
    for llm in (alone, replicas.llm):
        first = ask(llm, [shown("Say it.")], params)
        assert set(first.outputs[0].token_ids) == {pad}
        reply = {"role": "assistant", "content": first.outputs[0].text}
        answers = [told(ask(llm, [shown("Say it."), reply, shown(turn)])) for turn in ("And?", 3)]
        counts = [one[1].count(pad) for one in answers]
        assert counts[0] == len(first.outputs[0].token_ids) < counts[1]
        if llm is alone:
            expected = answers
    assert answers == expected


@pytest.mark.parametrize("first", ["one engine", "a replica"])
def test_a_store_has_images_for_one_engine_and_replicas_alike(
    folder: Path, tmp_path: Path, first: str
) -> None:
    """Blocks behind an image and its embeddings, whichever of them computed these."""
    asked = prompt("What is on @ here? Say it in a few words.", make_image(1))

    def answer(which: str) -> tuple[RequestOutput, int]:
        options = {"cache_dir": str(tmp_path)}
        made = Replicas(folder, **options) if which == "a replica" else None
        llm = AsyncLLM(folder, **OPTIONS, **options) if made is None else made.llm
        found = ask(llm, asked), ask(llm, {**prompt("@", make_image(1))})
        images = (llm if made is None else llm_of(made.replica)).frontend.images
        assert images is not None
        made.close() if made is not None else llm.close()
        return found[0], images.cache.num_encoded

    other = "a replica" if first == "one engine" else "one engine"
    (computed, encoded), (loaded, anew) = answer(first), answer(other)
    assert loaded.outputs[0].token_ids == computed.outputs[0].token_ids
    assert (computed.num_loaded_tokens, encoded) == (0, 1)
    assert loaded.num_loaded_tokens >= 32 and anew == 0


def test_known_images_are_as_many_as_a_replica_can_keep() -> None:
    known = _Encoded(10)
    keys = [EncoderKey("a", bytes([at])) for at in range(4)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        known.add(key, 4)
    assert [key in known for key in keys] == [True, False, True, False]
    known.clear()
    assert not any(key in known for key in keys)
