"""One replica, called as Ray Serve does. Without Ray."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart import SamplingParams
from headstart.cache import TokenSequence
from headstart.cluster.serving import heartbeat
from headstart.cluster.serving.heartbeat import Heartbeats
from headstart.cluster.serving.messages import AnswerRequest, Follow
from headstart.cluster.serving.replica import EngineReplica
from headstart.engine.adapter_names import Adapter
from headstart.engine.request import RequestGroup
from headstart.errors import DamagedAdapterError, EngineError, ModelError
from headstart.models.files import find_folder
from tests.cluster.serving.in_process import llm_of
from tests.tiny_adapters import make_adapter

ASKED = AnswerRequest(
    request_id="a",
    prompt_token_ids=[5, 6, 7],
    params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    salt=None,
    owner=None,
    priority=0,
    marks=(),
    every_step=False,
    server="s",
)


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    replica = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    yield replica
    llm_of(replica).close()


class _BrokenGauges:
    def update(self, values: list[Any]) -> None:
        raise KeyError("headstart:new_metric")


def test_failing_metrics_do_not_make_a_replica_unhealthy(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(replica, "_gauges", _BrokenGauges())
    asyncio.run(replica.check_health())
    message = "the replica's metrics cannot be passed to Ray"
    assert any(message in record.getMessage() for record in logged)


def test_an_attempt_may_arrive_while_the_previous_one_runs(replica: EngineReplica) -> None:
    """An unreachable replica may get the same request again when it is back."""

    async def ask_twice() -> None:
        async with (
            aclosing(replica.answer(ASKED)) as first,
            aclosing(replica.answer(replace(ASKED, attempt=1))) as second,
        ):
            parts = [await anext(first), await anext(second)]
        assert parts[0].answers == parts[1].answers

    asyncio.run(ask_twice())


def test_an_event_loop_that_ends_amid_an_answer_leaves_no_task(replica: EngineReplica) -> None:
    answers = []  # which the loop closes, and not the garbage collector

    async def leave() -> None:
        answers.append(replica.answer(ASKED))
        await anext(answers[0])

    asyncio.run(leave())
    task = replica._publisher._task
    assert task is not None
    assert task.cancelled()


def test_two_adapters_of_one_name_answer_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an adapter's name was reassigned before its request was prepared."""
    model = find_folder("headstart-tiny")
    folders = [make_adapter(model, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    options = {"num_blocks": 64, "dtype": "float32", "enable_lora": True}
    replica = EngineReplica("headstart-tiny", options)
    llm, loading = llm_of(replica), Counter[str]()
    load, prepare = llm.load_adapter, llm.prepare

    async def load_counted(name: str, path: Path) -> Adapter:
        loading[name] += 1
        adapter = await load(name, path)
        loading[name] -= 1
        return adapter

    async def prepare_late(*args: Any, **options: Any) -> RequestGroup:
        while loading["x"]:
            await asyncio.sleep(0)
        return await prepare(*args, **options)

    async def ask_all() -> None:
        adapters = [await replica.load_adapter("x", folder) for folder in folders]
        monkeypatch.setattr(llm, "load_adapter", load_counted)
        monkeypatch.setattr(llm, "prepare", prepare_late)

        async def ask(i: int) -> list[int]:
            message = replace(ASKED, request_id=f"{i}", adapter=adapters[i % 2])
            async with aclosing(replica.answer(message)) as parts:
                return [token async for part in parts for token in part.answers[0].token_ids]

        answers = await asyncio.gather(*map(ask, range(6)))
        assert answers[::2] == [answers[0]] * 3 and answers[1::2] == [answers[1]] * 3
        other_files = replace(adapters[0], digest="another")
        with pytest.raises(DamagedAdapterError, match=f"{folders[0]} .* differ .*'x'"):
            await anext(replica.answer(replace(ASKED, request_id="d", adapter=other_files)))
        [named] = llm.engine.adapters.named
        other = next(entry for entry in adapters if entry != named)
        await replica.unload_adapter(other)
        assert llm.engine.adapters.named == [named], "the name is another's"
        await replica.unload_adapter(named)
        assert llm.engine.adapters.named == []

    try:
        asyncio.run(ask_all())
    finally:
        llm.close()


def test_tenants_share_only_the_prefix_that_a_request_marks_public() -> None:
    """Regression: replicas had no public prefixes. A restarted one learns them from requests."""
    prompt = list(range(3, 3 + 70))  # four blocks and a part of one

    async def count_cached(replica: EngineReplica, salt: str, num_public: int) -> int:
        message = replace(
            ASKED, request_id=salt, prompt_token_ids=prompt, salt=salt, num_public=num_public
        )
        async with aclosing(replica.answer(message)) as parts:
            heads = [part.head async for part in parts]
        assert heads[0] is not None
        return heads[0].num_cached_tokens

    async def run() -> None:
        restarted = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
        names = llm_of(restarted).engine.manager.hasher
        assert await count_cached(restarted, "a", 2) == 0
        assert await count_cached(restarted, "b", 2) == 2 * names.block_size
        sequence = TokenSequence("lookup", prompt, salt="c", public=names.public)
        sequence.cut(names.block_size)
        assert sequence.num_public == 2
        llm_of(restarted).close()

    asyncio.run(run())


def test_a_replica_that_did_not_start_is_deleted_silently() -> None:
    replica = EngineReplica.__new__(EngineReplica)
    with pytest.raises(ModelError):
        replica.__init__("/nowhere", {})  # type: ignore[misc]
    replica.__del__()


def test_a_closed_engine_is_unhealthy() -> None:
    replica = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    replica.__del__()
    with pytest.raises(EngineError):
        asyncio.run(replica.check_health())


def test_only_a_silent_servers_requests_end(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(replica, "_servers", Heartbeats(120.0, lambda: now[0]))
    aborted: list[str] = []
    abort = llm_of(replica).abort

    async def note(request_id: str) -> None:
        aborted.append(request_id)
        await abort(request_id)

    monkeypatch.setattr(llm_of(replica), "abort", note)
    long = replace(ASKED, params=SamplingParams(max_tokens=800, temperature=0, ignore_eos=True))

    async def fall_silent() -> None:
        async with (
            aclosing(replica.answer(replace(long, request_id="d", server="dead"))) as dead,
            aclosing(replica.answer(replace(ASKED, request_id="l", server="alive"))) as alive,
            aclosing(replica.follow(Follow("r", "dead"))) as dead_feed,
            aclosing(replica.follow(Follow("r", "alive"))) as live_feed,
        ):
            for stream in (dead, alive, dead_feed, live_feed):
                await anext(stream)
            now[0] = 100.0
            await replica.beat("alive")
            await replica.check_health()
            assert set(replica._publisher._followers) == {"dead", "alive"}
            now[0] = 130.0
            await replica.check_health()
            assert set(replica._publisher._followers) == {"alive"}
            assert aborted == ["d"]
            assert [report async for report in dead_feed] == []
            with pytest.raises(StopAsyncIteration):
                await anext(dead)
            assert (await anext(alive)).finished

    asyncio.run(fall_silent())


class _Heard:
    """A deployment; its first broadcast fails."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.is_heard = asyncio.Event()

    def broadcast(self, method: str, server: str) -> "_Heard":
        """Call the method on every replica, as Ray Serve does."""
        self.heard.append((method, server))
        return self

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        """Return the results, as Ray Serve does."""
        if len(self.heard) == 1:
            raise EngineError("no replica runs")
        self.is_heard.set()
        return []


def test_a_server_sends_heartbeats_after_one_failed() -> None:
    async def sign() -> None:
        handle = _Heard()
        signing = asyncio.ensure_future(heartbeat.send_heartbeats(handle, "s", 0.0))  # type: ignore[arg-type]
        await handle.is_heard.wait()
        signing.cancel()
        assert handle.heard[:2] == [("beat", "s")] * 2
        assert hasattr(EngineReplica, "beat")

    asyncio.run(sign())
