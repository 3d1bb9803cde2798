"""Processes of Ray, replicas and servers, and what comes about there after a while."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


@contextmanager
def start(function: Callable[[], None], said: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs a function of a module, and wait for its first line."""
    call = f"import {function.__module__} as there; there.{function.__name__}()"
    with run([sys.executable, "-W", "ignore", "-c", call], said) as process:
        yield process


@contextmanager
def run(command: list[str], said: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed this line; it is ended after use."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(said in line for line in process.stdout), "it ended first"
            yield process
        finally:
            process.terminate()
