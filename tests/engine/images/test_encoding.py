"""Images are encoded while an engine runs: each once, and no request waits for ever."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart import LLM, EngineError, RequestError, RequestOutput, SamplingParams
from headstart.engine.image_cache import (
    PromptImages,
)
from headstart.engine.request import PlacedRows, RequestGroup
from headstart.models.decoder import ProcessedImage, VisionModel
from tests.engine.internals import encoder_users
from tests.tiny_vision import IDS, make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("llava", tmp_path_factory.mktemp("llava"))


def set_encoder(images: PromptImages, make: Callable[[Any], Any]) -> None:
    """Replace the image encoder by an object created from the vision model."""
    images.cache._encoder = make(images.vision)


def make_prompt(text: str, *seeds: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [make_image(seed) for seed in seeds]}}


def test_an_image_across_chunks_and_blocks_is_encoded_once(folder: Path) -> None:
    llm = LLM(folder, num_blocks=64, block_size=4, max_num_batched_tokens=3, debug=True)
    llm.generate(make_prompt("ab<image>cd", 1), GREEDY)
    llm.generate(make_prompt("a longer text and <image>", 1), GREEDY)
    assert llm.frontend.images is not None
    assert llm.frontend.images.cache.num_encoded == 1
    llm.close()


def test_an_image_at_two_offsets_in_one_step_is_encoded_once(folder: Path) -> None:
    llm = LLM(folder, num_blocks=64, debug=True)
    outputs = llm.generate(
        [make_prompt("<image>?", 1), make_prompt("What is <image>? <image>?", 1, 1)], GREEDY
    )
    assert llm.frontend.images is not None
    assert llm.frontend.images.cache.num_encoded == 1
    assert len({use.digest for output in outputs for use in output.images}) == 1
    assert [use.position for use in outputs[1].images] == [8, 26]
    llm.close()


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "block_size": 64}])
def test_requests_wait_for_space_and_all_end(folder: Path, options: dict[str, Any]) -> None:
    """Eight requests of three images each have space for three images, in small chunks."""
    llm = LLM(
        folder,
        **({"num_blocks": 96, "block_size": 16} | options),
        encoder_cache_rows=48,
        max_num_batched_tokens=64,
        debug=True,
    )
    prompts = [
        make_prompt("<image> <image> <image> ?", 3 * n, 3 * n + 1, 3 * n + 2) for n in range(8)
    ]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert llm.reset_prefix_cache()
    together = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in together] == alone
    llm.close()


def test_images_that_never_fit_are_refused_at_once(folder: Path) -> None:
    llm = LLM(folder, num_blocks=64, encoder_cache_rows=15)
    with pytest.raises(RequestError, match="holds 15 "):
        llm.generate(make_prompt("<image>", 1), GREEDY)
    llm.close()
    llm = LLM(folder, num_blocks=64, encoder_cache_rows=47, deterministic=True, block_size=64)
    llm.generate(make_prompt("<image><image>", 1, 2), GREEDY)
    with pytest.raises(RequestError, match="needs 48 image embeddings at once"):
        llm.generate(make_prompt("<image><image><image>", 1, 2, 3), GREEDY)
    llm.close()


def test_a_tower_that_fails_ends_its_requests_and_leaks_nothing(folder: Path) -> None:
    llm = LLM(folder, num_blocks=64, debug=True)
    images = llm.frontend.images
    assert images is not None
    set_encoder(images, lambda vision: _Broken())
    with pytest.raises(EngineError, match="no such picture"):
        llm.generate(make_prompt("<image>?", 1), GREEDY)
    assert images.cache.num_rows == 0
    images.cache.check()
    llm.engine.manager.check()
    assert llm.engine.manager.num_free_blocks == 64
    set_encoder(images, lambda vision: vision)
    [output] = llm.generate(make_prompt("<image>?", 1), GREEDY)
    assert len(output.outputs[0].token_ids) == 6
    llm.close()


class _Broken:
    def encode(self, image: ProcessedImage) -> Tensor:
        raise ValueError("no such picture")


def test_an_image_that_cannot_be_encoded_ends_the_requests_that_show_it(folder: Path) -> None:
    """Regression: the tower's error ended all running requests.

    Here these are a prompt without images, one that arrives in the same step and begins alike, and
    one with another image.
    """
    llm = LLM(folder, num_blocks=96, block_size=4, debug=True)
    engine, images = llm.engine, llm.frontend.images
    assert images is not None
    bad, good, text = (
        make_prompt("What is <image>?", 1),
        make_prompt("What is <image>?", 2),
        "What then?",
    )
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (good, text)]
    assert llm.reset_prefix_cache()
    images.cache.clear()
    request = llm.frontend.prepare(bad, GREEDY)
    set_encoder(images, lambda vision: _Blind(vision, request))
    running = llm.frontend.prepare(text, GREEDY, request_id="running")
    engine.submit(running)
    engine.step()
    groups = {
        name: llm.frontend.prepare(prompt, GREEDY, request_id=name)
        for name, prompt in (("bad", bad), ("good", good), ("text", text), ("bad too", bad))
    }
    for group in groups.values():
        engine.submit(group)
    errors: dict[str, EngineError] = {}
    while engine.has_unfinished:
        for result in engine.step():
            if result.error is not None:
                errors[result.group.request_id] = result.error
        engine.manager.check()
        images.cache.check()
    assert errors.keys() == {"bad", "bad too"}
    assert "no such picture" in str(errors["bad"])
    answers = [groups[name].output().outputs[0].token_ids for name in ("good", "text")]
    assert answers == expected
    assert groups["good"].output().num_cached_tokens == 5  # "What " of texts, and none of "bad"
    assert engine.manager.num_free_blocks == 96
    assert not encoder_users(images.cache)
    llm.close()


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"encoder_cache_rows": 32},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 20},
        {"deterministic": True, "block_size": 16},
        {"num_blocks": 16, "max_num_batched_tokens": 30},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_others_are_answered_in_any_configuration(
    folder: Path, options: dict[str, Any]
) -> None:
    """Options: chunks, too little space, no cache, whole blocks, few blocks, and two answers."""
    llm = LLM(folder, **({"num_blocks": 96, "block_size": 8, "debug": True} | options))
    engine, images = llm.engine, llm.frontend.images
    assert images is not None
    prompts = [make_prompt("What? <image> and <image>", seed, seed + 1) for seed in range(1, 6)]
    prompts.insert(2, make_prompt("What? No image."))
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert llm.reset_prefix_cache()
    images.cache.clear()
    request = llm.frontend.prepare(make_prompt("<image>", 3), GREEDY)
    set_encoder(images, lambda vision: _Blind(vision, request))
    twice = replace(GREEDY, n=2)
    groups = [llm.frontend.prepare(prompt, twice) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    failed = set()
    while engine.has_unfinished:
        failed |= {result.group for result in engine.step() if result.error is not None}
        engine.manager.check()
        images.cache.check()
    assert failed == {groups[1], groups[3]}  # of images 2 and 3, and 3 and 4
    for group, expected in zip(groups, alone, strict=True):
        if group not in failed:
            assert [answer.token_ids for answer in group.output().outputs] == [expected] * 2
    assert engine.manager.num_free_blocks == engine.manager.config.num_blocks
    llm.close()


class _Blind:
    """An encoder that encodes everything but one request's image."""

    def __init__(self, vision: VisionModel, request: RequestGroup) -> None:
        assert request.extras is not None
        assert isinstance(request.extras.embeddings, PromptImages)
        self._vision = vision
        [image] = request.extras.embeddings.images
        self._hidden = vision.encode(image.image)

    def encode(self, image: ProcessedImage) -> Tensor:
        rows = self._vision.encode(image)
        if torch.equal(rows, self._hidden):
            raise ValueError("no such picture")
        return rows


def test_the_reference_s_example_of_an_image_across_a_block_border(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """[ Im0 Im1 Im2 Im3 ] [ Im4 Im5 foo ], then [ Im0 Im1 Im2 Im3 ] [ Im4 Im5 bar baz ]: block 1
    is hit, and Im4 and Im5 come from the encoder cache."""
    folder = save_tiny_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))
    pad, picture = IDS["<|image_pad|>"], make_image(1, 24, 16)  # 2 x 3 placeholders

    def show(llm: LLM, *words: int) -> RequestOutput:
        prompt = {"prompt_token_ids": [pad, *words], "multi_modal_data": {"image": picture}}
        [output] = llm.generate(prompt, GREEDY)
        return output

    llm = LLM(folder, num_blocks=32, block_size=4, partial_hits=False, debug=True)
    images = llm.frontend.images
    assert images is not None
    assert len(show(llm, 65).prompt_token_ids) == 7
    read: list[tuple[int, int]] = []
    source = PromptImages.between

    def spy(self: PromptImages, start: int, stop: int) -> list[PlacedRows]:
        chunks = list(source(self, start, stop))
        read.extend((position, len(rows)) for position, rows in chunks)
        return chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptImages, "between", spy)
        second = show(llm, 66, 67)
    assert second.num_cached_tokens == 4
    assert read == [(4, 2)]
    assert images.cache.num_encoded == 1
    llm.close()
    alone = LLM(folder, num_blocks=32, enable_prefix_caching=False)
    assert show(alone, 66, 67).outputs[0].token_ids == second.outputs[0].token_ids
    alone.close()
