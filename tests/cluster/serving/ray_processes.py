"""Helpers for processes of Ray, replicas and servers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until the condition is true. Raises AssertionError on a timeout."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def process_of(replica: str) -> int:
    """Return the process id of a replica."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    name = next(actor for actor in actors if actor["name"].endswith(f"#{replica}"))
    actor = ray.get_actor(**name)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


@contextmanager
def start(function: Callable[[], None], text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a function in a new process, and wait for a line that contains `text`."""
    call = f"import {function.__module__} as there; there.{function.__name__}()"
    with run([sys.executable, "-W", "ignore", "-c", call], text) as process:
        yield process


@contextmanager
def run(command: list[str], text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command and wait for a line that contains `text`; terminate it on exit."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(text in line for line in process.stdout), "it ended first"
            yield process
        finally:
            process.terminate()
