"""The driver: each result reaches its request, and no call waits for ever after any fault."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AttentionInterface

from headstart import LLM, AsyncLLM, SamplingParams
from headstart.attention.register import unregister
from headstart.engine.outputs import RequestOutput
from headstart.engine.step import Batch
from headstart.errors import EngineError, RequestError
from headstart.frontend.streams import Mailbox
from headstart.lora.request import LoRARequest
from headstart.models.transformers_backend import decoder
from headstart.sampling_params import BeamSearchParams
from tests.engine.internals import kv_memory, runner_of, scheduler_of
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_models import save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
A, B = list(range(3, 50)), list(range(60, 100))
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    """Return the answers to A and B of a fresh engine, by the prompt's first token."""
    llm = make_llm(folder)
    answers = {prompt[0]: _tokens(llm.generate(prompt, GREEDY)[0]) for prompt in (A, B)}
    llm.close()
    return answers


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _is_clean(llm: LLM | AsyncLLM) -> bool:
    llm.engine.manager.check()
    return not llm.engine.has_unfinished and llm.engine.manager.num_free_blocks == 24


# Results of other requests


def test_two_streams_side_by_side(llm: LLM, expected: dict[int, list[int]]) -> None:
    """Regression: they took each other's results, and the loop over both never ended."""
    pairs = list(zip(llm.stream(A, GREEDY), llm.stream(B, GREEDY), strict=True))
    assert [len(_tokens(first)) for first, _ in pairs] == list(range(1, 9))
    assert [_tokens(output) for output in pairs[-1]] == [expected[A[0]], expected[B[0]]]
    assert _is_clean(llm)


def test_generate_during_an_open_stream(llm: LLM, expected: dict[int, list[int]]) -> None:
    """Regression: it raised KeyError, and the stream that had ended inside it waited for ever."""
    stream = llm.stream(A, GREEDY)
    next(stream)
    assert _tokens(llm.generate(B, GREEDY)[0]) == expected[B[0]]
    assert _tokens(list(stream)[-1]) == expected[A[0]]
    assert _is_clean(llm)


def test_several_threads_call_one_llm(llm: LLM, expected: dict[int, list[int]]) -> None:
    def answers_right(number: int) -> bool:
        prompt = B if number % 2 else A
        if number % 3:
            return _tokens(llm.generate(prompt, GREEDY)[0]) == expected[prompt[0]]
        return _tokens(list(llm.stream(prompt, GREEDY))[-1]) == expected[prompt[0]]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(answers_right, range(24)))
    assert _is_clean(llm)


def test_a_reader_far_behind_still_gets_the_whole_answer(tmp_path: Path) -> None:
    llm = make_llm(save_smallest(tmp_path, positions=600, layers=1), num_blocks=64)
    long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    stream = llm.stream(A, long)
    next(stream)
    [whole] = llm.generate(A, long)  # the stream's request ends meanwhile, and is not read
    rest = list(stream)
    assert _tokens(rest[-1]) == _tokens(whole) and rest[-1].finished
    assert len(_tokens(whole)) == 500
    assert len(rest) < 300
    llm.close()


# Interruptions and faults


def test_an_exception_in_the_scheduler_ends_all_and_the_next_are_served(
    llm: LLM, expected: dict[int, list[int]]
) -> None:
    """Regression: it raised CacheError, blocks leaked, and the next request hit uncomputed rows."""
    schedule = scheduler_of(llm.engine).schedule
    stream = llm.stream(A, LONG)
    next(stream)

    def broken() -> Batch:
        schedule()
        raise RuntimeError("a fault of the engine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_of(llm.engine), "schedule", broken)
        with pytest.raises(EngineError, match="RuntimeError: a fault of the engine"):
            llm.generate([A, B], GREEDY, use_tqdm=False)
        with pytest.raises(EngineError, match="a fault of the engine"):
            list(stream)
    assert _is_clean(llm)
    for prompt in (A, B):
        [output] = llm.generate(prompt, GREEDY)
        assert output.num_cached_tokens == 0 and _tokens(output) == expected[prompt[0]]


def test_an_id_in_use_is_refused_whatever_happens(llm: LLM) -> None:
    """Regression: the second request replaced the first one until it was refused.

    If that was interrupted, the first one never got its results.
    """
    first, second = (llm.frontend.prepare(A, LONG, request_id="mine") for _ in range(2))
    updates = [Mailbox(llm.driver, [group]) for group in (first, second)]

    def broken(group: object) -> None:
        raise MemoryError("on purpose")

    llm.driver.submit(first, updates[0].receive)
    assert not updates[0].get().finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "submit", broken)
        llm.driver.submit(second, updates[1].receive)
        with pytest.raises(RequestError, match="'mine' is in use"):
            updates[1].get()
        llm.driver.cancel([second])
    output = updates[0].get()
    while not output.finished:
        output = updates[0].get()
    assert len(_tokens(output)) == 150


def test_a_request_that_close_overtakes_is_refused(llm: LLM) -> None:
    """Regression: it was queued after the thread had refused all others, and waited for ever."""
    group = llm.frontend.prepare(A, GREEDY)
    updates = Mailbox(llm.driver, [group])
    require_thread = llm.driver._require_thread

    def overtaken() -> None:
        require_thread()
        llm.close()

    llm.driver._require_thread = overtaken  # type: ignore[method-assign]
    llm.driver.submit(group, updates.receive)
    assert not updates._updates.empty()
    with pytest.raises(EngineError, match="closed"):
        updates.get()


# The end of an engine


def _later(llm: LLM) -> dict[str, Callable[[], Any]]:
    """Return all calls that need an open engine."""
    return {
        "generate": lambda: llm.generate([], GREEDY),
        "chat": lambda: llm.chat([], GREEDY),
        "stream": lambda: llm.stream(A, GREEDY),
        "stream_chat": lambda: llm.stream_chat(CHAT, GREEDY),
        "recall_chat": lambda: llm.recall_chat(CHAT, {}),
        "load_adapter": lambda: llm.load_adapter("a", "nowhere"),
        "unload_adapter": lambda: llm.unload_adapter("a"),
        "get_tokenizer": llm.get_tokenizer,
        "reset_prefix_cache": llm.reset_prefix_cache,
        "get_metrics": llm.get_metrics,
        "add_lora": lambda: llm.add_lora(LoRARequest("a", 1, "nowhere")),
        "beam_search": lambda: llm.beam_search([A], BeamSearchParams(beam_width=1, max_tokens=1)),
    }


def test_a_closed_engine_answers_nothing(llm: LLM) -> None:
    """Regression: greedy requests continued to read released memory: "------------"."""
    open_stream, unread = llm.stream(A, LONG), llm.stream(B, LONG)
    next(open_stream)
    llm.close()
    llm.close()
    for call in _later(llm).values():
        with pytest.raises(EngineError, match="closed"):
            call()
    for stream in (open_stream, unread):
        with pytest.raises(EngineError, match="closed"):
            list(stream)
    methods = {name for name in dir(LLM) if name[0] != "_" and callable(getattr(LLM, name))}
    methods -= {"from_engine_args", "get_default_sampling_params", "get_world_size"}
    methods -= {"check_length", "close", "has_unfinished_requests", "set_share"}  # need no engine
    assert methods == set(_later(llm)), "a method is not tried here"


def test_threads_end_and_memory_is_released(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = make_llm(folder)
    llm.generate(A, GREEDY)
    rows = weakref.ref(kv_memory(llm.engine).keys[0])
    llm.close()
    assert rows() is None
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["generate", "stream", "get_metrics", "reset", "unload", "read"])
def test_calls_within_a_step_are_refused(
    llm: LLM, expected: dict[int, list[int]], name: str
) -> None:
    """Regression: a logits processor waited for its own step, and so did all other calls."""
    open_stream = llm.stream(B, LONG)
    next(open_stream)
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate(B, GREEDY),
        "stream": lambda: next(llm.stream(B, GREEDY)),
        "get_metrics": llm.get_metrics,
        "add_lora": lambda: llm.add_lora(LoRARequest("a", 1, "nowhere")),
        "reset": lambda: llm.reset_prefix_cache(reset_running_requests=True),
        "unload": lambda: llm.unload_adapter("a"),
        "read": lambda: [next(open_stream) for _ in range(150)],
    }

    def process(token_ids: list[int], logits: Any) -> Any:
        return calls[name]()

    nested = SamplingParams(temperature=0, max_tokens=2, logits_processors=[process])
    with pytest.raises(EngineError, match="called during its own step"):
        llm.generate(A, nested)
    assert _tokens(llm.generate(A, GREEDY)[0]) == expected[A[0]]
    if name != "read":  # its error closed the stream
        assert len(_tokens(list(open_stream)[-1])) == 150
    assert llm.driver.call(lambda: _is_clean(llm))


def test_a_stream_keeps_its_llm(folder: Path, expected: dict[int, list[int]]) -> None:
    """Regression: `for output in LLM(model).stream(prompt)` failed since the engine was closed."""
    streams = make_llm(folder).stream(A, GREEDY), make_llm(folder).stream(A, LONG)
    llms = [weakref.ref(stream._owner) for stream in streams]
    gc.collect()
    assert _tokens(list(streams[0])[-1]) == expected[A[0]]
    next(streams[1])
    streams[1].close()
    assert [llm() for llm in llms] == [None, None], "it is held for longer than the stream lives"


def test_a_stream_keeps_its_async_llm(folder: Path, expected: dict[int, list[int]]) -> None:
    async def read_all(stream: Any) -> list[RequestOutput]:
        llm = weakref.ref(stream._owner)
        gc.collect()
        outputs = [output async for output in stream]
        assert llm() is None, "it is held for longer than the stream lives"
        return outputs

    def make() -> AsyncLLM:
        return AsyncLLM(folder, dtype="float32", num_blocks=24, num_threads=1)

    async def prepared() -> Any:
        llm = make()
        return llm.outputs(await llm.prepare(A, GREEDY))

    async def both() -> list[list[RequestOutput]]:
        return [await read_all(make().generate(A, GREEDY)), await read_all(await prepared())]

    for outputs in asyncio.run(both()):
        assert _tokens(outputs[-1]) == expected[A[0]]


@pytest.mark.parametrize("is_unregistered", [True, False])
def test_an_unreferenced_engine_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_unregistered: bool
) -> None:
    """Regression: transformers' table of attention functions kept it alive.

    Each of six engines took 64 MB more. The backend is freed even while the table has the function.
    """
    if not is_unregistered:
        monkeypatch.setattr(decoder, "unregister", lambda name: None)
    table = AttentionInterface._global_mapping
    before = set(table)
    llm = make_llm(save_tiny("gpt2", tmp_path))
    llm.generate(A, GREEDY)
    held = [
        weakref.ref(kv_memory(llm.engine).keys[0]),
        weakref.ref(runner_of(llm.engine)._backend),
    ]
    assert len(set(table) - before) == 1, "the model does not go by way of transformers' table"
    del llm
    gc.collect()
    alive, left = [one() for one in held], set(table) - before
    for name in left:
        unregister(name)
    assert alive == [None, None]
    assert len(left) == (0 if is_unregistered else 1)
