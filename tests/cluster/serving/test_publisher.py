"""Events of a replica match its cache, even after a gap and with a disk tier."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cache import BlockHash
from headstart.cache.block import PartialNode
from headstart.cluster import ReplicaIndex
from headstart.cluster.events import DISK, POOL
from headstart.cluster.index import prefix_keys
from headstart.cluster.serving import replica as publishing
from headstart.cluster.serving.messages import Report
from headstart.cluster.serving.replica import CachePublisher
from headstart.frontend.facade import start_engine
from tests.cluster.tables import holders

MODEL = "headstart-tiny"
PROMPTS = [f"Row {row}. " + "Anna is 31. Ben is 45. " * 6 for row in range(6)]
TOKEN = SamplingParams(max_tokens=1, temperature=0)
LONG = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def observed(**options: Any) -> AsyncLLM:
    merged = {"num_blocks": 24, "dtype": "float32", **options}  # too few for all prompts at once
    return AsyncLLM.from_started(start_engine(MODEL, merged, is_observed=True))


@pytest.fixture(params=["pool alone", "with a folder"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncLLM]:
    folder = {} if request.param == "pool alone" else {"cache_dir": str(tmp_path / "kept")}
    llm = observed(**folder)
    yield llm
    llm.close()


async def compute(llm: AsyncLLM, publisher: CachePublisher, prompts: list[str]) -> None:
    for prompt in prompts:
        async for _ in llm.generate(prompt, TOKEN):
            pass
        await publisher.publish()


async def names_in_pool(llm: AsyncLLM) -> set[BlockHash]:
    """Return the hashes of the pool's full blocks, the expected contents of an index."""

    def look() -> set[BlockHash]:
        manager = llm.engine.manager
        return {
            manager.hasher.of_node(block.node)
            for block in manager.pool.blocks
            if block.node is not None and not isinstance(block.node, PartialNode)
        }

    return await llm.call(look)


async def read(index: ReplicaIndex, reports: AsyncGenerator[Report], count: int) -> list[bool]:
    """Read `count` reports of the pool, with the store's reports in between."""
    applied: list[bool] = []
    while count:
        batch = (await anext(reports)).batch
        is_current = batch is None or index.apply(batch)
        if batch is None or batch.tier == POOL:
            count -= 1
            applied += [is_current] if batch is not None else []
    return applied


def held(index: ReplicaIndex) -> set[int]:
    return set(holders(index))


def test_the_index_of_a_follower_is_the_pool(llm: AsyncLLM) -> None:
    async def follow() -> None:
        publisher, index = CachePublisher(llm), ReplicaIndex(1)
        await compute(llm, publisher, PROMPTS[:2])
        async with aclosing(publisher.follow("a server")) as reports:
            assert await read(index, reports, 1) == [True]  # the snapshot
            await compute(llm, publisher, PROMPTS[2:])
            assert llm.engine.manager.num_evictions > 0
            assert all(await read(index, reports, len(PROMPTS) - 2))
        assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    asyncio.run(follow())


def test_a_reader_that_is_too_slow_detects_the_gap_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "_MOST_QUEUED", 1)

    async def follow(llm: AsyncLLM) -> None:
        publisher, index = CachePublisher(llm), ReplicaIndex(1)
        async with aclosing(publisher.follow("a server")) as reports:
            await read(index, reports, 1)
            await compute(llm, publisher, PROMPTS[:3])  # two of three batches do not fit
            assert await read(index, reports, 1) == [True]
            await compute(llm, publisher, PROMPTS[3:4])
            assert await read(index, reports, 1) == [False]
        async with aclosing(publisher.follow("a server")) as reports:
            assert await read(index, reports, 1) == [True]
        assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    llm = observed()
    asyncio.run(follow(llm))
    llm.close()


def test_a_reset_is_reported(llm: AsyncLLM) -> None:
    async def follow() -> None:
        publisher, index = CachePublisher(llm), ReplicaIndex(1)
        await compute(llm, publisher, PROMPTS[:2])
        async with aclosing(publisher.follow("a server")) as reports:
            await read(index, reports, 1)
            assert held(index)
            assert await publisher.reset(False, False)
            assert await read(index, reports, 1) == [True]
            assert not held(index)
            await compute(llm, publisher, PROMPTS[:1])
            assert await read(index, reports, 1) == [True]
            assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    asyncio.run(follow())


def test_blocks_computed_after_a_reset_are_reported(llm: AsyncLLM) -> None:
    """Its events follow the reset, even if the request continues before the reset is reported.

    Steps run between any two calls of the engine.
    """

    class Stepping:
        """An engine that may run steps before each call."""

        steps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(llm, name)

        async def call(self, function: Callable[[], Any]) -> Any:
            for _ in range(self.steps):
                await anext(outputs)
            return await llm.call(function)

    outputs, stepping = llm.generate(PROMPTS[0], LONG), Stepping()

    async def follow() -> None:
        publisher, index = CachePublisher(cast("AsyncLLM", stepping)), ReplicaIndex(1)
        async with aclosing(outputs), aclosing(publisher.follow("a server")) as reports:
            await read(index, reports, 1)
            stepping.steps = 8
            assert await publisher.reset(True, False)
            stepping.steps = 0
            async for _ in outputs:
                pass
            await publisher.publish()
            await read(index, reports, 2)
        assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    asyncio.run(follow())


@pytest.mark.parametrize("most", [1000, 3])
def test_saved_blocks_are_reported_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(publishing, "_MOST_STORED", most)

    async def follow(llm: AsyncLLM) -> None:
        publisher, index, again = CachePublisher(llm), ReplicaIndex(1), ReplicaIndex(1)
        await compute(llm, publisher, PROMPTS[:1])
        assert await llm.call(lambda: llm.engine.tiers.flush(30.0))
        async with aclosing(publisher.follow("a server")) as reports:
            await publisher.publish()
            while not on_disk(index):
                await read_one(index, reports)
        names = await names_in_pool(llm)
        assert len(names) > 3
        saved = on_disk(index)
        assert saved <= set(prefix_keys(list(names))) and len(saved) == min(most, len(names))
        async with aclosing(publisher.follow("another")) as reports:
            await read_one(again, reports)
            await read_one(again, reports)
            assert on_disk(again) == saved
            assert await publisher.reset(False, True)
            await read_one(again, reports)
            await read_one(again, reports)
        assert not on_disk(again) and not held(again)

    llm = observed(cache_dir=str(tmp_path / "kept"))
    asyncio.run(follow(llm))
    llm.close()


def on_disk(index: ReplicaIndex) -> set[int]:
    return set(holders(index, DISK))


async def read_one(index: ReplicaIndex, reports: AsyncGenerator[Report]) -> None:
    batch = (await anext(reports)).batch
    assert batch is None or index.apply(batch)


def test_another_start_has_another_epoch() -> None:
    llm = observed()
    first, second = (CachePublisher(llm)._events.snapshot() for _ in range(2))
    assert first.epoch != second.epoch and replace(first, epoch=0) == replace(second, epoch=0)
    llm.close()
