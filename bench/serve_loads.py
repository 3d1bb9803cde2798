"""The clients of `serve.py`: their requests and timings. `serve.py` describes the loads."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LOADS", "Ids", "Stream", "Timing", "run_load"]

Ids = list[int]


@dataclass
class Ask:
    """One request: tokens that start or continue a conversation, and the length of the answer."""

    prompt: Ids
    count: int
    goes_on: bool = False


@dataclass
class Timing:
    """Measurements of one run's clients, in seconds except for counts."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Timing) -> None:
        """Add the measurements of another run."""
        self.first += other.first
        self.per_token += other.per_token
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.seconds += other.seconds

    def summary(self) -> dict[str, float]:
        """Return medians, the 99th percentile, and rates."""
        ordered = sorted(self.first)
        return {
            "first_p50_ms": 1000 * statistics.median(ordered),
            "first_p99_ms": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "per_token_ms": 1000 * statistics.median(self.per_token),
            "tokens_per_s": self.output_tokens / self.seconds,
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "seconds": self.seconds,
        }


def tokens(rng: random.Random, count: int, vocab: int) -> Ids:
    """Return random token ids without special tokens."""
    return [rng.randrange(300, vocab - 1) for _ in range(count)]


def chat(rng: random.Random, vocab: int, shared: str) -> list[Ask]:
    """Return three turns after a system prompt."""
    system = tokens(random.Random(f"system {shared}"), 512, vocab)
    said = [tokens(rng, 64, vocab) for _ in range(3)]
    return [Ask(system + said[0], 32), *(Ask(one, 32, goes_on=True) for one in said[1:])]


def document(rng: random.Random, vocab: int, shared: str) -> list[Ask]:
    """Return three questions about a document."""
    text = tokens(random.Random(f"document {shared}"), 2000, vocab)
    return [Ask(text + tokens(rng, 32, vocab), 16) for _ in range(3)]


def short(rng: random.Random, vocab: int, shared: str) -> list[Ask]:
    """Return three prompts without a common prefix."""
    del shared
    return [Ask(tokens(rng, 96, vocab), 16) for _ in range(3)]


LOADS: dict[str, Callable[[random.Random, int, str], list[Ask]]] = {
    "chat": chat,
    "document": document,
    "short": short,
}
SHARED = {"chat": 8, "document": 4, "short": 1}  # number of different shared prompts
Stream = Callable[[Ids, int], AsyncIterator[tuple[int, dict[str, Any] | None]]]


async def run_load(stream: Stream, load: str, clients: int, vocab: int, seed: str) -> Timing:
    """Run clients in parallel; each waits for an answer before it sends the next request.

    With few clients, each has several conversations in sequence: a run of a tenth of a second would
    mainly measure how fast a process resumes after others used the machine.
    """
    timing = Timing()
    conversations = max(1, min(8, 32 // clients))

    async def run_client(client: int) -> None:
        rng = random.Random(f"{seed} {client}")
        for _ in range(conversations):
            await converse(rng, f"{seed} {client % SHARED[load]}")

    async def converse(rng: random.Random, shared: str) -> None:
        so_far: Ids = []
        for ask in LOADS[load](rng, vocab, shared):
            so_far = so_far + ask.prompt if ask.goes_on else ask.prompt
            start = time.perf_counter()
            first = last = 0.0
            async for count, usage in stream(so_far, ask.count):
                if count:
                    last = time.perf_counter()
                    first = first or last
                if usage is not None:
                    timing.prompt_tokens += usage["prompt_tokens"]
                    timing.output_tokens += usage["completion_tokens"]
                    timing.cached_tokens += usage["cached_tokens"]
            timing.first.append(first - start)
            timing.per_token.append((last - first) / (ask.count - 1))
            # HTTP answers have no token ids, so random ids replace the answer in the next prompt.
            so_far = so_far + tokens(rng, ask.count, vocab)

    start = time.perf_counter()
    await asyncio.gather(*(run_client(client) for client in range(clients)))
    timing.seconds = time.perf_counter() - start
    return timing
