"""With `--max-replicas`, a queue adds a replica and idleness removes it. Under real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from headstart import SamplingParams
from headstart.cluster.options import ReplicaConfig
from tests.cluster.serving.ray_processes import wait_until

if TYPE_CHECKING:
    from headstart.cluster.serving.cluster import ReplicaCluster

pytest.importorskip("ray", reason="replicas need Ray")
# Warnings of Ray and its dependencies in this process.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

# Ray Serve's defaults are 30 s until a replica is added, and ten minutes until it is removed.
QUICK = {
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 0.5,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaCluster]:
    from headstart.cluster.serving import cluster as module

    quick = partial(module.AutoscalingConfig, **QUICK)
    monkeypatch.setattr(module, "AutoscalingConfig", quick)
    config = ReplicaConfig(replicas=1, max_replicas=2, requests_per_replica=2, replica_cpus=0.5)
    with closing(
        module.ReplicaCluster("headstart-tiny", {"num_blocks": 512}, config)
    ) as replica_cluster:
        yield replica_cluster


def test_a_queue_adds_a_replica_and_idleness_removes_it(cluster: ReplicaCluster) -> None:
    replicas = cluster.llm.dispatcher
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    is_over = asyncio.Event()

    async def send_requests(row: int) -> None:
        while not is_over.is_set():
            async for _ in cluster.llm.generate(f"Row {row}.", params):
                pass

    async def send_until_two_run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for row in range(6):
                tasks.create_task(send_requests(row))
            await asyncio.to_thread(wait_until, lambda: len(replicas.replicas) == 2)
            is_over.set()

    assert len(replicas.replicas) == 1
    asyncio.run(send_until_two_run())
    wait_until(lambda: len(replicas.replicas) == 1)
