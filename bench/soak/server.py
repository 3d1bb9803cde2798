"""The server of `soak.py`, in a separate process.

    python bench/soak/server.py REPLICAS [MODEL]

It prints its port. For each line that it reads, it checks the pool, and prints the numbers of all
blocks and of free blocks, its memory in MB, and for a model with recurrent layers its slots for
states. With 0 replicas the engine is in this process. Otherwise it prints the process ids of the
running replicas, and the least number of free blocks in a replica, as last reported.

MODEL: a folder instead of headstart-tiny.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart import AsyncLLM
from headstart.engine.metrics import Gauge, Metric
from headstart.server.launch import create_app, listen
from headstart.server.launch import serve as run
from headstart.server.options import ServerOptions

MODEL, BLOCKS, RUNNING, WAITING, LONGEST = "headstart-tiny", 96, 8, 16, 512
LOST = 0.2  # share of the replicas' cache messages that is dropped

Json = dict[str, Any]


def serve(replicas: int, model: str) -> None:
    """Serve, and print the state of the pool for each line of stdin."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of Ray goes to stderr
    engine: Json = {"num_blocks": BLOCKS, "max_num_seqs": RUNNING, "max_model_len": LONGEST}
    options = ServerOptions(port=0, api_keys=False, max_waiting=WAITING)
    listener = listen(options)
    more: Json = {}
    if replicas:
        cluster, router = start_replicas(engine, replicas)
        llm: AsyncLLM = cluster.llm
        dispatcher = cluster.llm.dispatcher
        more = {"cache_api": router}
    else:
        llm = AsyncLLM(model, num_threads=1, **engine)

    def look() -> Json:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        state: Json = {"blocks": BLOCKS, "free": BLOCKS, "megabytes": pages * 4096 / 1e6}
        if not replicas:
            manager = llm.engine.manager
            manager.check()
            state["free"] = manager.num_free_blocks
            if (states := manager.states) is not None:
                state["slots"] = states.num_slots
                state["checkpoints"] = len(states.checkpoints)
                state["free_slots"] = states.num_free
                state["dropped"] = states.num_dropped
        else:
            state["replicas"] = find_processes(dispatcher.replicas)
            state["free"] = BLOCKS - count_held(dispatcher.metrics)
        return state

    def answer() -> None:
        for _ in sys.stdin:
            try:
                state = llm.driver.call(look)
            except BaseException as error:
                state = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(state), file=output)

    threading.Thread(target=answer, daemon=True).start()
    app = create_app(llm, MODEL, options, **more)
    print(json.dumps({"port": listener.getsockname()[1]}), file=output)
    run(app, listener)
    llm.close()
    if replicas:
        cluster.close()


def start_replicas(engine: Json, replicas: int) -> tuple[Any, Any]:
    """Start a cluster that loses some cache messages; return it and its cache API."""
    from headstart.cluster.options import ReplicaConfig
    from headstart.cluster.serving.cluster import ReplicaCluster
    from headstart.cluster.serving.llm import router

    config = ReplicaConfig(replicas=replicas, replica_cpus=0.5)
    cluster = ReplicaCluster(MODEL, engine | {"debug": True}, config, drain_seconds=5.0)
    dispatcher, rng = cluster.llm.dispatcher, random.Random(0)
    apply = dispatcher.apply

    def lossy(replica: str, batch: Any) -> bool:
        return True if rng.random() < LOST else apply(replica, batch)

    setattr(dispatcher, "apply", lossy)  # noqa: B010 (a method is not to be assigned to)
    return cluster, router


def count_held(metrics_of: Mapping[str, list[Metric]]) -> int:
    """Return the held blocks of the replica that holds most, from the replicas' metrics."""
    usage = "vllm:kv_cache_usage_perc"
    shares = [
        metric.value
        for metrics in metrics_of.values()
        for metric in metrics
        if isinstance(metric, Gauge) and metric.name == usage
    ]
    return round(BLOCKS * max(shares, default=0.0))


def find_processes(replicas: list[str]) -> list[int]:
    """Return the process ids of replicas, given their names in Ray Serve."""
    from ray._private.state import actors

    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    return [actor["Pid"] for actor in alive if actor["Name"].rpartition("#")[2] in replicas]


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:] or [MODEL])
