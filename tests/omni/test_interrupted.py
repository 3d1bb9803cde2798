"""Real stages whose requests are interrupted, and outputs that are not what they seem."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from headstart.cache import TokenSequence
from headstart.engine.request import Request
from headstart.omni.pipeline import Pipeline, Progress
from headstart.omni.stage import Input
from tests.omni.pipelines import Speech, collected, request, said
from tests.omni.test_pipeline import PROMPTS, wanted


def preempt(speech: Speech, stage: str) -> None:
    """Take the blocks of the request that runs last, as if another needed them."""
    scheduler = getattr(speech, stage).engine._scheduler
    scheduler._preempt(scheduler.running.pop())


@contextmanager
def held_back(speech: Speech, name: str) -> Iterator[None]:
    """The thinker leaves one request waiting."""
    inner = speech.thinker.is_ready

    def is_ready(waiting: Request) -> bool:
        return waiting.group.request_id != name and inner(waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech.thinker, "is_ready", is_ready)
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
        slow = speech.pipeline.submit(request("slow", PROMPTS["first"]))
        speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            quick = speech.pipeline.submit(request("quick", PROMPTS["first"]))
            finish(speech, quick)
        finish(speech, slow)
        assert seen == [(0, 0), (0, 4), (5, 12)]
        assert said(slow) == said(quick) == wanted("first")


def test_a_thinker_that_resumes_with_a_shorter_hit() -> None:
    with Speech(max_num_batched_tokens=10, num_blocks=9) as speech, resumptions(speech) as seen:
        slow = speech.pipeline.submit(request("slow", PROMPTS["first"]))
        speech.pipeline.step()
        preempt(speech, "thinker")
        with held_back(speech, "slow"):
            finish(speech, speech.pipeline.submit(request("greedy", [60] * 29)))
        finish(speech, slow)
        assert seen == [(0, 0), (0, 0), (10, 0)]
        assert said(slow) == wanted("first")


@pytest.mark.parametrize("steps", [3, 5, 8])
def test_a_talker_that_is_preempted_says_the_same(steps: int) -> None:
    with Speech() as speech:
        progress = speech.pipeline.submit(request("r", PROMPTS["first"]))
        for _ in range(steps):
            speech.pipeline.step()
        preempt(speech, "talker")
        finish(speech, progress)
        assert said(progress) == wanted("first")
        assert speech.talker.engine.num_preemptions == 1


def test_an_output_as_long_as_a_prompt_by_chance_is_never_kept() -> None:
    """`table` has 14 rows whatever is computed, and so has the first prompt."""
    with Speech(undeclared=True) as speech:
        speech.more = {"table": torch.zeros(14, 3)}
        for at, name in enumerate(["first", "other question", "first", "first"]):
            [progress] = speech.run(request(f"{at}", PROMPTS[name]))
            assert said(progress) == wanted(name)
            assert {name for _, name in speech.cache._order} <= {"hidden", "feature", "audio"}
        assert progress.figures["thinker"].hit_rows == {"hidden": 12, "feature": 12}


def test_rows_that_were_handed_on_stay_right_when_everything_behind_them_is_reused() -> None:
    with Speech(num_blocks=11, max_bytes=40_000) as speech:
        stages = list(speech.pipeline.stages.values())
        speech.pipeline = Pipeline(stages, [Input("thinker", "hidden")])
        done = [speech.run(request(f"{n}", PROMPTS["first"]))[0] for n in range(2)]
        assert done[1].figures["thinker"].hit_rows["hidden"] == 12
        first: list[Tensor] = [collected(progress, "thinker", "hidden") for progress in done]
        evicted = speech.cache.stats.evicted
        for n in range(4):
            speech.run(request(f"other {n}", [60 + n] * 30))
        assert speech.cache.stats.evicted > evicted
        [again] = speech.run(request("again", PROMPTS["first"]))
        assert again.figures["thinker"].cached_tokens == 0
        late = [collected(progress, "thinker", "hidden") for progress in done]
        assert all(map(torch.equal, first, late))
        assert torch.allclose(late[1], collected(again, "thinker", "hidden"), atol=1e-5)
