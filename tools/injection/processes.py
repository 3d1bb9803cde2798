"""Faults of processes: killed or stopped processes, a held index, several writers."""

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

from headstart.tiers.contents import verify
from headstart.tiers.index import INDEX
from injection.blocks import block, name
from injection.world import MODELS, PROMPTS, Outcome, examine, exercise, open_store

__all__ = ["PROCESSES", "work"]

_LOCKS = ("BEGIN EXCLUSIVE", "BEGIN IMMEDIATE", "BEGIN; SELECT count(*) FROM blocks")


def work(random: Random, folder: Path, turns: int, started: int | None = None) -> None:
    """Save, load, touch and remove blocks at random, and check all that is loaded.

    started: a pipe to write to after the first turn.
    """
    model = random.choice(MODELS)
    first = PROMPTS[model][0].start
    prompts = [range(first + 1000 * i, first + 1000 * i + 20) for i in range(12)]
    store = open_store(folder, model)
    for turn in range(turns):
        prompt = random.choice(prompts)
        numbers = prompt[: random.randint(1, 20)]
        roll = random.random()
        if roll < 0.5:
            store.save([block(number, time.time(), model) for number in numbers])
        elif roll < 0.8:
            exercise(store, model, [numbers])
        elif roll < 0.9:
            store.touch([name(number) for number in numbers])
        elif roll < 0.97:
            store.remove([name(number) for number in numbers])
        else:
            store.close()
            store = open_store(folder, model)
        if turn == 0 and started is not None:
            os.write(started, b"!")
    store.close()


@contextmanager
def _worker(random: Random, folder: Path) -> Iterator[int]:
    """Run a process that uses the folder; kill it at the end."""
    seed = random.getrandbits(60)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(Random(seed), folder, 1 << 30, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        os.read(reading, 1)
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def killed(random: Random, folder: Path) -> Outcome:
    """Kill a process that uses the folder."""
    with _worker(random, folder):
        time.sleep(random.random() * 0.03)
    found = verify(folder).total
    outcome = examine(folder)
    outcome.lost = found.damaged + found.lost
    return outcome


def stopped(random: Random, folder: Path) -> Outcome:
    """Stop a process that uses the folder and may hold the index; then kill or continue it."""
    with patch("headstart.tiers.index._TIMEOUT", 0.005), _worker(random, folder) as child:
        time.sleep(random.random() * 0.02)
        os.kill(child, signal.SIGSTOP)
        work(random, folder, 3)
        if random.random() < 0.5:
            os.kill(child, signal.SIGCONT)
            work(random, folder, 3)
    outcome = examine(folder)
    outcome.lost = 0  # the process evicted blocks normally
    return outcome


def together(random: Random, folder: Path) -> Outcome:
    """Run two or four processes at once, with a budget that is too small for them."""
    children = []
    for _ in range(random.choice((2, 4))):
        seed = random.getrandbits(60)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(Random(seed), folder, 40)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    victim = random.choice(children) if random.random() < 0.3 else None
    if victim is not None:
        time.sleep(random.random() * 0.1)
        os.kill(victim, signal.SIGKILL)
    failed = [child for child in children if os.waitpid(child, 0)[1] and child != victim]
    found = verify(folder).total
    outcome = examine(folder)
    outcome.lost = found.damaged + found.lost
    if failed:
        outcome.problem = "a process ended with an exception"
    return outcome


def busy(random: Random, folder: Path) -> Outcome:
    """Hold the index in another process."""
    with (
        patch("headstart.tiers.index._TIMEOUT", 0.005),
        closing(open_store(folder)) as store,
        closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as other,
    ):
        if random.random() < 0.5:
            exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        for statement in random.choice(_LOCKS).split("; "):
            other.execute(statement).fetchone()
        work(random, folder, 5)
        store.save([block(number, time.time()) for number in range(9000, 9004)])
        exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        other.execute("ROLLBACK")
        outcome = examine(folder, store)
    outcome.lost = 0
    return outcome


PROCESSES: dict[str, Callable[[Random, Path], Outcome]] = {
    "process killed": killed,
    "process stopped": stopped,
    "processes at once": together,
    "index held": busy,
}
