"""Load or compute: the engine takes the faster one, and measures before its first decision."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.outputs import RequestOutput
from headstart.engine.tiering.tiers import Tiers, is_worth_loading
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import LoadedBlock
from tests.engine.internals import first_tier, loader_of
from tests.engine.tiny_llm import make_llm, save_smallest

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + (7 * at + 11 * turn) % 140 for at in range(100)] for turn in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stored(model: Path, tmp_path: Path) -> Path:
    """Return a folder that has the prompts."""
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        for tokens in PROMPTS:
            generate(llm, tokens)
    return tmp_path


def generate(llm: LLM, tokens: Sequence[int]) -> RequestOutput:
    [output] = llm.generate([{"prompt_token_ids": list(tokens)}], GREEDY)
    return output


def tiers_of(llm: LLM) -> Tiers:
    assert llm.engine.tiers is not None
    return llm.engine.tiers


class SlowDisk:
    """A store that takes this many seconds for each block of a load after the first."""

    def __init__(self, seconds: float) -> None:
        self.num_blocks = 0  # that were queried
        self._seconds = seconds

    def load(self, _: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        for at, block in enumerate(blocks):
            self.num_blocks += 1
            time.sleep(self._seconds if at else 0)
            yield block


def test_a_load_slower_than_computing_is_not_used(
    model: Path, stored: Path, limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    """Regression: each request loaded a block from a disk slower than computing, like the first."""
    with closing(make_llm(model)) as llm:
        alone = [generate(llm, tokens).outputs[0].token_ids for tokens in PROMPTS]
    limits(chunk_bytes=1, trial=0.02)
    disk_loads((disk := SlowDisk(0.5)).load)
    with closing(make_llm(model, cache_dir=str(stored), debug=True)) as llm:
        outputs = [generate(llm, PROMPTS[0])]
        assert outputs[0].num_loaded_tokens == 16 and disk.num_blocks == 2, "it was tried"
        stats = tiers_of(llm).stats
        assert stats.declined_tokens == 0 and stats.late_answers == 1
        while first_tier(tiers_of(llm)).is_stuck:
            time.sleep(0.01)
        outputs += [generate(llm, tokens) for tokens in PROMPTS[1:]]
        assert [output.num_loaded_tokens for output in outputs[1:]] == [0, 0, 0]
        assert disk.num_blocks == 2 and stats.declined_tokens == 3 * 96
        assert stats.loaded_tokens == {"disk": 16}
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_a_load_faster_than_computing_is_used(
    model: Path,
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: Callable[..., None],
    disk_loads: Callable[..., None],
) -> None:
    limits(chunk_bytes=1, trial=0.02)
    disk_loads((disk := SlowDisk(0.001)).load)
    with closing(make_llm(model, cache_dir=str(stored), debug=True)) as llm:
        monkeypatch.setattr(tiers_of(llm)._rate, "add", lambda tokens, seconds: None)
        tiers_of(llm)._rate.value = 100.0  # tokens a second: a block takes 160 times as long
        assert [generate(llm, tokens).num_loaded_tokens for tokens in PROMPTS] == [96] * 4
        assert disk.num_blocks == 24 and tiers_of(llm).stats.declined_tokens == 0


def test_a_new_process_reads_the_rate_of_the_previous_one(model: Path, stored: Path) -> None:
    """Regression: it had no rate before its first prompt, and loaded every stored block."""
    with closing(make_llm(model, cache_dir=str(stored))) as llm:
        tiers = tiers_of(llm)
        assert tiers._rate.value is None and 0 < tiers._chain.block_seconds < 10
        assert tiers._compute_rate == 16 / tiers._chain.block_seconds
        loader_of(tiers).rate = tiers._payload.nbytes / 60  # a minute for a block
        assert generate(llm, PROMPTS[0]).num_loaded_tokens == 0
        assert tiers.stats.declined_tokens == 96


def test_the_decision_depends_on_both_rates() -> None:
    assert is_worth_loading(1000, 10_000, compute=100.0, load=2000.0)
    assert not is_worth_loading(1000, 10_000, compute=100.0, load=999.0)
    assert not is_worth_loading(1, 1, compute=1e6, load=1e9), "a load has a fixed cost"
    assert is_worth_loading(1, 10**9, compute=None, load=1.0), "it is tried"


def test_queues_are_bounded_by_a_share_of_the_pool(model: Path, tmp_path: Path) -> None:
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        nbytes = tiers_of(llm)._payload.nbytes
        for blocks, expected in (
            (1, 16 << 20),
            ((128 << 20) // nbytes, 32 << 20),
            ((8 << 30) // nbytes, 256 << 20),
        ):
            assert tiers_of(llm).bound_queue(blocks * nbytes) == pytest.approx(expected, rel=0.01)
