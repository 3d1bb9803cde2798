"""Synthetic workloads, for those who have no trace: four ways in which prompts begin alike.

    shared-prompt   one system prompt of 4,096 tokens before every question
    documents       questions about 200 documents of 8,192 tokens, some far more popular
    chats           conversations whose prompts hold all earlier turns
    agents          chats behind a long tool description, with many short turns

Requests come at random, 4 a second. One unit stands for 16 tokens.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from headstart.errors import ConfigError
from headstart.replay.trace import Trace, TraceRequest

GRAIN = 16
RATE = 4.0
_QUESTION = 12  # units that only one request has


class _Ids:
    """Hands out consecutive unit ids."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, count: int) -> range:
        self.count += count
        return range(self.count - count, self.count)


def make_workload(name: str, num_requests: int, seed: int = 0) -> Trace:
    """Return a workload of this name; equal seeds give equal workloads. Raises ConfigError."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload is {name!r}; allowed: {', '.join(WORKLOADS)}")
    if num_requests < 1:
        raise ConfigError(f"requests is {num_requests}; allowed: at least 1")
    ids = _Ids()
    source = WORKLOADS[name](random.Random(seed), ids)
    # Sessions overlap, so more requests than needed are sorted by time.
    requests = [next(source) for _ in range(2 * num_requests)]
    requests.sort(key=lambda request: request.time)
    return Trace(name, GRAIN, ids.count, requests[:num_requests])


def _request(rng: random.Random, time: float, session: int, *parts: range) -> TraceRequest:
    num_tokens = GRAIN * sum(map(len, parts))
    return TraceRequest(time, parts, num_tokens, rng.randint(32, 256), str(session))


def _shared_prompt(rng: random.Random, ids: _Ids) -> Iterator[TraceRequest]:
    system, now = ids.take(256), 0.0
    for number in count():
        now += rng.expovariate(RATE)
        yield _request(rng, now, number, system, ids.take(_QUESTION))


def _documents(rng: random.Random, ids: _Ids) -> Iterator[TraceRequest]:
    documents, now = [ids.take(512) for _ in range(200)], 0.0
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for number in count():
        now += rng.expovariate(RATE)
        [document] = rng.choices(documents, weights)
        yield _request(rng, now, number, document, ids.take(_QUESTION))


def _conversations(
    rng: random.Random, ids: _Ids, *, head: int, turns: int, pause: float
) -> Iterator[TraceRequest]:
    system, start = ids.take(head), 0.0
    for number in count():
        start += rng.expovariate(RATE / turns)
        now = start
        parts: tuple[range, ...] = (system,)
        for _ in range(rng.randint(1, 2 * turns - 1)):
            parts = (*parts, ids.take(rng.randint(4, 64)))
            yield _request(rng, now, number, *parts)
            now += 5 + rng.expovariate(1 / pause)


WORKLOADS: dict[str, Callable[[random.Random, _Ids], Iterator[TraceRequest]]] = {
    "shared-prompt": _shared_prompt,
    "documents": _documents,
    "chats": partial(_conversations, head=64, turns=6, pause=30.0),
    "agents": partial(_conversations, head=768, turns=25, pause=8.0),
}
