"""Ctrl-C, or no memory, at any line of a pipeline: the next call answers as a fresh one does."""

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart.cache.tree
import headstart.omni
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, HeadstartError
from headstart.omni.engine_stage import EngineStage
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput, OmniParams
from tests.interruptions import Interruption
from tests.omni.tiny_omni import save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3

POINTS = int(os.environ.get("HEADSTART_INTERRUPTIONS", "10"))
"""Lines that are interrupted in each kind of run, of about 600 that it executes."""

FEW = SamplingParams(temperature=0, max_tokens=4)
PARAMS = OmniParams(text=FEW, speech=SamplingParams(temperature=0, max_tokens=6))
HEAD = "<|im_start|><|user|>A prefix of both"
TAIL = "<|im_end|>\n<|im_start|><|assistant|>\n"
PROMPTS = [f"{HEAD}, the first.{TAIL}", f"{HEAD}, and then another.{TAIL}"]


def _interrupted(
    function: Callable[[], object], at: int = -1, error: BaseException | None = None
) -> tuple[Interruption, BaseException | None]:
    """What ran, and what was raised."""
    raised: BaseException | None = None
    with Interruption(at, error, headstart.omni, headstart.cache.tree) as run:
        try:
            function()
        except (Exception, KeyboardInterrupt) as found:
            raised = found
    return run, raised


def check_idle(omni: Omni) -> None:
    assert not omni.pipeline.has_unfinished
    omni.cache.check()
    for stage in omni.pipeline.stages.values():
        assert not stage.has_work
        if isinstance(stage, EngineStage):
            manager = stage.engine.manager
            manager.check()
            assert not stage.engine.has_unfinished
            assert manager.num_free_blocks == stage.engine.config.num_blocks


def said(outputs: list[OmniOutput]) -> list[tuple[list[int], list[Any]]]:
    return [(output.token_ids, output.codes.tolist()) for output in outputs]


def check_answers(omni: Omni, wanted: list[OmniOutput]) -> None:
    outputs = omni.generate(PROMPTS, PARAMS)
    assert said(outputs) == said(wanted)
    for output, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output.audio, expected.audio, rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=[save_qwen25, save_qwen3], ids=["qwen2.5", "qwen3"])
def omni(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = request.param(tmp_path_factory.mktemp("omni"))
    options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 60}
    omni = Omni(folder, options=options)
    yield omni
    omni.close()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_the_next_call_answers_as_a_fresh_pipeline(omni: Omni, warm: bool) -> None:
    omni.reset_cache()
    wanted = omni.generate(PROMPTS, PARAMS)
    if not warm:
        omni.reset_cache()
    counted, raised = _interrupted(lambda: omni.generate(PROMPTS, PARAMS))
    assert raised is None
    chance = random.Random(7 + warm)
    places = sorted(set(counted.lines))
    for place in chance.sample(places, min(POINTS, len(places))):
        at = chance.choice([at for at, line in enumerate(counted.lines) if line == place])
        if not warm:
            omni.reset_cache()
        error = chance.choice([KeyboardInterrupt, MemoryError])
        _, raised = _interrupted(lambda: omni.generate(PROMPTS, PARAMS), at, error("injected"))
        assert raised is None or isinstance(raised, (error, HeadstartError)), place
        omni.pipeline.abort("nothing")  # whatever call comes next
        try:
            check_idle(omni)
            check_answers(omni, wanted)
            check_idle(omni)
        except AssertionError as failure:
            raise AssertionError(f"after {error.__name__} at {place}, line {at}") from failure


@pytest.mark.parametrize("steps", [1, 3])
def test_an_interrupted_call_ends_an_open_stream_with_an_error(omni: Omni, steps: int) -> None:
    stream = omni.stream(PROMPTS[0], PARAMS)
    for _ in range(steps):
        next(stream)
    step = omni.pipeline.stages["talker"].step

    def interrupted() -> Any:
        step()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omni.pipeline.stages["talker"], "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            omni.generate(PROMPTS[1], PARAMS)
    with pytest.raises(EngineError, match="interrupted: KeyboardInterrupt"):
        next(stream)
    check_idle(omni)


def test_a_stream_that_another_call_brings_to_its_end_gives_its_last_output(omni: Omni) -> None:
    """It ended without it."""
    [whole] = omni.generate(PROMPTS[0], PARAMS)
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    omni.generate(PROMPTS[1], OmniParams(text=PARAMS.text, speech=SamplingParams(max_tokens=12)))
    *_, last = stream
    assert last.finished and said([last]) == said([whole])
    check_idle(omni)


@pytest.mark.parametrize("calls", [1, 3], ids=["first step", "third step"])
def test_a_stream_is_collected_in_the_middle_of_another_step(omni: Omni, calls: int) -> None:
    """It was aborted there, and the step ended with an IndexError."""
    wanted = omni.generate(PROMPTS, PARAMS)
    stream: Any = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    left: list[Any] = [stream]
    left.append(left)
    del stream
    runner = omni.pipeline.stages["thinker"].engine._runner  # type: ignore[attr-defined]
    run, done = runner.run, []

    def collecting(batch: Any) -> Any:
        found = run(batch)
        done.append(batch)
        if len(done) == calls:
            left.clear()
            gc.collect()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", collecting)
        assert said(omni.generate(PROMPTS, PARAMS)) == said(wanted)
    assert len(done) >= calls
    check_idle(omni)


def test_a_stream_that_nobody_holds_is_aborted_by_the_next_call(omni: Omni) -> None:
    for _ in omni.stream(PROMPTS[0], PARAMS):
        break
    assert omni.reset_cache()
    check_idle(omni)


def test_after_close_every_call_raises(tmp_path: Path) -> None:
    omni = Omni(save_qwen25(tmp_path), options={"num_blocks": 64})
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    omni.close()
    omni.close()
    for call in (
        lambda: omni.generate(PROMPTS[0], PARAMS),
        lambda: omni.stream(PROMPTS[0], PARAMS),
        lambda: next(stream),
        omni.reset_cache,
        omni.pipeline.step,
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
