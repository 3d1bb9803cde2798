"""Real stages whose requests are interrupted, and outputs that are not what they seem."""

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
from tests.omni.pipelines import Speech, collected, oracle, request, said, start
from tests.omni.test_pipeline import PROMPTS, wanted

COLLECTS = (Input("thinker", TOKENS), Input("talker", TOKENS), Input("vocoder", "audio"))


def preempt(speech: Speech, stage: str) -> None:
    """Take the blocks of the request that runs last, as if another needed them."""
    preempt_last(getattr(speech, stage).engine)


@contextmanager
def held_back(speech: Speech, name: str) -> Iterator[None]:
    """The thinker leaves one request waiting."""
    inner = speech.thinker.reach

    def reach(waiting: Request, start: int, stop: int) -> int | None:
        return None if waiting.group.request_id == name else inner(waiting, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech.thinker, "reach", reach)
        yield


@contextmanager
def resumptions(speech: Speech) -> Iterator[list[tuple[int, int]]]:
    """(rows handed on, tokens skipped) of each admission to the thinker."""
    rows = speech.thinker.rows
    inner, seen = rows.admitted, []

    def admitted(sequence: TokenSequence, start: int) -> None:
        seen.append((rows.watermark(sequence), start))
        inner(sequence, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "admitted", admitted)
        yield seen


def finish(speech: Speech, progress: Progress) -> None:
    while progress.finish_reason is None:
        speech.pipeline.step()


def test_a_thinker_that_resumes_with_a_longer_hit() -> None:
    with Speech(max_num_batched_tokens=5) as speech, resumptions(speech) as seen:
        slow = start(speech.pipeline, request("slow", PROMPTS["first"]))
        speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            quick = start(speech.pipeline, request("quick", PROMPTS["first"]))
            finish(speech, quick)
        finish(speech, slow)
        assert seen == [(0, 0), (0, 4), (5, 12)]
        assert said(slow) == said(quick) == wanted("first")


@pytest.mark.parametrize(("steps", "given"), [(1, 10), (4, 16)])
def test_a_thinker_that_resumes_with_a_shorter_hit(steps: int, given: int) -> None:
    """Computed again in tens, the rows that were given end between two chunks, or within one."""
    options = {"max_num_batched_tokens": 10, "num_blocks": 9}
    with (
        Speech(**options, talker_options={"num_blocks": 64}) as speech,
        resumptions(speech) as seen,
    ):
        slow = start(speech.pipeline, request("slow", PROMPTS["first"]))
        for _ in range(steps):
            speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            finish(speech, start(speech.pipeline, request("greedy", [60] * 29)))
        finish(speech, slow)
        assert seen == [(0, 0), (0, 0), (given, 0)]
        assert said(slow) == wanted("first")


@pytest.mark.parametrize("steps", [3, 5, 8])
def test_a_talker_that_is_preempted_says_the_same(steps: int) -> None:
    with Speech() as speech:
        progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        for _ in range(steps):
            speech.pipeline.step()
        preempt(speech, "talker")
        finish(speech, progress)
        assert said(progress) == wanted("first")
        assert speech.talker.engine.num_preemptions == 1


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"deterministic": True}], ids=str
)
def test_rows_that_are_not_finite_are_gone_with_their_request(options: dict[str, Any]) -> None:
    """They stayed in the store, and the talker was given them with the next hit."""
    with Speech(**options) as speech:
        token = PROMPTS["first"][6]
        clean = speech.embeddings[token].clone()
        speech.embeddings[token] = torch.inf
        [failed] = speech.run(request("failed", PROMPTS["first"]))
        assert isinstance(failed.error, EngineError) and "not finite" in str(failed.error)
        speech.embeddings[token] = clean
        for voice in ("cold", "warm"):  # a talker that has spoken with a voice needs no rows again
            options = {"talker": {"voice": voice}}
            [progress] = speech.run(request(voice, PROMPTS["first"], options=options))
            assert said(progress) == wanted("first")
        assert progress.metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_a_request_that_fails_as_it_begins_ends_alone() -> None:
    """Its rows were closed, which were not open yet: a KeyError ended all requests."""
    with Speech() as speech:
        other = start(speech.pipeline, request("other", PROMPTS["first"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speech.thinker.rows, "open", raising(MemoryError("none left")))
            progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        finish(speech, progress)
        assert "none left" in str(progress.error)
        finish(speech, other)
        assert said(other) == wanted("first")


def test_a_step_without_work_is_no_interruption() -> None:
    """The call after it ended every request."""
    with Speech() as speech:
        progress = start(speech.pipeline, request("r", PROMPTS["first"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speech.vocoder, "_can_run", lambda state: False)
            with pytest.raises(EngineError, match="1 requests wait, and no stage has work"):
                finish(speech, progress)
        finish(speech, progress)
        assert said(progress) == wanted("first")


def test_an_output_as_long_as_a_prompt_by_chance_is_never_reused() -> None:
    """`table` always has 14 rows, and so has the first prompt."""
    with Speech(undeclared=True) as speech:
        speech.more = {"table": torch.zeros(14, 3)}
        stages = list(speech.pipeline.stages.values())
        speech.pipeline = Pipeline(stages, [*COLLECTS, Input("thinker", "table")])
        for at, name in enumerate(["first", "other question", "first", "first"]):
            [progress] = speech.run(request(f"{at}", PROMPTS[name]))
            assert said(progress) == wanted(name)
        assert progress.metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}


def test_rows_that_were_handed_on_stay_right_when_everything_behind_them_is_reused() -> None:
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


def test_what_nobody_takes_is_neither_kept_nor_missed() -> None:
    with Speech() as speech:
        talker = speech.talker.spec
        taken = tuple(taken for taken in talker.takes if taken.output == "hidden")
        speech.talker.spec = dataclasses.replace(talker, takes=taken)
        speech.pipeline = Pipeline(list(speech.pipeline.stages.values()), COLLECTS)
        speech.run(request("cold", PROMPTS["first"]))
        assert {name for _, name in speech.cache._order} == {"hidden", "audio"}
        [warm] = speech.run(request("warm", PROMPTS["first"]))
        assert said(warm) == wanted("first")
        assert warm.metrics["thinker"].hit_rows == {"hidden": 12}


def test_requests_of_several_users_are_in_several_stages_in_one_step() -> None:
    """The first is being voiced and spoken while the second is still being read."""
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
        seen = set()
        while speech.pipeline.has_unfinished:
            for names in busy.values():
                names.clear()
            speech.pipeline.step()
            seen.add(tuple("".join(sorted(name[0] for name in busy[s])) for s in STAGES))
        assert ("s", "f", "f") in seen  # thinker, talker, vocoder: second, first, first
        assert said(first) == wanted("first")
        assert said(second)[:2] == oracle([*range(50, 74)])


STAGES = ("thinker", "talker", "vocoder")


def noted(step: Callable[[], list[Event]], names: set[str]) -> Callable[[], list[Event]]:
    """Notes whose rows, tokens or end a step brings."""

    def wrapper() -> list[Event]:
        events = step()
        names.update(
            event.request_id for event in events if isinstance(event, OutputEvent | StageFinished)
        )
        return events

    return wrapper
