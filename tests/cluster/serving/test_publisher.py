"""What a replica tells of its cache is what it holds, also after a gap and beside a disk tier."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cache import BlockHash
from headstart.cache.block import PartialNode
from headstart.cluster import ReplicaIndex
from headstart.cluster.index import prefix_keys
from headstart.cluster.serving import publisher as publishing
from headstart.cluster.serving.messages import Report
from headstart.cluster.serving.publisher import CachePublisher
from headstart.engine.startup.start import start_engine

MODEL = "headstart-tiny"
PROMPTS = [f"Row {row}. " + "Anna is 31. Ben is 45. " * 6 for row in range(6)]
TOKEN = SamplingParams(max_tokens=1, temperature=0)
LONG = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def observed(**options: Any) -> AsyncLLM:
    given = {"num_blocks": 24, "dtype": "float32", **options}  # too few for all prompts at once
    return AsyncLLM.from_started(start_engine(MODEL, given, is_observed=True))


@pytest.fixture(params=["pool alone", "with a folder"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncLLM]:
    folder = {} if request.param == "pool alone" else {"cache_dir": str(tmp_path / "kept")}
    made = observed(**folder)
    yield made
    made.close()


async def compute(llm: AsyncLLM, publisher: CachePublisher, prompts: list[str]) -> None:
    for prompt in prompts:
        async for _ in llm.generate(prompt, TOKEN):
            pass
        await publisher.publish()


async def names_in_pool(llm: AsyncLLM) -> set[BlockHash]:
    """The oracle: the full blocks of the pool itself."""

    def look() -> set[BlockHash]:
        manager = llm.engine.manager
        return {
            manager.names.of_node(block.node)
            for block in manager.pool.blocks
            if block.node is not None and not isinstance(block.node, PartialNode)
        }

    return await llm.call(look)


async def read(index: ReplicaIndex, reports: AsyncGenerator[Report], count: int) -> list[bool]:
    batches = [(await anext(reports)).batch for _ in range(count)]
    return [index.apply(batch) for batch in batches if batch is not None]


def held(index: ReplicaIndex) -> set[int]:
    return {key for part in index._holders["pool"] for key in part}


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


def test_a_reader_that_is_too_slow_sees_the_gap_and_follows_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "_MOST_QUEUED", 1)

    async def follow(llm: AsyncLLM) -> None:
        publisher, index = CachePublisher(llm), ReplicaIndex(1)
        async with aclosing(publisher.follow("a server")) as reports:
            await read(index, reports, 1)
            await compute(llm, publisher, PROMPTS[:3])  # two of three batches find no place
            assert await read(index, reports, 1) == [True]
            await compute(llm, publisher, PROMPTS[3:4])
            assert await read(index, reports, 1) == [False]
        async with aclosing(publisher.follow("a server")) as reports:
            assert await read(index, reports, 1) == [True]
        assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    llm = observed()
    asyncio.run(follow(llm))
    llm.close()


def test_a_reset_is_told(llm: AsyncLLM) -> None:
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


def test_what_is_computed_after_a_reset_is_known(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ran is computed anew at once: before the reset is told, if steps came between.

    Here they come between any two calls of the engine.
    """
    call = llm.call

    async def follow() -> None:
        publisher, index = CachePublisher(llm), ReplicaIndex(1)
        outputs = llm.generate(PROMPTS[0], LONG)

        async def step_and_call(function: Callable[[], Any]) -> Any:
            for _ in range(8):
                await anext(outputs)
            return await call(function)

        async with aclosing(outputs), aclosing(publisher.follow("a server")) as reports:
            await read(index, reports, 1)
            with monkeypatch.context() as patch:
                patch.setattr(llm, "call", step_and_call)
                assert await publisher.reset(True, False)
            async for _ in outputs:
                pass
            await publisher.publish()
            await read(index, reports, 2)
        assert held(index) == set(prefix_keys(list(await names_in_pool(llm))))

    asyncio.run(follow())


def test_another_start_has_another_epoch() -> None:
    llm = observed()
    first, second = (CachePublisher(llm)._events.snapshot() for _ in range(2))
    assert first.epoch != second.epoch and replace(first, epoch=0) == replace(second, epoch=0)
    llm.close()
