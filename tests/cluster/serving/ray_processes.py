"""Replicas' processes on a Ray that runs, and what comes about there after a while."""

import os
import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    """Return once it is so. Raises AssertionError if it is not in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def process_of(replica: str) -> int:
    """The process id of a replica."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    named = next(one for one in actors if one["name"].endswith(f"#{replica}"))
    actor = ray.get_actor(**named)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
