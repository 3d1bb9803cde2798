"""Updates for an event loop: one call for many updates, none lost, and failures of streams."""

import asyncio
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headstart import AsyncLLM, RequestOutput, SamplingParams
from headstart.engine.params import RequestOutputKind
from headstart.frontend import streams
from headstart.frontend.streams import AsyncMailbox, AsyncOutputStream
from tests.engine.tiny_llm import save_smallest

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder: Path = save_smallest(tmp_path_factory.mktemp("mailbox"))
    options: dict[str, Any] = {"num_blocks": 24, "num_threads": 1, "speculation": "off"}
    with closing(AsyncLLM(folder, dtype="float32", **options)) as llm:
        yield llm


def make_box(llm: AsyncLLM, *, paced: bool = False) -> tuple[AsyncMailbox[Any], RequestOutput]:
    group = llm.frontend.prepare(PROMPT, LONG)
    return AsyncMailbox(llm.driver, paced=paced), group.output()


class Loop(asyncio.SelectorEventLoop):
    """An event loop that records calls from other threads, and the delays of later calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.delays: list[float] = []
        super().__init__()

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self.calls.append(callback)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self.delays.append(delay)
        return super().call_later(delay, callback, *args, context=context)


def run(make: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function with a `Loop`, in this loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        runner.run(make(loop))


def test_one_call_wakes_the_loop_for_all_updates(llm: AsyncLLM) -> None:
    async def read(loop: Loop) -> None:
        boxes = [make_box(llm) for _ in range(8)]
        before = len(loop.calls)
        for box, output in boxes:
            box.receive(output)
            box.receive(output)
        assert len(loop.calls) - before == 1
        for box, output in boxes:
            assert [await box.get(), await box.get()] == [output, output]
        await asyncio.sleep(0)  # the call is made
        boxes[0][0].receive(boxes[0][1])
        assert len(loop.calls) - before == 2 and await boxes[0][0].get() == boxes[0][1]

    run(read)


def test_paced_updates_are_merged_without_waking_the_loop(llm: AsyncLLM) -> None:
    """The first and the last update arrive at once; the loop polls for the others."""

    async def read(loop: Loop) -> None:
        box, output = make_box(llm, paced=True)
        before = len(loop.calls)
        first, second, third, last = (
            dataclasses.replace(output, num_cached_tokens=i, finished=i == 3) for i in range(4)
        )
        box.receive(first)
        assert await box.get() is first
        box.receive(second)
        box.receive(third)
        assert len(loop.calls) - before == 1
        assert await box.get() is third
        await asyncio.sleep(0)
        box.receive(second)
        box.receive(last)
        assert len(loop.calls) - before == 2
        assert await box.get() is last

    run(read)


def test_a_reader_in_a_busy_loop_gets_the_newest_update(llm: AsyncLLM) -> None:
    async def read() -> None:
        boxes = [make_box(llm, paced=True) for _ in range(3)]
        for box, output in boxes:
            box.receive(output)
            assert await box.get() is output
        for _ in range(2):
            for i in range(200):
                for box, output in boxes:
                    box.receive(dataclasses.replace(output, num_cached_tokens=i))
            for box, _ in boxes:
                assert (await box.get()).num_cached_tokens == 199

    asyncio.run(read())


def test_paced_updates_do_not_wake_with_urgent_ones(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, the first token of each request woke the streams of all other requests."""
    monkeypatch.setattr(streams, "PACE", 3600.0)

    async def read() -> None:
        early, late = make_box(llm, paced=True), make_box(llm, paced=True)
        early[0].receive(early[1])
        assert await early[0].get() is early[1]
        waiting = asyncio.ensure_future(early[0].get())
        await asyncio.sleep(0)
        early[0].receive(early[1])
        late[0].receive(late[1])
        assert await late[0].get() is late[1]
        assert not waiting.done()
        early[0].receive(last := dataclasses.replace(early[1], finished=True))
        assert await waiting is last

    asyncio.run(read())


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_does_not_replace_earlier_updates(llm: AsyncLLM, count: int) -> None:
    """This applies also to updates that may wait."""

    async def read() -> None:
        box, output = make_box(llm, paced=True)
        outputs = [dataclasses.replace(output, num_cached_tokens=i) for i in range(count)]
        for output in outputs:
            box.receive(output)
        box.receive(ValueError("on purpose"))
        assert await box.get() is outputs[-1]
        with pytest.raises(ValueError, match="on purpose"):
            await box.get()

    asyncio.run(read())


def test_the_end_of_a_stream_is_read_despite_a_later_update(llm: AsyncLLM) -> None:
    """If a stream is closed during a step, the engine still sends the update of this step."""

    async def read() -> None:
        box, output = make_box(llm, paced=True)
        box.receive(ValueError("on purpose"))
        box.receive(output)
        with pytest.raises(ValueError, match="on purpose"):
            await box.get()

    asyncio.run(read())


@pytest.mark.parametrize("paced", [False, True])
def test_a_delta_stream_has_all_tokens(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, paced: bool
) -> None:
    monkeypatch.setattr(streams, "PACE", 0.02)  # some ten tokens

    async def read(paced: bool) -> tuple[int, list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream = llm.outputs(llm.frontend.prepare(PROMPT, params), paced=paced)
        parts = [output.outputs[0].token_ids async for output in stream]
        return len(parts), [token for part in parts for token in part]

    count, tokens = asyncio.run(read(paced))
    assert len(tokens) == 40 and tokens == asyncio.run(read(False))[1]
    assert count == 40 or paced


def test_no_update_of_two_threads_is_lost(llm: AsyncLLM) -> None:
    """The threads and the loop race for the flag of a pending call."""

    async def read() -> None:
        boxes = [make_box(llm) for _ in range(2)]

        def send(box: AsyncMailbox[Any], output: RequestOutput) -> None:
            for _ in range(100):
                box.receive(output)

        for _ in range(20):
            threads = [threading.Thread(target=send, args=arguments) for arguments in boxes]
            for thread in threads:
                thread.start()
            for box, _ in boxes:
                async with asyncio.timeout(30):
                    for _ in range(100):
                        await box.get()
            for thread in threads:
                thread.join()

    asyncio.run(read())


def test_each_update_is_sent_to_a_closed_loop(llm: AsyncLLM) -> None:
    async def make() -> tuple[AsyncMailbox[Any], RequestOutput]:
        box, output = make_box(llm)
        box.receive(output)  # stays on its way
        return box, output

    loop = asyncio.new_event_loop()
    box, output = loop.run_until_complete(make())
    box.receive(output)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            box.receive(output)


def test_no_reference_to_a_loop_remains(llm: AsyncLLM) -> None:
    references: list[weakref.ref[object]] = []

    async def read() -> None:
        async for output in llm.generate(PROMPT, LONG):
            finished = output.finished
            loop = asyncio.get_running_loop()
            references.extend([weakref.ref(loop), weakref.ref(streams._WAKERS[loop])])
        assert finished

    asyncio.run(read())
    llm.driver.call(lambda: None)  # the engine's thread has finished the step of the last output
    gc.collect()
    assert references
    assert [output() for output in references if output() is not None] == []


def test_no_paced_update_of_two_threads_is_lost(llm: AsyncLLM) -> None:
    """The last update is read in any state of the event loop."""

    async def read() -> None:
        for _ in range(20):
            boxes = [make_box(llm, paced=True) for _ in range(2)]

            def send(box: AsyncMailbox[Any], output: RequestOutput) -> None:
                for i in range(100):
                    box.receive(dataclasses.replace(output, num_cached_tokens=i))

            threads = [threading.Thread(target=send, args=arguments) for arguments in boxes]
            for thread in threads:
                thread.start()
            for box, _ in boxes:
                async with asyncio.timeout(60):
                    while (await box.get()).num_cached_tokens < 99:
                        pass
            for thread in threads:
                thread.join()

    asyncio.run(read())


@pytest.mark.parametrize("when", ["before the first", "while one is waited for", "between two"])
def test_a_failed_stream_raises_once(llm: AsyncLLM, when: str) -> None:
    async def read() -> None:
        stream = llm.outputs(llm.frontend.prepare(PROMPT, LONG))
        assert isinstance(stream, AsyncOutputStream)
        if when != "before the first":
            assert not (await anext(stream)).finished
        if when == "while one is waited for":
            asyncio.get_running_loop().call_soon(stream.fail, TimeoutError("too late"))
        else:
            stream.fail(TimeoutError("too late"))
        with pytest.raises(TimeoutError, match="too late"):
            async for _ in stream:
                pass
        stream.fail(TimeoutError("again"))
        assert [output async for output in stream] == []
        await llm.call(llm.engine.manager.check)
        assert not llm.engine.has_unfinished

    asyncio.run(read())


def test_a_finished_stream_does_not_fail(llm: AsyncLLM) -> None:
    async def read() -> None:
        stream = llm.outputs(llm.frontend.prepare(PROMPT, LONG))
        assert [output.finished async for output in stream][-1]
        stream.fail(TimeoutError("too late"))
        assert [output async for output in stream] == []

    asyncio.run(read())


@pytest.mark.parametrize(("readers", "pause"), [(1, 0.005), (8, 0.016), (40, 0.064)])
def test_many_readers_are_woken_less_often_up_to_a_limit(
    llm: AsyncLLM, readers: int, pause: float
) -> None:
    async def read(loop: Loop) -> None:
        boxes = [make_box(llm, paced=True) for _ in range(readers)]
        for box, output in boxes:
            box.receive(output)
        for box, output in boxes:
            assert await box.get() is output
        await asyncio.sleep(0)
        assert pause in loop.delays

    run(read)
