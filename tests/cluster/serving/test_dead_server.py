"""A server is killed on a Ray that outlives it: its requests end, and other servers continue.

The servers are separate processes, which run the functions here, because Ray reads its token
once, on import.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from headstart import SamplingParams
from headstart.cluster.options import ReplicaConfig
from tests.cluster.serving.ray_processes import run, start, wait_until

if TYPE_CHECKING:
    from headstart.cluster.serving.cluster import ReplicaCluster

pytest.importorskip("ray", reason="replicas need Ray")
pytestmark = pytest.mark.timeout(240)

MODEL = "headstart-tiny"
OPTIONS = {"num_blocks": 512, "max_num_seqs": 4, "dtype": "float32", "debug": True}
SILENCE = 2.0
STREAMS, LONG, SHORT = 400, 1500, 32  # minutes of work, so that no request ends by itself


def join(silence: float) -> ReplicaCluster:
    """Create a server; the first one deploys the replicas."""
    from headstart.cluster.serving.cluster import ReplicaCluster

    config = ReplicaConfig(replicas=2, replica_cpus=0.5)
    return ReplicaCluster(MODEL, OPTIONS, config, silence=silence)


def stream_for_ever() -> None:
    """Run the server that is to be killed."""
    cluster = join(SILENCE)
    print("replicas run", flush=True)
    params = SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True)

    async def stream(row: int) -> None:
        async for _ in cluster.llm.generate(f"Row {row} of many.", params):
            pass

    async def stream_all() -> None:
        await asyncio.gather(*map(stream, range(STREAMS)))

    asyncio.run(stream_all())


def watch() -> None:
    """Run another server, which prints when the first server's streams run and how they end."""
    from ray import serve

    with closing(join(1e6)) as cluster:  # only the first report counts
        wait_until(lambda: read(cluster, "vllm:num_requests_running") == [4, 4])
        print("streams run", flush=True)
        wait_until(lambda: read(cluster, "vllm:num_requests_running") == [0, 0])
        assert read(cluster, "vllm:num_requests_waiting") == [0, 0]
        wait_until(lambda: read(cluster, "vllm:kv_cache_usage_perc") == [0, 0])
        assert len(ask(cluster)) == SHORT
    with closing(join(1e6)) as cluster:
        assert len(ask(cluster)) == SHORT
        # Otherwise Ray waits half a minute for these replicas on shutdown.
        serve.shutdown()


def read(cluster: ReplicaCluster, name: str) -> list[float]:
    """Return a metric of each replica."""
    metrics = cluster.llm.dispatcher.metrics.values()
    return [metric.value for group in metrics for metric in group if metric.name == name]  # type: ignore[union-attr]


def ask(cluster: ReplicaCluster) -> list[int]:
    """Return the tokens of an answer."""
    params = SamplingParams(max_tokens=SHORT, temperature=0, ignore_eos=True)

    async def last() -> list[int]:
        async for output in cluster.llm.generate("How old is Anna?", params):  # noqa: B007
            pass
        return list(output.outputs[0].token_ids)

    return asyncio.run(last())


@pytest.fixture
def ray_of_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a Ray for the servers to join."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    ray = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts"]
    few = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    command = [*ray, "start", "--head", "--block", f"--port={port}", *few]
    with run(command, "Ray runtime started"):
        yield


@pytest.mark.usefixtures("ray_of_others")
def test_requests_of_a_killed_server_end_and_others_continue() -> None:
    """Regression: replicas computed on, as Ray does not end the calls of a killed process."""
    with start(stream_for_ever, "replicas run") as server, start(watch, "streams run") as other:
        os.kill(server.pid, signal.SIGKILL)
        assert other.wait(120) == 0
