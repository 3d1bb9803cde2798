"""`Omni` and `AsyncOmni`: threads, signals, failures of a stage, streams and `close`."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import AsyncOmni, Omni, OmniOutput, OmniParams, SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.frontend import frontend
from headstart.omni.engine_stage import EngineStage
from tests.forked import run_program
from tests.omni.tiny_omni import save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3

PARAMS = OmniParams(
    text=SamplingParams(temperature=0, max_tokens=4),
    speech=SamplingParams(temperature=0, max_tokens=6),
)
TEXT = OmniParams(text=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), audio=False)
HEAD = "<|im_start|><|user|>A prefix of both"
TAIL = "<|im_end|>\n<|im_start|><|assistant|>\n"
PROMPTS = [f"{HEAD}, the first.{TAIL}", f"{HEAD}, and then another.{TAIL}"]


@pytest.fixture(scope="module", params=[save_qwen25, save_qwen3], ids=["qwen2.5", "qwen3"])
def omni(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    folder = request.param(tmp_path_factory.mktemp("omni"))
    options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 60}
    with closing(Omni(folder, options=options)) as omni:
        yield omni


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def async_omni(folder: Path) -> Iterator[AsyncOmni]:
    with closing(AsyncOmni(folder, options={"num_blocks": 128})) as omni:
        yield omni


def check_idle(omni: Omni) -> None:
    """Check between two steps, after all earlier calls, that nothing is held."""

    def check() -> None:
        assert not omni.pipeline.has_unfinished
        omni.cache.check()
        for stage in omni.pipeline.stages.values():
            assert not stage.has_work
            if isinstance(stage, EngineStage):
                manager = stage.engine.manager
                manager.check()
                assert not stage.engine.has_unfinished
                assert manager.num_free_blocks == stage.engine.config.num_blocks

    omni._driver.call(check)


def results_of(outputs: list[OmniOutput]) -> list[tuple[list[int], list[Any]]]:
    return [(output.token_ids, output.codes.tolist()) for output in outputs]


def check_answers(omni: Omni, wanted: list[OmniOutput]) -> None:
    outputs = omni.generate(PROMPTS, PARAMS)
    assert results_of(outputs) == results_of(wanted)
    for output, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output.audio, expected.audio, rtol=0, atol=1e-4)
    check_idle(omni)


@pytest.mark.parametrize("name", ["thinker", "talker"])
@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_failed_stage_ends_all_requests_and_later_ones_run(
    omni: Omni, name: str, kind: type[Exception]
) -> None:
    wanted = omni.generate(PROMPTS, PARAMS)
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    step = omni.pipeline.stages[name].step

    def broken() -> Any:
        step()
        raise kind("a stage broke")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omni.pipeline.stages[name], "step", broken)
        with pytest.raises(EngineError, match=f"{kind.__name__}: a stage broke"):
            omni.generate(PROMPTS[1], PARAMS)
    with pytest.raises(EngineError, match="a stage broke"):
        list(stream)
    check_answers(omni, wanted)


def test_calls_and_streams_of_several_threads_share_the_steps(omni: Omni) -> None:
    wanted = omni.generate(PROMPTS, PARAMS)
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(omni.generate, PROMPTS[1], PARAMS)
        *_, last = stream
        assert last.finished and results_of([last]) == results_of(wanted[:1])
        assert results_of(other.result(60)) == results_of(wanted[1:])
    check_idle(omni)


@pytest.mark.parametrize("end", ["collected", "closed", "aborted"])
def test_a_stream_that_ends_early_holds_nothing(omni: Omni, end: str) -> None:
    wanted = omni.generate(PROMPTS, PARAMS)
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    if end == "closed":
        stream.close()
    elif end == "aborted":
        stream.abort()
        *_, last = stream
        assert last.finished
    del stream
    gc.collect()
    check_idle(omni)
    assert omni.reset_cache()
    check_answers(omni, wanted)


def test_the_cache_is_not_reset_while_a_request_runs(omni: Omni) -> None:
    stream = omni.stream(PROMPTS[0], PARAMS)
    next(stream)
    was_reset = omni.reset_cache()
    still_runs = omni._driver.call(lambda: omni.pipeline.has_unfinished)
    assert not (was_reset and still_runs)
    stream.close()
    assert omni.reset_cache()


def test_after_close_every_call_raises(tmp_path: Path) -> None:
    omni = Omni(save_qwen25(tmp_path), options={"num_blocks": 64})
    long = replace(PARAMS.speech, max_tokens=900, ignore_eos=True)
    stream = omni.stream(PROMPTS[0], replace(PARAMS, speech=long))
    next(stream)
    omni.close()
    omni.close()
    for call in (
        lambda: omni.generate(PROMPTS[0], PARAMS),
        lambda: omni.stream(PROMPTS[0], PARAMS),
        lambda: list(stream),
        omni.reset_cache,
        omni.pipeline.step,
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


_SIGNALS = """
import random, signal, sys
from headstart import Omni, OmniParams, SamplingParams
params = OmniParams(
    text=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    speech=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
)
omni = Omni(sys.argv[1], options={"num_blocks": 64, "block_size": 4})
prompts = ["A prefix of both, the first.", "A prefix of both, and then another."]
wanted = [(o.token_ids, o.codes.tolist()) for o in omni.generate(prompts, params)]
chance, interrupted = random.Random(0), 0
for turn in range(24):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.08))
        if turn % 2:
            list(omni.stream(prompts[0], params))
        else:
            omni.generate(prompts, params)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    assert not omni._driver.call(lambda: omni.pipeline.has_unfinished)
    assert omni.reset_cache() or turn
answers = [(o.token_ids, o.codes.tolist()) for o in omni.generate(prompts, params)]
assert answers == wanted
omni.close()
print("interrupted", interrupted)
"""


def test_ctrl_c_ends_a_call_and_the_next_one_runs(tmp_path: Path) -> None:
    done = run_program(_SIGNALS, save_qwen25(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 5


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    async_omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 12 MB of text blocked the pipeline's thread, which tokenizes, for 32 s."""

    def tokenize(*_: object, **__: object) -> list[int]:
        raise AssertionError("it is tokenized")

    monkeypatch.setattr(frontend, "encode_text", tokenize)
    with pytest.raises(RequestError, match="bytes of text; allowed"):
        asyncio.run(async_omni.generate("hello " * 1_000_000, TEXT))


def test_a_failed_stream_raises_at_once_and_holds_nothing(async_omni: AsyncOmni) -> None:
    """This works even while the pipeline's thread runs another request's step."""
    gate = threading.Event()

    async def ask() -> None:
        streams = [await async_omni.start("Who?", TEXT) for _ in range(3)]
        assert (await anext(streams[0])).text is not None
        busy = asyncio.ensure_future(async_omni.call(lambda: gate.wait(60)))
        left = asyncio.ensure_future(anext(streams[1]))
        await asyncio.sleep(0)
        for stream in (streams[0], streams[2]):
            stream.fail(RequestError("too late"))
        left.cancel()
        for stream in (streams[0], streams[2]):
            with pytest.raises(RequestError, match="too late"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not busy.done()
        gate.set()
        await busy
        pipeline = async_omni.omni.pipeline
        assert not await async_omni.call(lambda: pipeline.has_unfinished)

    try:
        asyncio.run(ask())
    finally:
        gate.set()


def test_an_async_pipeline_is_closed_once(folder: Path) -> None:
    omni = AsyncOmni(folder, options={"num_blocks": 64})
    assert omni.is_running and asyncio.run(omni.generate("Who?", TEXT)).finished
    omni.close()
    omni.close()
    assert not omni.is_running
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(omni.generate("Who?", TEXT))
