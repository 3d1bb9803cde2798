"""`AsyncLLM` gives the answers of `LLM` to concurrent streams, and frees all after a cancel."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from headstart import LLM, AsyncLLM, SamplingParams
from headstart.engine.outputs import RequestOutput
from headstart.errors import EngineError, RequestError
from tests.tiny_models import save_tiny
from tests.tiny_vision import make_image, save_tiny_vision

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 14, 20 + at, *range(30, 60)] for at in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return path


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    # Without drafts, so that each step of a stream has one token.
    llm = AsyncLLM(folder, num_blocks=64, debug=True, speculation="off")
    yield llm
    llm.close()


async def collect(llm: AsyncLLM, prompt: list[int]) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, PARAMS)]


def test_concurrent_answers_match_llm(llm: AsyncLLM, folder: Path) -> None:
    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))

    streams = asyncio.run(all_at_once())
    plain = LLM(folder, num_blocks=64)
    expected = plain.generate(PROMPTS, PARAMS, use_tqdm=False)
    plain.close()
    for stream, output in zip(streams, expected, strict=True):
        tokens = output.outputs[0].token_ids
        assert [s.outputs[0].token_ids for s in stream] == [
            tokens[: end + 1] for end in range(len(tokens))
        ]
        assert [s.finished for s in stream] == [False] * 11 + [True]


def test_leaving_the_stream_aborts_the_request(llm: AsyncLLM) -> None:
    async def leave_early() -> RequestOutput:
        async with aclosing(llm.generate(PROMPTS[0], PARAMS)) as stream:
            async for _ in stream:
                break
        return (await collect(llm, PROMPTS[1]))[-1]

    assert asyncio.run(leave_early()).finished
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.num_free_blocks == 64


def test_cancelling_the_task_aborts_the_request(llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def cancel() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate(PROMPTS[0], long):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await collect(llm, PROMPTS[1])

    asyncio.run(cancel())
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.num_free_blocks == 64


def test_abort_by_id_ends_the_stream(llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def abort() -> RequestOutput:
        async for output in llm.generate(PROMPTS[0], long, request_id="mine"):
            if not output.finished:
                await llm.abort("mine")
        return output

    assert asyncio.run(abort()).outputs[0].finish_reason == "abort"


def test_a_bad_request_is_refused_and_a_failed_step_raises(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        asyncio.run(collect(llm, []))
    model = llm.engine.model
    forward = model.forward

    def failing(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a kernel broke")

    model.forward = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="a kernel broke"):
        asyncio.run(collect(llm, PROMPTS[0]))
    model.forward = forward  # type: ignore[method-assign]
    assert asyncio.run(collect(llm, PROMPTS[0]))[-1].finished


def test_a_closed_engine_is_reported(folder: Path) -> None:
    llm = AsyncLLM(folder, num_blocks=64)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(collect(llm, PROMPTS[0]))


def test_an_id_in_use_is_refused_and_the_first_request_continues(llm: AsyncLLM) -> None:
    async def twice() -> list[RequestOutput | BaseException]:
        async def read() -> RequestOutput:
            stream = llm.generate(PROMPTS[0], PARAMS, request_id="mine")
            return [output async for output in stream][-1]

        return await asyncio.gather(read(), read(), return_exceptions=True)

    first, second = asyncio.run(twice())
    assert isinstance(first, RequestOutput) and first.finished
    assert isinstance(second, RequestError) and "mine" in str(second)


def test_a_closed_loop_leaves_no_requests(llm: AsyncLLM) -> None:
    """The event loop ends while a stream is open; the engine then serves the next loop."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPTS[0], long)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert asyncio.run(collect(llm, PROMPTS[1]))[-1].finished
    while llm.engine.has_unfinished:
        assert asyncio.run(collect(llm, PROMPTS[2]))[-1].finished
    assert llm.engine.manager.num_free_blocks == 64


def test_cancelling_a_refused_request_does_not_abort_the_id_in_use(llm: AsyncLLM) -> None:
    """The stream is closed before the engine can refuse its request."""

    async def reuse_id() -> RequestOutput:
        first = llm.generate(PROMPTS[0], PARAMS, request_id="mine")
        second = llm.generate(PROMPTS[1], PARAMS, request_id="mine")
        tasks = [asyncio.ensure_future(anext(stream)) for stream in (first, second)]
        await asyncio.sleep(0)  # both requests are submitted, and neither has an output
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        await tasks[0]
        return [output async for output in first][-1]

    output = asyncio.run(reuse_id())
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize("way", ["in the engine", "in the program", "left by a break"])
def test_the_id_of_a_cancelled_request_is_free_at_once(llm: AsyncLLM, way: str) -> None:
    """Earlier, the id was in use until the engine's thread or the event loop continued."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def read(reached: asyncio.Event) -> None:
        async for _ in llm.generate(PROMPTS[0], long, "mine"):
            reached.set()
            if way == "left by a break":
                break
            if way == "in the program":
                await asyncio.Event().wait()

    async def cancel_and_reuse_id() -> RequestOutput:
        for _ in range(20):
            reached = asyncio.Event()
            task = asyncio.create_task(read(reached))
            started = asyncio.create_task(reached.wait())
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if way != "left by a break":
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return [output async for output in llm.generate(PROMPTS[1], PARAMS, "mine")][-1]

    assert asyncio.run(cancel_and_reuse_id()).outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.num_free_blocks == 64


def test_a_finished_stream_stays_finished(llm: AsyncLLM) -> None:
    async def run() -> None:
        stream = llm.generate(PROMPTS[0], PARAMS)
        assert len([output async for output in stream]) == 12
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        thrown = llm.generate(PROMPTS[0], PARAMS)
        await anext(thrown)
        with pytest.raises(KeyError):
            await thrown.athrow(KeyError("x"))
        with pytest.raises(StopAsyncIteration):
            await anext(thrown)
        llm.generate(PROMPTS[0], PARAMS)  # never begun

    asyncio.run(run())


@pytest.mark.parametrize("way", ["generate", "chat"])
def test_prompts_are_tokenized_off_the_event_loop(
    way: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a prompt of 300 KB blocked all other streams for 0.37 s."""
    llm = AsyncLLM(demo_model, num_blocks=64, num_threads=1)
    tokenizer = llm.frontend.tokenizer
    assert tokenizer is not None
    encode, threads = tokenizer.encode, set[int]()

    def watched(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return encode(*args, **options)

    monkeypatch.setattr(tokenizer, "encode", watched)

    async def ask() -> int:
        prompt = "A gentle breeze stirred"
        stream = (
            llm.generate(prompt, PARAMS)
            if way == "generate"
            else llm.chat([{"role": "user", "content": prompt}], PARAMS)
        )
        assert [output async for output in stream][-1].finished
        return threading.get_ident()

    loop_thread = asyncio.run(ask())
    assert threads and loop_thread not in threads
    llm.close()


def test_a_reply_is_remembered_off_the_event_loop(demo_model: Path) -> None:
    """Earlier, the loop waited for a lock while another thread tokenized a conversation."""
    llm = AsyncLLM(demo_model, num_blocks=64, num_threads=1)

    async def ask() -> None:
        stream = llm.chat([{"role": "user", "content": "Hello"}], PARAMS)
        await anext(stream)
        with llm.chats._lock:
            rest = asyncio.create_task(last(stream))
            while llm.engine.has_unfinished:
                await asyncio.to_thread(lambda: None)
            await asyncio.wait([rest], timeout=0)
        assert (await rest).finished

    async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
        return [output async for output in stream][-1]

    asyncio.run(ask())
    llm.close()


class _SlowImage(Image.Image):
    """An image that is decoded once `go` is set. `begun` is set when decoding begins."""

    begun: threading.Event
    go: threading.Event
    alone: threading.Lock

    def load(self) -> "Image.core.PixelAccess | None":
        assert self.alone.acquire(blocking=False)
        self.begun.set()
        assert self.go.wait(10), "the event loop did not run"
        self.alone.release()
        return super().load()


def _slow_image() -> _SlowImage:
    slow, image = _SlowImage(), make_image(1)
    slow.im, slow._mode, slow._size = image.im, image.mode, image.size
    slow.begun, slow.go, slow.alone = threading.Event(), threading.Event(), threading.Lock()
    return slow


@pytest.mark.parametrize("way", ["generate", "chat"])
def test_other_streams_continue_while_an_image_is_decoded(
    way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Regression: the event loop decoded images, which blocked it.

    Here the image waits until the loop has read another stream to its end.
    """
    folder = save_tiny_vision("llava", tmp_path_factory.mktemp("llava"))
    # Without drafts, so that each step of a stream has one token.
    llm = AsyncLLM(folder, num_blocks=64, debug=True, speculation="off")
    image = _slow_image()

    def ask() -> AsyncIterator[RequestOutput]:
        if way == "chat":
            parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
            return llm.chat([{"role": "user", "content": parts}], PARAMS)
        return llm.generate({"prompt": "<image>", "multi_modal_data": {"image": image}}, PARAMS)

    async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
        return [output async for output in stream][-1]

    async def all_three() -> list[RequestOutput]:
        seeing = [asyncio.create_task(last(ask())) for _ in range(2)]
        await asyncio.to_thread(image.begun.wait)
        text = await last(llm.generate("no image", PARAMS))
        assert not any(task.done() for task in seeing)
        image.go.set()
        return [text, *await asyncio.gather(*seeing)]

    outputs = asyncio.run(all_three())
    assert all(output.finished for output in outputs)
    assert [len(output.images) for output in outputs] == [0, 1, 1]
    llm.close()


@pytest.mark.parametrize("call_from", ["its loop", "another loop", "close", "leave"])
def test_a_logits_processor_that_awaits_its_engine_gets_an_error(
    llm: AsyncLLM, call_from: str
) -> None:
    """Earlier, the step waited for a coroutine that waited for the step."""

    async def run() -> list[RequestOutput]:
        loop = asyncio.get_running_loop()
        open_stream = llm.generate(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(open_stream)

        async def close() -> None:
            llm.close()

        def process(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if call_from == "another loop":
                own = asyncio.new_event_loop()
                with closing(own):
                    own.run_until_complete(asyncio.wait_for(llm.reset_prefix_cache(), 20))
            else:
                calls = {"its loop": llm.reset_prefix_cache, "close": close}
                call = calls.get(call_from, open_stream.aclose)
                asyncio.run_coroutine_threadsafe(call(), loop).result(20)
            return logits

        asking = SamplingParams(temperature=0, max_tokens=2, logits_processors=[process])
        return [output async for output in llm.generate(PROMPTS[0], asking)]

    if call_from == "leave":  # which need not wait
        assert asyncio.run(run())[-1].finished
    else:
        refusal = "is closed" if call_from == "close" else "called during its own step"
        with pytest.raises(EngineError, match=refusal):
            asyncio.run(run())
    if call_from != "close":
        assert asyncio.run(collect(llm, PROMPTS[0]))[-1].finished


def test_tasks_of_a_logits_processor_may_call_the_engine_after_the_step(llm: AsyncLLM) -> None:
    async def run() -> bool:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        futures: list[Any] = []

        async def reset() -> bool:
            await over.wait()
            return await llm.reset_prefix_cache()

        def process(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            futures.append(asyncio.run_coroutine_threadsafe(reset(), loop))
            return logits

        params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[process])
        assert [output async for output in llm.generate(PROMPTS[0], params)][-1].finished
        over.set()
        return await asyncio.wrap_future(futures[0])

    assert asyncio.run(run())
