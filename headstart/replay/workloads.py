"""Synthetic workloads, for those who have no trace: four ways in which prompts begin alike.

    shared-prompt   one system prompt of 4,096 tokens before every question
    documents       questions about 200 documents of 8,192 tokens, some far more popular
    chats           conversations whose prompts hold all earlier turns
    agents          chats behind a long tool description, with many short turns

Requests come at random, 4 a second. One unit stands for 16 tokens.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from headstart.errors import ConfigError
from headstart.replay.trace import Trace, TraceRequest

GRAIN = 16
RATE = 4.0
_QUESTION = 12  # units that a request has of its own


class _Draft(NamedTuple):
    parts: tuple[range, ...]
    num_output: int
    session: str


_Drafts = Iterator[tuple[float, _Draft]]


def make_workload(name: str, num_requests: int, seed: int = 0) -> Trace:
    """A workload of this name; the same seed gives the same. Raises ConfigError."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload is {name!r}; allowed: {', '.join(WORKLOADS)}")
    if num_requests < 1:
        raise ConfigError(f"requests is {num_requests}; allowed: at least 1")
    rng, ids = random.Random(seed), _Ids()
    drafts = WORKLOADS[name](rng, ids)
    # Sessions overlap, so what they say is sorted by time, of a few more than needed.
    found = sorted((next(drafts) for _ in range(2 * num_requests)), key=lambda draft: draft[0])
    requests = [
        TraceRequest(time, draft.parts, _length(draft.parts), draft.num_output, draft.session)
        for time, draft in found[:num_requests]
    ]
    return Trace(name, GRAIN, ids.count, requests)


class _Ids:
    """Gives out unit ids in a row."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, count: int) -> range:
        """The next `count` ids."""
        self.count += count
        return range(self.count - count, self.count)


def _length(parts: tuple[range, ...]) -> int:
    return GRAIN * sum(len(part) for part in parts)


def _shared_prompt(rng: random.Random, ids: _Ids) -> _Drafts:
    system, now = ids.take(256), 0.0
    for number in count():
        now += rng.expovariate(RATE)
        yield now, _Draft((system, ids.take(_QUESTION)), rng.randint(32, 256), str(number))


def _documents(rng: random.Random, ids: _Ids) -> _Drafts:
    documents, now = [ids.take(512) for _ in range(200)], 0.0
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for number in count():
        now += rng.expovariate(RATE)
        [document] = rng.choices(documents, weights)
        yield now, _Draft((document, ids.take(_QUESTION)), rng.randint(32, 256), str(number))


def _conversations(rng: random.Random, ids: _Ids, head: int, turns: int, pause: float) -> _Drafts:
    system, start = ids.take(head), 0.0
    for number in count():
        start += rng.expovariate(RATE / turns)
        now = start
        parts: tuple[range, ...] = (system,)
        for _ in range(rng.randint(1, 2 * turns - 1)):
            parts = (*parts, ids.take(rng.randint(4, 64)))
            yield now, _Draft(parts, rng.randint(32, 256), str(number))
            now += 5 + rng.expovariate(1 / pause)


def _chats(rng: random.Random, ids: _Ids) -> _Drafts:
    return _conversations(rng, ids, head=64, turns=6, pause=30.0)


def _agents(rng: random.Random, ids: _Ids) -> _Drafts:
    return _conversations(rng, ids, head=768, turns=25, pause=8.0)


WORKLOADS: dict[str, Callable[[random.Random, _Ids], _Drafts]] = {
    "shared-prompt": _shared_prompt,
    "documents": _documents,
    "chats": _chats,
    "agents": _agents,
}
