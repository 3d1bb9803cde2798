"""Counts per tier of blocks that were not stored, and of faults."""

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


def read_counter(llm: LLM, name: str) -> dict[tuple[str, ...], int]:
    metrics = [metric for metric in llm.get_metrics() if metric.name == f"headstart:{name}"]
    return {tuple(one.labels.values()): one.value for one in metrics if isinstance(one, Counter)}


def test_blocks_that_a_paused_tier_does_not_store_are_counted(model: Path, tmp_path: Path) -> None:
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        assert read_counter(llm, "unsaved_blocks") == {("disk",): 0} and not read_counter(
            llm, "tier_faults"
        )
        assert llm.engine.tiers is not None
        first_tier(llm.engine.tiers).pause.failed("it does not answer", "on purpose")
        llm.generate([PROMPT], GREEDY)
        stats = counted(llm)
        assert (stats.saved_blocks, stats.dropped_blocks) == (0, 0)
        assert stats.unsaved_blocks == {"disk": 6} and read_counter(llm, "unsaved_blocks") == {
            ("disk",): 6
        }
        assert read_counter(llm, "tier_faults") == {("disk", "it does not answer"): 1}
        assert read_counter(llm, "late_answers") == {(): 1}


def test_a_missing_server_does_not_affect_the_disk(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    url = f"unix://{tmp_path / 'nobody'}"
    with closing(make_llm(model, cache_dir=str(tmp_path / "kept"), remote_cache=url)) as llm:
        llm.generate([PROMPT], GREEDY)
        stats = counted(llm)
        assert stats.saved_blocks == 6 and stats.unsaved_blocks == {"disk": 0, "remote": 6}
        assert stats.faults == {("remote", "the server does not answer"): 1}
        assert stats.late_answers == 0, "the connection is refused at once"


def test_a_missing_folder_is_a_fault_and_its_unsaved_blocks_are_counted(
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
