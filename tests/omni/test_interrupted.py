"""Real stages with preempted requests, and outputs that only look like rows per token."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.cache import TokenSequence
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request
from headstart.errors import EngineError
from headstart.omni.pipeline import Pipeline, Progress
from headstart.omni.stage import TOKENS, Event, Input, OutputEvent, StageFinished
from tests.engine.internals import preempt_last
from tests.omni.pipelines import Speech, collected, oracle, request, result_of, start
from tests.omni.test_pipeline import PROMPTS, wanted

COLLECTS = (Input("thinker", TOKENS), Input("talker", TOKENS), Input("vocoder", "audio"))


def preempt(speech: Speech, stage: str) -> None:
    """Preempt the last running request, as if another one needed its blocks."""
    preempt_last(getattr(speech, stage).engine)


@contextmanager
def held_back(speech: Speech, name: str) -> Iterator[None]:
    """Make the thinker leave one request waiting."""
    inner = speech.thinker.reach

    def reach(waiting: Request, start: int, stop: int) -> int | None:
        return None if waiting.group.request_id == name else inner(waiting, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech.thinker, "reach", reach)
        yield


@contextmanager
def resumptions(speech: Speech) -> Iterator[list[tuple[int, int]]]:
    """Collect (rows passed on, tokens skipped) of each admission to the thinker."""
    rows = speech.thinker.rows
    inner, admissions = rows.admitted, []

    def admitted(sequence: TokenSequence, start: int) -> None:
        admissions.append((rows.watermark(sequence), start))
        inner(sequence, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "admitted", admitted)
        yield admissions


def finish(speech: Speech, progress: Progress) -> None:
    while progress.finish_reason is None:
        speech.pipeline.step()


def test_a_thinker_that_resumes_with_a_longer_hit() -> None:
    with Speech(max_num_batched_tokens=5) as speech, resumptions(speech) as admissions:
        slow = start(speech.pipeline, request("slow", PROMPTS["first"]))
        speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            quick = start(speech.pipeline, request("quick", PROMPTS["first"]))
            finish(speech, quick)
        finish(speech, slow)
        assert admissions == [(0, 0), (0, 4), (5, 12)]
        assert result_of(slow) == result_of(quick) == wanted("first")


@pytest.mark.parametrize(("steps", "num_passed"), [(1, 10), (4, 16)])
def test_a_thinker_that_resumes_with_a_shorter_hit(steps: int, num_passed: int) -> None:
    """The rows passed on before end between two chunks of 10 tokens, or within one."""
    options = {"max_num_batched_tokens": 10, "num_blocks": 9}
    with (
        Speech(**options, talker_options={"num_blocks": 64}) as speech,
        resumptions(speech) as admissions,
    ):
        slow = start(speech.pipeline, request("slow", PROMPTS["first"]))
        for _ in range(steps):
            speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            finish(speech, start(speech.pipeline, request("greedy", [60] * 29)))
        finish(speech, slow)
        assert admissions == [(0, 0), (0, 0), (num_passed, 0)]
        assert result_of(slow) == wanted("first")


@pytest.mark.parametrize("steps", [3, 5, 8])
def test_a_preempted_talker_gives_the_same_result(steps: int) -> None:
    with Speech() as speech:
        progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        for _ in range(steps):
            speech.pipeline.step()
        preempt(speech, "talker")
        finish(speech, progress)
        assert result_of(progress) == wanted("first")
        assert speech.talker.engine.num_preemptions == 1


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"deterministic": True}], ids=str
)
def test_rows_that_are_not_finite_are_dropped_with_their_request(options: dict[str, Any]) -> None:
    """Regression: they stayed in the store, and the next hit passed them to the talker."""
    with Speech(**options) as speech:
        token = PROMPTS["first"][6]
        clean = speech.embeddings[token].clone()
        speech.embeddings[token] = torch.inf
        [failed] = speech.run(request("failed", PROMPTS["first"]))
        assert isinstance(failed.error, EngineError) and "not finite" in str(failed.error)
        speech.embeddings[token] = clean
        for voice in ("cold", "warm"):  # with a cached voice, the talker needs no rows
            options = {"talker": {"voice": voice}}
            [progress] = speech.run(request(voice, PROMPTS["first"], options=options))
            assert result_of(progress) == wanted("first")
        assert progress.metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_a_request_that_fails_at_its_start_ends_alone() -> None:
    """Regression: closing its unopened rows raised KeyError, which ended all requests."""
    with Speech() as speech:
        other = start(speech.pipeline, request("other", PROMPTS["first"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speech.thinker.rows, "open", raising(MemoryError("none left")))
            progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        finish(speech, progress)
        assert "none left" in str(progress.error)
        finish(speech, other)
        assert result_of(other) == wanted("first")


def test_a_step_without_work_does_not_end_requests() -> None:
    """Regression: the next call ended every request."""
    with Speech() as speech:
        progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speech.vocoder, "_can_run", lambda state: False)
            with pytest.raises(EngineError, match="1 requests wait, and no stage has work"):
                finish(speech, progress)
        finish(speech, progress)
        assert result_of(progress) == wanted("first")


def test_an_output_as_long_as_a_prompt_by_chance_is_never_reused() -> None:
    """`table` always has 14 rows, and so has the first prompt."""
    with Speech(undeclared=True) as speech:
        speech.more = {"table": torch.zeros(14, 3)}
        stages = list(speech.pipeline.stages.values())
        speech.pipeline = Pipeline(stages, [*COLLECTS, Input("thinker", "table")])
        for i, name in enumerate(["first", "other question", "first", "first"]):
            [progress] = speech.run(request(f"{i}", PROMPTS[name]))
            assert result_of(progress) == wanted(name)
        assert progress.metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}


def test_rows_passed_on_stay_valid_when_their_memory_is_reused() -> None:
    with Speech(num_blocks=11, max_bytes=40_000) as speech:
        stages = list(speech.pipeline.stages.values())
        speech.pipeline = Pipeline(stages, [Input("thinker", "hidden")])
        done = [speech.run(request(f"{n}", PROMPTS["first"]))[0] for n in range(2)]
        assert done[1].metrics["thinker"].hit_rows["hidden"] == 12
        first: list[Tensor] = [collected(progress, "thinker", "hidden") for progress in done]
        evicted = speech.cache.stats.evicted
        for n in range(4):
            speech.run(request(f"other {n}", [60 + n] * 30))
        assert speech.cache.stats.evicted > evicted
        [again] = speech.run(request("again", PROMPTS["first"]))
        assert again.metrics["thinker"].cached_tokens == 0
        late = [collected(progress, "thinker", "hidden") for progress in done]
        assert all(map(torch.equal, first, late))
        assert torch.allclose(late[1], collected(again, "thinker", "hidden"), atol=1e-5)


def test_unused_outputs_are_neither_stored_nor_required() -> None:
    with Speech() as speech:
        talker = speech.talker.spec
        takes = tuple(source for source in talker.takes if source.output == "hidden")
        speech.talker.spec = dataclasses.replace(talker, takes=takes)
        speech.pipeline = Pipeline(list(speech.pipeline.stages.values()), COLLECTS)
        speech.run(request("cold", PROMPTS["first"]))
        assert {name for _, name in speech.cache._order} == {"hidden", "audio"}
        [warm] = speech.run(request("warm", PROMPTS["first"]))
        assert result_of(warm) == wanted("first")
        assert warm.metrics["thinker"].hit_rows == {"hidden": 12}


def test_one_step_runs_several_requests_in_different_stages() -> None:
    """The first is in the talker and vocoder while the second is in the thinker."""
    with Speech(max_num_batched_tokens=3) as speech:
        busy: dict[str, set[str]] = {}
        for name, stage in speech.pipeline.stages.items():
            busy[name] = set()
            stage.step = noted(stage.step, busy[name])  # type: ignore[method-assign]
        talk = {"talker": SamplingParams(temperature=0, max_tokens=11)}
        first = start(speech.pipeline, request("first", PROMPTS["first"], params=talk))
        while not first.chunks[Input("vocoder", "audio")]:
            speech.pipeline.step()
        second = start(speech.pipeline, request("second", [*range(50, 74)]))
        combinations = set()
        while speech.pipeline.has_unfinished:
            for names in busy.values():
                names.clear()
            speech.pipeline.step()
            combinations.add(tuple("".join(sorted(name[0] for name in busy[s])) for s in STAGES))
        assert ("s", "f", "f") in combinations  # thinker, talker, vocoder: second, first, first
        assert result_of(first) == wanted("first")
        assert result_of(second)[:2] == oracle([*range(50, 74)])


STAGES = ("thinker", "talker", "vocoder")


def noted(step: Callable[[], list[Event]], names: set[str]) -> Callable[[], list[Event]]:
    """Record the requests whose rows, tokens or end a step returns."""

    def wrapper() -> list[Event]:
        events = step()
        names.update(
            event.request_id for event in events if isinstance(event, OutputEvent | StageFinished)
        )
        return events

    return wrapper
