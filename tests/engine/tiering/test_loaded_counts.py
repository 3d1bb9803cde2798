"""Loaded tokens: a request counts those that it hits, a tier all that entered the pool."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from headstart import SamplingParams
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import LoadedBlock
from tests.engine.tiny_llm import make_llm, save_smallest

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
UNREAD = SamplingParams(temperature=0, max_tokens=4, skip_reading_prefix_cache=True)
TEXT = list(range(3, 103))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a model, and a folder that has six blocks of a text."""
    model = save_smallest(tmp_path_factory.mktemp("model"))
    folder = str(tmp_path_factory.mktemp("kept"))
    with closing(make_llm(model, cache_dir=folder)) as llm:
        llm.generate([{"prompt_token_ids": TEXT}], GREEDY)
    return model, folder


class GatedDisk:
    """A disk store that returns some blocks at once, and the others when it is opened."""

    def __init__(self, at_once: int) -> None:
        self.opened = Event()
        self._at_once = at_once

    def load(self, _: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        for at, block in enumerate(blocks):
            assert at < self._at_once or self.opened.wait(60)
            yield block


def test_blocks_that_another_request_computed_meanwhile_are_not_counted(
    stored: tuple[Path, str], limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    limits(chunk_bytes=1)
    disk_loads((disk := GatedDisk(at_once=0)).load)
    with closing(make_llm(stored[0], cache_dir=stored[1], debug=True)) as llm:
        engine = llm.engine
        assert engine.tiers is not None
        engine.submit(waiting := llm.frontend.prepare({"prompt_token_ids": TEXT}, GREEDY))
        engine.submit(other := llm.frontend.prepare({"prompt_token_ids": TEXT[:40]}, UNREAD))
        while not other.finished:
            engine.step()
        disk.opened.set()
        while not waiting.finished:
            engine.step()
        output = waiting.output()
        assert (output.num_cached_tokens, output.num_loaded_tokens) == (96, 64)
        assert engine.tiers.stats.loaded_tokens == {"disk": 64}
        assert other.output().num_loaded_tokens == 0


def test_hits_of_another_request_s_load_count_as_loaded(
    stored: tuple[Path, str], limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    limits(chunk_bytes=1)
    disk_loads(GatedDisk(at_once=99).load)
    with closing(make_llm(stored[0], cache_dir=stored[1], debug=True)) as llm:
        prompts = [TEXT, TEXT[:50] + [9] * 20]
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], GREEDY)
        counts = [(output.num_cached_tokens, output.num_loaded_tokens) for output in outputs]
        assert counts == [(96, 96), (50, 50)]
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.stats.loaded_tokens == {"disk": 96}


def test_an_output_names_the_tier_of_its_tokens(
    stored: tuple[Path, str], disk_loads: Callable[..., None]
) -> None:

    def load_from_two(_: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        for at, block in enumerate(blocks):
            yield block if at < 3 else LoadedBlock("remote", block.payload)

    disk_loads(load_from_two)
    with closing(make_llm(stored[0], cache_dir=stored[1], debug=True)) as llm:
        prompts = [TEXT, TEXT[:50] + [9] * 20]
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], GREEDY)
        assert [output.tokens_by_tier for output in outputs] == [
            {"pool": 0, "disk": 48, "remote": 48, "computed": 4},
            {"pool": 0, "disk": 48, "remote": 2, "computed": 20},
        ]
        assert [output.num_loaded_tokens for output in outputs] == [96, 50]
        [again] = llm.generate([{"prompt_token_ids": TEXT}], GREEDY)
        assert again.tokens_by_tier == {"pool": 99, "computed": 1}


def test_blocks_loaded_for_an_aborted_request_are_counted(
    stored: tuple[Path, str], limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    """They are in the pool, and the next request hits them."""
    limits(chunk_bytes=1)
    disk_loads((disk := GatedDisk(at_once=2)).load)
    with closing(make_llm(stored[0], cache_dir=stored[1], debug=True)) as llm:
        engine = llm.engine
        assert engine.tiers is not None
        engine.submit(group := llm.frontend.prepare({"prompt_token_ids": TEXT}, GREEDY))
        while engine.manager.num_free_blocks > 22:
            engine.step()
        engine.abort(group.request_id)
        assert engine.tiers.stats.loaded_tokens == {"disk": 32}
        assert group.output().num_loaded_tokens == 0, "it hit nothing"
        disk.opened.set()
        [output] = llm.generate([{"prompt_token_ids": TEXT[:40]}], GREEDY)
        assert (output.num_cached_tokens, output.num_loaded_tokens) == (32, 0)
