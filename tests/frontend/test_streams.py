"""Streams that several threads read, and that any thread or the garbage collector closes."""

import asyncio
import dataclasses
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, AsyncLLM, SamplingParams
from headstart.engine.outputs import RequestOutput
from headstart.engine.request import RequestGroup
from headstart.engine.step import StepResult
from headstart.errors import RequestError
from headstart.frontend import streams
from tests.engine.tiny_llm import make_llm, save_smallest

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
A, B = list(range(3, 50)), list(range(60, 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder)
    yield llm
    llm.close()


class Held:
    """An engine that stops in its next step until `go` is set."""

    def __init__(self, llm: LLM | AsyncLLM) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.was_let_go = True
        self._step = llm.engine.step
        llm.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[StepResult]:
        self.begun.set()
        self.was_let_go &= self.go.wait(20)
        return self._step()


def _is_clean(llm: LLM) -> bool:
    """Return True if no request is unfinished and all blocks are free."""
    return llm.driver.call(
        lambda: not llm.engine.has_unfinished and llm.engine.manager.num_free_blocks == 24
    )


@pytest.mark.parametrize("in_cycle", [True, False])
def test_an_unreferenced_stream_is_freed_without_waiting(llm: LLM, in_cycle: bool) -> None:
    """Earlier, the thread of the garbage collector waited for a step, with all its locks."""
    stream: Any = llm.stream(A, LONG)
    next(stream)
    held = Held(llm)
    assert held.begun.wait(30)
    if in_cycle:
        stream = [stream]
        stream.append(stream)
    del stream
    gc.collect()
    held.go.set()
    assert _is_clean(llm)
    assert held.was_let_go, "the collector waited for the engine"


def test_a_closed_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(A, LONG)
    next(stream)
    stream.close()
    assert llm.engine.manager.num_free_blocks == 24
    assert list(stream) == []
    stream.close()


def test_an_error_thrown_into_a_stream_is_raised_and_closes_it(llm: LLM) -> None:
    stream = llm.stream(A, LONG)
    next(stream)
    with pytest.raises(KeyError, match="on purpose"):
        stream.throw(KeyError("on purpose"))
    assert llm.engine.manager.num_free_blocks == 24
    assert list(stream) == []


def test_a_stream_that_another_thread_closes_ends(llm: LLM) -> None:
    stream = llm.stream(A, LONG)
    next(stream)
    held = Held(llm)
    assert held.begun.wait(30)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(list, stream)
        closed = pool.submit(stream.close)
        held.go.set()
        closed.result(30)
        assert all(not output.finished for output in reader.result(30))
    assert _is_clean(llm)


def test_a_stream_that_another_thread_closes_at_its_start_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, the request was cancelled before it was submitted, and ran to its end."""
    stream = llm.stream(A, LONG)
    submit = llm.driver.submit

    def closed_before(*args: Any, **options: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream.close).result(30)
        submit(*args, **options)

    monkeypatch.setattr(llm.driver, "submit", closed_before)
    assert list(stream) == []
    assert _is_clean(llm)


def test_threads_that_start_a_stream_together_all_see_its_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, both threads submitted the request; one was refused and closed the stream."""
    stream = llm.stream(A, LONG)
    submit, mailbox, pool = llm.driver.submit, streams.Mailbox, ThreadPoolExecutor(1)
    others: list[Any] = []
    submitted = threading.Event()

    def with_another_reader() -> None:
        if not others:
            others.append(None)
            others[0] = pool.submit(list, stream)

    def make_mailbox(*args: Any) -> Any:
        first = not others
        with_another_reader()
        assert not first or submitted.wait(30)
        return mailbox(*args)

    def submit_with(*args: Any, **options: Any) -> None:
        with_another_reader()
        submit(*args, **options)
        submitted.set()

    monkeypatch.setattr(streams, "Mailbox", make_mailbox)
    monkeypatch.setattr(llm.driver, "submit", submit_with)
    mine = list(stream)
    theirs = others[0].result(30)
    pool.shutdown()
    assert sum(output.finished for output in [*mine, *theirs]) == 1
    assert _is_clean(llm)


def test_threads_that_share_a_stream_all_see_its_end(llm: LLM) -> None:
    stream = llm.stream(A, LONG)
    next(stream)
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda _: list(stream), range(3)))
    outputs = [output for part in parts for output in part]
    assert sum(output.finished for output in outputs) == 1
    assert _is_clean(llm)


@pytest.fixture
def async_llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(folder, dtype="float32", num_blocks=64, num_threads=1)
    yield llm
    llm.close()


async def _is_idle(llm: AsyncLLM) -> bool:
    return await llm.call(lambda: not llm.engine.has_unfinished)


def test_an_async_stream_that_is_closed_while_it_is_prepared_is_never_submitted(
    async_llm: AsyncLLM,
) -> None:
    async def close() -> None:
        stream = async_llm.generate(A, LONG, "mine")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # it prepares in another thread
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await first
        assert await _is_idle(async_llm)

    asyncio.run(close())


def test_closing_an_async_stream_ends_the_task_that_waits_for_it(async_llm: AsyncLLM) -> None:
    async def close() -> None:
        stream = async_llm.generate(A, LONG, "mine")
        outputs = [await anext(stream)]

        async def read() -> None:
            async for output in stream:
                outputs.append(output)

        held = Held(async_llm)
        reader = asyncio.ensure_future(read())
        await asyncio.to_thread(held.begun.wait, 60)
        for _ in range(10):  # earlier outputs are read
            await asyncio.sleep(0)
        await stream.aclose()
        await reader
        held.go.set()
        assert held.was_let_go, "the reader waited for the engine"
        assert not outputs[-1].finished and await _is_idle(async_llm)
        [again] = [
            result async for result in async_llm.generate(A, SHORT, "mine") if result.finished
        ]
        assert again.finished

    asyncio.run(close())


def test_two_tasks_cannot_wait_for_one_async_stream_at_once(async_llm: AsyncLLM) -> None:
    async def share() -> None:
        stream = async_llm.generate(A, SHORT)
        mine, theirs = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
        assert isinstance(mine, RequestOutput)
        assert isinstance(theirs, RuntimeError) and "another task waits" in str(theirs)
        rest = [output async for output in stream]
        assert [output.finished for output in rest] == [False, True]
        assert await _is_idle(async_llm)

    asyncio.run(share())


def test_updates_for_a_busy_loop_are_bounded(async_llm: AsyncLLM) -> None:
    """Each update has the whole text, so all but the last may be dropped beyond `_MAX_UNREAD`."""

    async def stay_busy() -> list[RequestOutput]:
        box = streams.AsyncMailbox(async_llm.driver)
        output = _group(async_llm).output()
        for _ in range(5000):
            box.receive(output)
        box.receive(dataclasses.replace(output, finished=True))
        outputs = []
        while not (outputs and outputs[-1].finished):
            outputs.append(await box.get())
        return outputs

    outputs = asyncio.run(stay_busy())
    assert len(outputs) == streams._MAX_UNREAD + 1


def _group(llm: AsyncLLM) -> RequestGroup:
    return llm.frontend.prepare(A, SHORT)


def test_an_async_stream_is_read_in_one_event_loop(async_llm: AsyncLLM) -> None:
    """Earlier, a stream in another loop blocked, or raised asyncio's RuntimeError."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        stream = async_llm.generate([5, 6], params)

        async def following() -> RequestOutput:
            return await anext(stream)

        assert not first.run(following()).finished
        with pytest.raises(RequestError, match="another event loop; allowed: the same loop"):
            second.run(following())
        output = first.run(following())
        while not output.finished:
            output = first.run(following())
        assert len(output.outputs[0].token_ids) == 6
        assert first.run(_is_idle(async_llm))
