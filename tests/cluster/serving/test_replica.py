"""One replica, called as Ray Serve would. Without Ray."""

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
    made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    yield made
    llm_of(made).close()


class _BrokenGauges:
    def update(self, values: list[Any]) -> None:
        raise KeyError("headstart:new_metric")


def test_metrics_that_cannot_be_told_do_not_make_a_replica_ill(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(replica, "_gauges", _BrokenGauges())
    asyncio.run(replica.check_health())
    told = "the replica's metrics cannot be passed to Ray"
    assert any(told in record.getMessage() for record in logged)


def test_an_attempt_may_come_where_the_one_before_still_runs(replica: EngineReplica) -> None:
    """A replica that could not be reached for a moment may be asked again for the same request."""

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


def test_two_adapters_of_one_name_answer_their_own_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding an adapter and preparing its request another one took the name."""
    model = find_folder("headstart-tiny")
    folders = [make_adapter(model, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    options = {"num_blocks": 64, "dtype": "float32", "enable_lora": True}
    made = EngineReplica("headstart-tiny", options)
    llm, loading = llm_of(made), Counter[str]()
    load, prepare = llm.load_adapter, llm.prepare

    async def load_counted(name: str, path: Path) -> Adapter:
        loading[name] += 1
        adapter = await load(name, path)
        loading[name] -= 1
        return adapter

    async def prepare_late(*given: Any, **options: Any) -> RequestGroup:
        while loading["x"]:
            await asyncio.sleep(0)
        return await prepare(*given, **options)

    async def ask_all() -> None:
        adapters = [await made.load_adapter("x", folder) for folder in folders]
        monkeypatch.setattr(llm, "load_adapter", load_counted)
        monkeypatch.setattr(llm, "prepare", prepare_late)

        async def ask(at: int) -> list[int]:
            asked = replace(ASKED, request_id=f"{at}", adapter=adapters[at % 2])
            async with aclosing(made.answer(asked)) as parts:
                return [token async for part in parts for token in part.answers[0].token_ids]

        told = await asyncio.gather(*map(ask, range(6)))
        assert told[::2] == [told[0]] * 3 and told[1::2] == [told[1]] * 3
        other_files = replace(adapters[0], digest="another")
        with pytest.raises(DamagedAdapterError, match=f"{folders[0]} .* differ .*'x'"):
            await anext(made.answer(replace(ASKED, request_id="d", adapter=other_files)))
        [named] = llm.engine.adapters.named
        other = next(one for one in adapters if one != named)
        await made.unload_adapter(other)
        assert llm.engine.adapters.named == [named], "the name is another's"
        await made.unload_adapter(named)
        assert llm.engine.adapters.named == []

    try:
        asyncio.run(ask_all())
    finally:
        llm.close()


def test_tenants_share_what_a_request_says_is_public_and_nothing_after_it() -> None:
    """Replicas had no public prefixes. A restarted replica learns them from requests."""
    prompt = list(range(3, 3 + 70))  # four blocks and a part of one

    async def ask(replica: EngineReplica, salt: str, num_public: int) -> int:
        asked = replace(
            ASKED, request_id=salt, prompt_token_ids=prompt, salt=salt, num_public=num_public
        )
        async with aclosing(replica.answer(asked)) as parts:
            heads = [part.head async for part in parts]
        assert heads[0] is not None
        return heads[0].num_cached_tokens

    async def ask_all() -> None:
        made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
        names = llm_of(made).engine.manager.hasher
        assert await ask(made, "a", 2) == 0
        assert await ask(made, "b", 2) == 2 * names.block_size
        sequence = TokenSequence("asked", prompt, salt="c", public=names.public)
        sequence.cut(names.block_size)
        assert sequence.num_public == 2
        llm_of(made).close()

    asyncio.run(ask_all())


def test_a_replica_that_did_not_start_goes_without_a_word() -> None:
    made = EngineReplica.__new__(EngineReplica)
    with pytest.raises(ModelError):
        made.__init__("/nowhere", {})  # type: ignore[misc]
    made.__del__()


def test_a_closed_engine_is_ill() -> None:
    made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    made.__del__()
    with pytest.raises(EngineError):
        asyncio.run(made.check_health())


def test_what_a_silent_server_asked_for_ends_and_nothing_of_another(
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


def test_a_server_signs_life_again_after_a_sign_that_failed() -> None:
    async def sign() -> None:
        handle = _Heard()
        signing = asyncio.ensure_future(heartbeat.send_heartbeats(handle, "s", 0.0))  # type: ignore[arg-type]
        await handle.is_heard.wait()
        signing.cancel()
        assert handle.heard[:2] == [("beat", "s")] * 2
        assert hasattr(EngineReplica, "beat")

    asyncio.run(sign())
