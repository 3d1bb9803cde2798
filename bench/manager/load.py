"""The load that a cache manager meets, and the turns in which two of them meet it.

Needs neither of them: each runs in a process of its own, in the environment that has it. The
clock of these machines changes twofold from one second to the next, so two managers take turns
of a few milliseconds, and a share is the median of the shares of the turns.
"""

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

TOKENS, BLOCK, RUNNING = 8192, 16, 256
REQUESTS = 5  # in a turn
PARTS = ("naming", "lookup", "allocation", "free")
MICRO = 1e6
MANY, SOME = 1_000_000, 20_000  # blocks: to make a pool of, and to fill for its memory
Figures = dict[str, float]


class Subject(ABC):
    """A manager under the load, by what a request does to it, in thread seconds.

    A sequence is whatever the manager knows a request by.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._rng = random.Random(0)
        for at in range(num_blocks // (TOKENS // BLOCK) + 1):
            self.free(self.run(f"fill {at}", self.tokens(TOKENS)))

    @abstractmethod
    def run(self, name: str, tokens: list[int]) -> Any:
        """Admit and compute a whole prompt in one step."""

    @abstractmethod
    def free(self, sequence: Any) -> None:
        """The request has ended."""

    @abstractmethod
    def parts(self, name: str, tokens: list[int]) -> Iterable[None]:
        """A prompt of which the first half is cached: goes on after each of `PARTS`."""

    @abstractmethod
    def decode(self, sequences: list[Any], tokens: list[int]) -> None:
        """One step: a generated token for each sequence, and its slot."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if something is wrong."""

    def tokens(self, count: int) -> list[int]:
        """Token ids of a large vocabulary."""
        return [self._rng.randrange(150_000) for _ in range(count)]

    def turn(self, at: int) -> Figures:
        """Microseconds of a request, and of a token in 16 steps in which each fills a block.

        Medians over a few, since the first find the other manager's data in the processor.
        """
        running = [
            self.run(f"decode {at}, {i}", self.tokens(512 + i % BLOCK)) for i in range(RUNNING)
        ]
        found = [
            self._request(f"{at}, {i}") | {"decode_us": self._decode(running)}
            for i in range(REQUESTS)
        ]
        self._end(running)
        return {name: statistics.median(one[name] for one in found) for name in found[0]}

    def _request(self, name: str) -> Figures:
        head = self.tokens(TOKENS // 2)
        self.free(self.run(f"head {name}", head))
        tokens = head + self.tokens(TOKENS // 2)
        marks = [time.thread_time()]
        marks += [time.thread_time() for _ in self.parts(f"request {name}", tokens)]
        times = [(end - start) * MICRO for start, end in pairwise(marks)]
        figures = {f"{part}_us": spent for part, spent in zip(PARTS, times, strict=True)}
        return figures | {"request_us": sum(times)}

    def _decode(self, running: list[Any]) -> float:
        spent = 0.0
        for _ in range(BLOCK):
            tokens = self.tokens(RUNNING)
            start = time.thread_time()
            self.decode(running, tokens)
            spent += time.thread_time() - start
        return spent / BLOCK / RUNNING * MICRO

    def _end(self, running: list[Any]) -> None:
        """Each fills its last block first, so that no request of the next turn evicts a part."""
        for at in range(BLOCK):
            for sequence in running[-at % BLOCK :: BLOCK]:
                self.free(sequence)
            going = [one for i, one in enumerate(running) if -i % BLOCK > at]
            self.decode(going, self.tokens(len(going)))


def measure_memory(make: Callable[[int], object], cached: Callable[[int], Subject]) -> Figures:
    """Seconds to make an empty pool; bytes a cached block costs, all told."""
    start = time.thread_time()
    empty = make(MANY)
    init = time.thread_time() - start
    del empty
    gc.collect()
    tracemalloc.start()
    subject = cached(SOME)
    for at in range(2 * SOME // (TOKENS // BLOCK) + 2):
        subject.free(subject.run(f"more {at}", subject.tokens(TOKENS)))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] / SOME
    tracemalloc.stop()
    subject.check()
    return {"pool_init_s": init, "bytes_per_block": used}


def answer(subject: Subject, memory: Callable[[], Figures]) -> None:
    """Take a turn for each line of standard input, and measure the memory at its end."""
    for at, _ in enumerate(sys.stdin):
        print(json.dumps(subject.turn(at)), flush=True)
    subject.check()
    print(json.dumps(memory()), flush=True)


class Peer:
    """A manager in a process of its own, which takes a turn when it is asked."""

    def __init__(self, command: list[str], package: Path | None = None) -> None:
        """`package`: the folder that it imports headstart from, if not the usual one."""
        environment = dict(os.environ)
        if package is not None:
            environment["PYTHONPATH"] = str(package)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def turn(self) -> Figures:
        """Its figures of one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> Figures:
        """Return the figures that it measures at the end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._read()

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        figures: Figures = json.loads(self._process.stdout.readline())
        return figures
