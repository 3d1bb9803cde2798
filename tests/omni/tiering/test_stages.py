"""Single stages whose blocks outlive the process, in a pipeline of no known model."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headstart.engine.parts import identify
from headstart.engine.tiering.tiers import Tiers
from headstart.omni.pipeline import Progress
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import LoadedBlock
from tests.engine.internals import kv_memory
from tests.omni.pipelines import Speech, request, result_of, start

pytestmark = pytest.mark.usefixtures("loads_always")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]


def tiers(speech: Speech, stage: str) -> Tiers:
    stage_tiers: Tiers | None = getattr(speech, stage).engine.tiers
    assert stage_tiers is not None
    return stage_tiers


def run(speech: Speech, prompt: list[int] = PROMPT, **more: Any) -> Progress:
    [progress] = speech.run(request("one", prompt, **more))
    return progress


def skipped(progress: Progress) -> tuple[int, int]:
    """Return the tokens that thinker and talker did not compute."""
    return progress.metrics["thinker"].cached_tokens, progress.metrics["talker"].cached_tokens


def test_a_stage_may_have_several_outputs(tmp_path: Path) -> None:
    with Speech() as speech:
        alone = run(speech)
        again = run(speech)
    for expected in ((0, 0), skipped(again)):
        with Speech(cache_dir=str(tmp_path)) as speech:
            restarted = run(speech)
            assert skipped(restarted) == expected
            assert result_of(restarted) == result_of(alone)
    assert restarted.metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}
    assert tiers(speech, "thinker").stats.saved_blocks == 0, "all blocks are stored already"


def test_the_fingerprint_covers_a_stages_rows(tmp_path: Path) -> None:
    with Speech(cache_dir=str(tmp_path)) as speech:
        engine = speech.thinker.engine
        memory = kv_memory(engine)
        records = [
            identify(engine.model, memory, engine.config, None, rows)
            for rows in (None, speech.thinker.stored_rows, speech.talker.stored_rows)
        ]
        assert len({record.fingerprint for record in records}) == 3
        assert records[1].fingerprint == engine.manager.hasher.model
        rows_bytes = 4 * (32 + 16) * 4  # tokens of a block, widths, float32
        more = [record.block_bytes - memory.block_bytes for record in records]
        assert more == [0, rows_bytes, 0]
        titles = [record.title.partition(" (")[0].partition(",")[2] for record in records]
        assert titles == ["", " thinker", " talker"]


def test_a_talkers_rows_may_arrive_while_its_prefix_is_loaded(
    tmp_path: Path, disk_loads: Callable[..., None]
) -> None:
    """Regression: hashes of rows reached past the loaded tokens, and the load raised an error."""
    with Speech(cache_dir=str(tmp_path)) as speech:
        first = run(speech)
    thought = Event()

    def load_late(store: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        assert "talker" not in store.model.title or thought.wait(60)
        yield from blocks

    disk_loads(load_late)
    with Speech(cache_dir=str(tmp_path)) as speech:
        progress = start(speech.pipeline, request("one", PROMPT))
        while "thinker" not in progress.metrics:
            speech.pipeline.step()
        thought.set()
        while progress.finish_reason is None:
            speech.pipeline.step()
        assert skipped(progress) == (12, 12)
        assert result_of(progress) == result_of(first)


def test_a_talkers_blocks_are_not_stored_if_the_thinkers_hashes_lack_its_model(
    tmp_path: Path,
) -> None:
    """Regression: rows of other thinkers had the same hashes, and were hit."""
    options = {"cache_dir": str(tmp_path)}
    for seed in (1, 2):
        with Speech(text_seed=seed) as speech:
            alone = run(speech)
        with Speech(text_seed=seed, talker_options=options) as speech:
            progress = run(speech)
            assert skipped(progress) == (0, 0) and result_of(progress) == result_of(alone)
            assert skipped(run(speech)) == (12, 12), "hits within the process are unchanged"


def test_a_stage_with_undeclared_outputs_stores_nothing(
    tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    """Undeclared rows may turn out not to be per token, so none are stored."""
    for _ in range(2):
        with Speech(cache_dir=str(tmp_path), undeclared=True) as speech:
            assert speech.thinker.engine.tiers is None
            progress = run(speech)
            assert skipped(progress)[0] == 0
            run(speech, PROMPT[:9])  # a pass of another length confirms the rows
            run(speech)
            assert run(speech).metrics["thinker"].hit_rows
    assert skipped(progress)[1] > 0, "the talker's blocks are keyed by the rows' content"
    assert [record.getMessage() for record in logged] == [
        "stage 'thinker' stores nothing on disk, as its outputs are not declared"
    ] * 2


def test_a_small_pool_gives_the_results_of_a_large_one(tmp_path: Path) -> None:
    """Requests are preempted, and their evicted blocks are loaded from the store."""
    prompts = [[*PROMPT, i, *PROMPT[i : i + 4]] for i in range(6)]
    requests = [request(str(i), prompt) for i, prompt in enumerate(prompts)]
    with Speech() as speech:
        wanted = [result_of(progress) for progress in speech.run(*requests)]
    for _ in range(2):
        with Speech(num_blocks=12, cache_dir=str(tmp_path)) as speech:
            for _ in range(3):
                assert [result_of(progress) for progress in speech.run(*requests)] == wanted
                for stage in ("thinker", "talker"):
                    assert tiers(speech, stage).flush(30)
            # The store may have nothing before the first round is over.
            for stage in ("thinker", "talker"):
                assert tiers(speech, stage).stats.loaded_tokens
            assert speech.thinker.engine.num_preemptions


def test_a_store_that_does_not_answer_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    with Speech(cache_dir=str(tmp_path)) as speech:
        first = run(speech)
    late = Event()
    limits(deadline=0.05)
    monkeypatch.setattr(DiskStore, "find", lambda store, names: late.wait(60) and 0)
    with Speech(cache_dir=str(tmp_path)) as speech:
        progress = run(speech)
        assert skipped(progress) == (0, 0) and result_of(progress) == result_of(first)
        assert tiers(speech, "thinker").stats.late_answers == 1
        late.set()
