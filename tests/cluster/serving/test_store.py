"""A new replica loads blocks that another one stored in a folder, and the router knows."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cluster.events import DISK
from headstart.cluster.options import ReplicaConfig
from tests.cluster.serving.ray_processes import process_of, wait_until
from tests.cluster.serving.test_dispatch import router_of
from tests.cluster.tables import holders

pytest.importorskip("ray", reason="replicas need Ray")
# Warnings of Ray and its dependencies in this process.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

MODEL = "headstart-tiny"
PROMPT = list(range(100, 420))
TOKENS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


async def last(llm: AsyncLLM) -> Any:
    async with aclosing(llm.generate({"prompt_token_ids": PROMPT}, TOKENS)) as outputs:
        async for output in outputs:
            final = output
    return final


def test_a_new_replica_loads_blocks_of_a_dead_one(tmp_path: Path) -> None:
    from headstart.cluster.serving.cluster import ReplicaCluster

    folder = tmp_path / "kept"
    options = {"num_blocks": 64, "dtype": "float32", "cache_dir": str(folder), "debug": True}
    cluster = ReplicaCluster(MODEL, options, ReplicaConfig(replicas=1, replica_cpus=0.25))
    try:
        dispatcher = cluster.llm.dispatcher
        first = asyncio.run(last(cluster.llm))
        assert (first.num_cached_tokens, first.num_loaded_tokens) == (0, 0)
        # Reported once saved: all full blocks.
        wait_until(lambda: len(holders(router_of(dispatcher).index, DISK)) >= 20)
        [old] = dispatcher.replicas
        os.kill(process_of(old), signal.SIGKILL)
        wait_until(lambda: dispatcher.replicas not in ([], [old]))
        again = asyncio.run(last(cluster.llm))
        assert list(again.loaded_tokens) == ["disk"] and again.num_loaded_tokens > 0
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
    finally:
        cluster.close()
