"""Embeddings of images are loaded from the tiers while other requests run."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.image_cache import EncoderCache, PromptImages
from headstart.engine.request import RequestGroup
from headstart.errors import TierError
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import LoadedBlock
from headstart.tiers.transfers import OBJECTS
from tests.engine.internals import loader_of
from tests.tiny_vision import make_image, save_tiny_vision

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("llava", tmp_path_factory.mktemp("model"))


def open_llm(model: Path, folder: Path) -> LLM:
    return LLM(model, num_blocks=128, block_size=4, debug=True, cache_dir=str(folder))


def submit(llm: LLM, text: str, *seeds: int, params: SamplingParams = GREEDY) -> RequestGroup:
    assert llm.frontend.images is not None
    prompt: dict[str, Any] = {"prompt": text.replace("<image>", llm.frontend.images.placeholder)}
    if seeds:
        prompt["multi_modal_data"] = {"image": [make_image(seed, 56, 56) for seed in seeds]}
    llm.engine.submit(group := llm.frontend.prepare(prompt, params))
    return group


def run(llm: LLM, *groups: RequestGroup) -> list[list[int]]:
    for _ in range(1000):
        if all(group.finished for group in groups):
            return [list(group.output().outputs[0].token_ids) for group in groups]
        llm.engine.step()
    raise AssertionError("requests wait for ever")


def counts(llm: LLM) -> tuple[int, int]:
    """Return the numbers of encoded and of loaded images."""
    cache = llm.frontend.images.cache if llm.frontend.images is not None else None
    assert isinstance(cache, EncoderCache)
    return cache.num_encoded, cache.num_loaded


@pytest.fixture
def gate(disk_loads: Callable[..., None]) -> Event:
    """Hold images on the disk until the event is set."""
    opened = Event()

    def wait(store: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        if store.model == OBJECTS:
            assert opened.wait(4), "a step waits for an image"
        yield from blocks

    disk_loads(wait)
    return opened


@pytest.fixture
def stored(model: Path, tmp_path: Path) -> tuple[Path, list[int]]:
    """A folder that has two images, and what a prompt with both is answered."""
    with closing(open_llm(model, tmp_path)) as llm:
        [answer] = run(llm, submit(llm, "One <image> and <image> two", 1, 2))
        assert counts(llm) == (2, 0)
    for file in tmp_path.glob("*.kv"):  # no K/V remain, but all images
        if file.stat().st_size < 1 << 16:
            file.unlink()
    return tmp_path, answer


def test_others_run_while_an_image_is_looked_up(
    model: Path, stored: tuple[Path, list[int]], gate: Event
) -> None:
    """Regression: a step loaded it, and all requests waited for the disk."""
    with closing(open_llm(model, stored[0])) as llm:
        seeing = submit(llm, "One <image> and <image> two", 1, 2)
        llm.engine.step()
        run(llm, submit(llm, "Only text"))
        assert not seeing.finished and counts(llm) == (0, 0)
        gate.set()
        assert run(llm, seeing) == [stored[1]]
        assert counts(llm) == (0, 2)
        assert llm.engine.tiers is not None and not llm.engine.tiers.image_loads.lookups


def test_lookups_of_an_aborted_request_are_forgotten(
    model: Path, stored: tuple[Path, list[int]], gate: Event
) -> None:
    with closing(open_llm(model, stored[0])) as llm:
        assert llm.engine.tiers is not None
        loads = llm.engine.tiers.image_loads
        group = submit(llm, "One <image> and <image> two", 1, 2)
        llm.engine.step()
        assert loads.are_under_way
        llm.engine.abort(group.request_id)
        assert not loads.are_under_way
        gate.set()
        run(llm, submit(llm, "Only text"))
        assert not loads.lookups and counts(llm) == (0, 0)
        assert run(llm, submit(llm, "One <image> and <image> two", 1, 2)) == [stored[1]]


def test_images_are_loaded_within_a_step_where_many_others_are_looked_up(
    model: Path, stored: tuple[Path, list[int]], gate: Event, limits: Callable[..., None]
) -> None:
    gate.set()
    limits(most_lookups=0)
    with closing(open_llm(model, stored[0])) as llm:
        assert run(llm, submit(llm, "One <image> and <image> two", 1, 2)) == [stored[1]]
        assert counts(llm) == (0, 2), "it is loaded within the step"


def test_an_image_found_before_a_reset_is_encoded_again(
    model: Path, stored: tuple[Path, list[int]], gate: Event
) -> None:
    gate.set()
    with closing(open_llm(model, stored[0])) as llm:
        assert llm.engine.tiers is not None
        loads = llm.engine.tiers.image_loads
        group = submit(llm, "One <image> and <image> two", 1, 2)
        shown = group.extras.embeddings if group.extras is not None else None
        assert isinstance(shown, PromptImages)
        for at, image in enumerate(shown.images):
            shown.cache.is_coming((group.requests[0], at), image)
        while loads.are_under_way:
            loads.wait(4)
        assert len(loads.lookups) == 2
        llm.engine.abort(group.request_id)
        assert not loads.lookups, "it ended, and no other request needs them"
        for image in shown.images:
            loads.is_coming(image.key)
        while loads.are_under_way:
            loads.wait(4)
        assert llm.reset_prefix_cache(reset_connector=True)
        assert not loads.lookups
        assert run(llm, submit(llm, "One <image> and <image> two", 1, 2)) == [stored[1]]
        assert counts(llm) == (2, 0)


def test_a_request_gets_an_image_that_another_no_longer_needs(
    model: Path, stored: tuple[Path, list[int]], gate: Event
) -> None:
    """Regression: each token of the other request dropped it, so it was queried again and again."""
    gate.set()
    with closing(open_llm(model, stored[0])) as llm:
        long = replace(GREEDY, max_tokens=200)
        first = submit(llm, "One <image>", 1, params=long)
        while len(first.requests[0].sampling.output_token_ids) < 3:
            llm.engine.step()
        assert llm.frontend.images is not None
        llm.frontend.images.cache.clear()  # as if others had needed the space
        second = submit(llm, "Of another length <image>", 1)
        tiers = llm.engine.tiers
        assert tiers is not None
        for _ in range(20):  # each time with the cached part of it
            if tiers.loads.are_under_way:
                loader_of(tiers).wait(4)
            while tiers.image_loads.are_under_way:
                tiers.image_loads.wait(4)
            llm.engine.step()
        assert second.requests[0].sampling.output_token_ids
        assert not first.finished and counts(llm) == (0, 2)


def test_a_reset_waits_for_running_loads(
    model: Path,
    stored: tuple[Path, list[int]],
    limits: Callable[..., None],
    disk_loads: Callable[..., None],
) -> None:
    """Regression: after a reset, blocks of a farther tier were saved in all tiers."""
    in_store, gate = Event(), Event()

    def wait(store: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        if store.model == OBJECTS:
            in_store.set()
            assert gate.wait(4)
        yield from blocks

    disk_loads(wait)
    with closing(open_llm(model, stored[0])) as llm:
        group = submit(llm, "One <image> and <image> two", 1, 2)
        llm.engine.step()
        assert llm.engine.tiers is not None
        assert in_store.wait(4)
        llm.engine.abort(group.request_id)
        limits(last_saves=0.01)
        with pytest.raises(TierError, match="may remain"):
            llm.engine.tiers.clear()
        limits(last_saves=10.0)
        gate.set()
        assert llm.reset_prefix_cache(reset_connector=True)
        assert run(llm, submit(llm, "One <image> and <image> two", 1, 2)) == [stored[1]]
        assert counts(llm) == (2, 0)
