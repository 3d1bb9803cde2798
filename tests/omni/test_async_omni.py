"""`AsyncOmni` at the edges of threads: the garbage collector, interruptions, hostile prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headstart import OmniParams, SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.frontend import inputs
from headstart.omni.async_omni import AsyncOmni
from tests.omni.tiny_qwen3 import save_qwen3

PARAMS = OmniParams(
    text=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    speech=SamplingParams(temperature=0, max_tokens=4),
    audio=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def omni(folder: Path) -> Iterator[AsyncOmni]:
    with closing(AsyncOmni(folder, options={"num_blocks": 128})) as omni:
        yield omni


def test_a_stream_may_be_collected_while_its_thread_submits(omni: AsyncOmni) -> None:
    """The collector runs where memory is allocated, so also below the lock of the pool."""
    streams = [asyncio.run(omni.start("Who?", PARAMS))]

    def collect() -> None:
        with omni._pool._shutdown_lock:
            streams.clear()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(10)
    is_stuck = collector.is_alive()
    if is_stuck:  # or the pool could not be closed
        omni._pool._shutdown_lock.release()
    assert not is_stuck, "the collector waits for the lock that its thread has"
    pipeline = omni.omni.pipeline
    assert not asyncio.run(omni.call(lambda: pipeline.has_unfinished))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupted_stage_leaves_the_event_loop(
    omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """An event loop ends by such an exception of a task, and with it all other requests."""

    def interrupt() -> None:
        raise kind

    async def ask() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(omni.omni.pipeline.stages["thinker"], "step", interrupt)
            with pytest.raises(EngineError, match=kind.__name__):
                await omni.generate("Who?", PARAMS)
        return (await omni.generate("Who?", PARAMS)).text

    [expected] = omni._submit(lambda: omni.omni.generate("Who?", PARAMS)).result(60)
    assert asyncio.run(ask()) == expected.text


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline's thread tokenises: 12 MB of text took it 32 s, from every other request."""

    def tokenise(*_: object, **__: object) -> list[int]:
        raise AssertionError("it is tokenised")

    monkeypatch.setattr(inputs, "encode_text", tokenise)
    with pytest.raises(RequestError, match="bytes of text; allowed"):
        asyncio.run(omni.generate("hello " * 1_000_000, PARAMS))


def test_a_stream_that_fails_tells_who_waits_at_once_and_leaves_nothing(omni: AsyncOmni) -> None:
    """Also while the pipeline's thread is busy with the step of another request."""
    gate = threading.Event()

    async def ask() -> None:
        streams = [await omni.start("Who?", PARAMS) for _ in range(3)]
        busy = omni._submit(lambda: gate.wait(60))
        waiting = asyncio.ensure_future(anext(streams[0]))
        left = asyncio.ensure_future(anext(streams[1]))
        await asyncio.sleep(0)  # they ask for a step
        for stream in (streams[0], streams[2]):
            stream.fail(RequestError("too late"))
        left.cancel()
        for failed in (waiting, anext(streams[2])):
            with pytest.raises(RequestError, match="too late"):
                await failed
        with pytest.raises(asyncio.CancelledError):
            await left
        for stream in (streams[0], streams[2]):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert not busy.done()
        gate.set()
        await streams[1].aclose()
        pipeline = omni.omni.pipeline
        assert not await omni.call(lambda: pipeline.has_unfinished)

    try:
        asyncio.run(ask())
    finally:
        gate.set()


def test_closing_from_within_is_refused_and_waits_outside(folder: Path) -> None:
    """The pipeline's thread waited for itself: a bare RuntimeError; and an error was swallowed."""

    async def close_within(omni: AsyncOmni) -> None:
        with pytest.raises(EngineError, match="from within one of its calls"):
            await omni.call(omni.close)

    omni = AsyncOmni(folder, options={"num_blocks": 64})
    asyncio.run(close_within(omni))
    assert omni.is_running
    close = omni.omni.close

    def fail() -> None:
        close()
        raise MemoryError("no room to tell")

    omni.omni.close = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        omni.close()
    omni.close()
    assert not omni.is_running


def test_what_cannot_be_called_is_refused(omni: AsyncOmni) -> None:
    with pytest.raises(RequestError, match=r"^function is 5; allowed: a function$"):
        asyncio.run(omni.call(5))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^AsyncOmni has no stream: `start` streams$"):
        omni.stream("a")
