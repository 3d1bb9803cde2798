"""Constraints that take long to compile delay only other constraints."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headstart import AsyncLLM, EngineError, SamplingParams, StructuredOutputsParams
from headstart.frontend import async_llm
from headstart.frontend.grammar import GrammarCompiler
from tests.engine.tiny_llm import save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

PLAIN = SamplingParams(max_tokens=1)
PATIENCE = 30.0  # seconds, which only a failing test needs


class Gate:
    """A gate that stops the compiler until the test opens it."""

    def __init__(self) -> None:
        self.entered, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.opened = threading.Event()

    def wait(self, compile_form: Callable[..., object], *arguments: object) -> object:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.opened.wait(PATIENCE)
        return compile_form(*arguments)


@asynccontextmanager
async def held(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forms: int
) -> AsyncIterator[tuple[AsyncLLM, Gate, list[asyncio.Task[object]]]]:
    """Yield an engine in which `forms` constraints wait for the compiler, behind a gate."""
    gate = Gate()
    compile_form = GrammarCompiler.matcher
    monkeypatch.setattr(GrammarCompiler, "matcher", lambda *args: gate.wait(compile_form, *args))
    # The loop's executor has one thread here, which tokenizes texts.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    monkeypatch.setattr(async_llm, "count_cores", lambda: 4)
    model = save_smallest(folder, layers=1, tokenizer=TINY_TOKENIZERS["byte_level"]())
    llm = AsyncLLM(model, num_blocks=24, dtype="float32")
    try:
        tasks: list[asyncio.Task[object]] = []
        for number in range(forms):
            form = StructuredOutputsParams(regex=f"a{{{number + 1}}}")
            params = SamplingParams(max_tokens=1, structured_outputs=form)
            tasks.append(asyncio.create_task(llm.prepare("a", params)))
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        yield llm, gate, tasks
    finally:
        gate.opened.set()
        llm.close()


def threads_of_forms(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the new threads that compile constraints."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if thread.name.startswith("headstart-grammars")]


def test_texts_are_tokenized_while_constraints_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, eight slow constraints occupied all threads that tokenize texts and read images."""

    before = set(threading.enumerate())

    async def run() -> None:
        async with held(tmp_path, monkeypatch, forms=8) as (llm, gate, tasks):
            group = await asyncio.wait_for(llm.prepare("ab", PLAIN), PATIENCE)
            assert group.prompt_token_ids and not any(task.done() for task in tasks)
            assert 0 < len(threads_of_forms(before)) <= 3  # of which two have work
            gate.opened.set()
            assert len(await asyncio.gather(*tasks)) == 8

    asyncio.run(run())


def test_closing_the_engine_ends_waiting_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())

    async def run() -> None:
        async with held(tmp_path, monkeypatch, forms=8) as (llm, gate, tasks):
            threads = threads_of_forms(before)
            llm.close()
            results = await asyncio.wait_for(
                asyncio.gather(*tasks, return_exceptions=True), PATIENCE
            )
            assert threads and all(thread.daemon for thread in threads), (
                "the exit of the process waits for them"
            )
            gate.opened.set()
            assert all(isinstance(result, EngineError) for result in results)
            with pytest.raises(EngineError, match="the engine is closed"):
                await llm.prepare("a", PLAIN)
            for thread in threads:
                thread.join(PATIENCE)
            assert not any(thread.is_alive() for thread in threads)

    asyncio.run(run())


def test_an_unreferenced_engine_is_freed_with_its_compiler_threads(tmp_path: Path) -> None:
    """Earlier, a thread referred to its last work, and with it to the engine and its K/V."""
    model = save_smallest(tmp_path, layers=1, tokenizer=TINY_TOKENIZERS["byte_level"]())
    form = StructuredOutputsParams(regex="a")

    def prepare_in_new_engine() -> tuple[weakref.ref[AsyncLLM], threading.Thread]:
        before = set(threading.enumerate())
        llm = AsyncLLM(model, num_blocks=24, dtype="float32")
        asyncio.run(llm.prepare("a", SamplingParams(max_tokens=1, structured_outputs=form)))
        [thread] = threads_of_forms(before)
        return weakref.ref(llm), thread

    engine, thread = prepare_in_new_engine()
    gc.collect()  # frames of imports by the first engine of the process
    thread.join(PATIENCE)
    assert not thread.is_alive() and engine() is None
