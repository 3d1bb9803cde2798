"""The load for cache managers, and the interleaved measurement of several managers.

Each manager runs in a separate process, in its own environment. The clock rate of the machine may
change by a factor of two within a second, so managers alternate in turns of a few milliseconds. A
ratio is the median of the ratios of all turns.
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
PARTS = ("identity", "lookup", "allocation", "free")
MICRO = 1e6
MANY, SOME = 1_000_000, 20_000  # blocks of an empty pool to create, and blocks to fill
Figures = dict[str, float]


class Subject(ABC):
    """A manager under load; figures are in CPU seconds of the thread.

    A sequence is the manager's own object for a request.
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
        """Release the blocks of an ended request."""

    @abstractmethod
    def parts(self, name: str, tokens: list[int]) -> Iterable[None]:
        """Handle a prompt whose first half is cached; yield after each of `PARTS`."""

    @abstractmethod
    def decode(self, sequences: list[Any], tokens: list[int]) -> None:
        """Run a decode step: append a token to each sequence, and get its slot."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""

    def tokens(self, count: int) -> list[int]:
        """Return random token ids of a large vocabulary."""
        return [self._rng.randrange(150_000) for _ in range(count)]

    def turn(self, at: int) -> Figures:
        """Return microseconds of a request, and of a token in 16 steps that fill a block each.

        Figures are medians of several requests: at first the CPU's caches have the other manager's
        data.
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
        """End requests with full last blocks, so that no partial block is evicted later."""
        for at in range(BLOCK):
            for sequence in running[-at % BLOCK :: BLOCK]:
                self.free(sequence)
            going = [one for i, one in enumerate(running) if -i % BLOCK > at]
            self.decode(going, self.tokens(len(going)))


def measure_memory(make: Callable[[int], object], cached: Callable[[int], Subject]) -> Figures:
    """Return the seconds to create an empty pool, and the total bytes per cached block."""
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
    """Run a turn for each line of standard input, and measure memory at its end."""
    for at, _ in enumerate(sys.stdin):
        print(json.dumps(subject.turn(at)), flush=True)
    subject.check()
    print(json.dumps(memory()), flush=True)


class Peer:
    """A manager in a separate process, which runs a turn on request."""

    def __init__(self, command: list[str], package: Path | None = None) -> None:
        """Start the process. package: folder from which it imports headstart, if not the usual."""
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
        """Return the figures of one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> Figures:
        """Return the figures that are measured at the end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._read()

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        figures: Figures = json.loads(self._process.stdout.readline())
        return figures
