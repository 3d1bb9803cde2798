"""Counts of blocks that tiers did not store, and of their faults, by tier."""

from contextlib import closing
from pathlib import Path

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.metrics import Counter
from headstart.engine.tiering.tiers import TierStats
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import DiskIndex
from tests.engine.internals import first_tier
from tests.engine.tiny_llm import make_llm, save_smallest

PROMPT = {"prompt_token_ids": list(range(3, 103))}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


def counted(llm: LLM) -> TierStats:
    tiers = llm.engine.tiers
    assert tiers is not None and tiers.flush(20)
    return tiers.stats


def told(llm: LLM, name: str) -> dict[tuple[str, ...], int]:
    found = [metric for metric in llm.get_metrics() if metric.name == f"headstart:{name}"]
    return {tuple(one.labels.values()): one.value for one in found if isinstance(one, Counter)}


def test_what_is_not_saved_while_a_tier_is_left_alone_is_counted(
    model: Path, tmp_path: Path
) -> None:
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        assert told(llm, "unsaved_blocks") == {("disk",): 0} and not told(llm, "tier_faults")
        assert llm.engine.tiers is not None
        first_tier(llm.engine.tiers).pause.failed("it does not answer", "on purpose")
        llm.generate([PROMPT], GREEDY)
        stats = counted(llm)
        assert (stats.saved_blocks, stats.dropped_blocks) == (0, 0)
        assert stats.unsaved_blocks == {"disk": 6} and told(llm, "unsaved_blocks") == {("disk",): 6}
        assert told(llm, "tier_faults") == {("disk", "it does not answer"): 1}
        assert told(llm, "late_answers") == {(): 1}


def test_a_server_that_is_gone_costs_the_disk_nothing(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    gone = f"unix://{tmp_path / 'nobody'}"
    with closing(make_llm(model, cache_dir=str(tmp_path / "kept"), remote_cache=gone)) as llm:
        llm.generate([PROMPT], GREEDY)
        stats = counted(llm)
        assert stats.saved_blocks == 6 and stats.unsaved_blocks == {"disk": 0, "remote": 6}
        assert stats.faults == {("remote", "the server does not answer"): 1}
        assert stats.late_answers == 0, "it said at once that it is not there"


def test_a_folder_that_is_gone_is_a_fault_and_what_it_did_not_take_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskStore._open

    def fail(store: DiskStore, name: str) -> DiskIndex:
        if name == "changes":
            raise OSError("the folder is gone, on purpose")
        return real(store, name)

    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "_open", fail)
            llm.generate([PROMPT], GREEDY)
            stats = counted(llm)
        assert stats.saved_blocks == 0 and stats.unsaved_blocks == {"disk": 6}
        assert stats.faults == {("disk", "a file cannot be used"): 1}
