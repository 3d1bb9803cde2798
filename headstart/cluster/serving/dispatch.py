"""Dispatcher: the replicas that run, their metrics, and the router over them.

    Ray Serve's thread    set_replicas, choose
    the driver's thread   expect, first_token, finish, apply

Ray Serve identifies a replica by a name, `Router` by a number. When a replica is removed, a new
replica may get its number. Ray Serve creates its own request router inside the server's process and
passes it only JSON. So the request router finds its dispatcher by the application's name.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from headstart.cluster.events import EventBatch
from headstart.cluster.router import Router, RouteRequest, make_policy
from headstart.engine.metrics import Gauge, Histogram, Metric

DISPATCHERS: dict[str, Dispatcher] = {}
"""The dispatcher of each application whose server is in this process."""
_TRIES = 3
"""Attempts to send a request to one replica, after which other replicas are preferred.

Ray waits up to a second before each further attempt.
"""


def dispatcher_of(application: str) -> Dispatcher | None:
    """Return an application's dispatcher; None in a process that is not its server.

    The request router calls this function. Its class is pickled, and `DISPATCHERS` cannot be.
    """
    return DISPATCHERS.get(application)


class Dispatcher:
    """Routing of requests over a changing set of replicas. Thread-safe."""

    def __init__(self, policy: str, max_replicas: int, *, shares_store: bool = False) -> None:
        """Allow `max_replicas` replicas, and twice as many while replicas are replaced.

        shares_store: each replica can load the blocks that another replica has saved.
        """
        self._lock = threading.Lock()
        self._router = Router(2 * max_replicas, make_policy(policy), shares_store=shares_store)
        self._numbers: dict[str, int] = {}
        self._silent: set[str] = set()  # running replicas that do not answer
        self._free = list(reversed(range(2 * max_replicas)))
        for number in self._free:
            self._router.set_alive(number, False)
        # By request id: a request, and how often it was sent to each replica.
        self._waiting: dict[str, tuple[RouteRequest, Counts[str]]] = {}
        self._metrics: dict[str, list[Metric]] = {}
        self._removed_metrics: list[Metric] = []
        self.on_change: Callable[[], object] = lambda: None
        """Callback, in any thread, after replicas started or stopped."""
        self.on_route: Callable[[], object] = lambda: None
        """Callback, in any thread, after a replica was chosen. `catch_up` must follow."""

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that run."""
        with self._lock:
            return list(self._numbers)

    @property
    def live_replicas(self) -> list[str]:
        """The names of the replicas that run and send reports."""
        with self._lock:
            return [name for name in self._numbers if name not in self._silent]

    @property
    def metrics(self) -> Mapping[str, list[Metric]]:
        """The last metrics of each replica."""
        with self._lock:
            return dict(self._metrics)

    def sum_metrics(self) -> list[Metric]:
        """Return the sums over all replicas, including the counts of removed replicas."""
        with self._lock:
            metrics = [*self._removed_metrics, *chain(*self._metrics.values())]
        return add_up(metrics)

    def set_replicas(self, names: Collection[str]) -> None:
        """Set the replicas that run. The blocks of a removed replica are forgotten."""
        with self._lock:
            old = self._numbers.keys()
            removed, new = old - set(names), [name for name in names if name not in old]
            for name in removed:
                number = self._numbers.pop(name)
                counts = [m for m in self._metrics.pop(name, ()) if not isinstance(m, Gauge)]
                self._removed_metrics = add_up([*self._removed_metrics, *counts])
                self._router.set_alive(number, False)
                self._silent.discard(name)
                self._free.append(number)
            for name in new[: len(self._free)]:
                self._numbers[name] = number = self._free.pop()
                self._router.set_alive(number, True)
        if removed or new:
            self.on_change()

    def mark_silent(self, replica: str) -> set[str]:
        """Stop sending requests to a replica, but remember its blocks; return its requests' ids."""
        with self._lock:
            number = self._numbers.get(replica)
            if number is None:
                return set()
            self._silent.add(replica)
            return self._router.requests_at(number)

    def mark_alive(self, replica: str) -> bool:
        """Send requests to a replica again; return True if it was silent."""
        with self._lock:
            was_silent = replica in self._silent
            self._silent.discard(replica)
            return was_silent

    def expect(self, request: RouteRequest) -> None:
        """Add a request for which `choose` will be called, perhaps several times."""
        with self._lock:
            self._waiting[request.request_id] = request, Counts()

    def choose(self, request_id: str) -> str | None:
        """Return the replica for a request; None if no replica answers, or the request has ended.

        Avoid a replica to which the request was sent `_TRIES` times without success.
        """
        with self._lock:
            waiting = self._waiting.get(request_id)
            if waiting is None or self._numbers.keys() <= self._silent:
                return None
            self._router.finish(request_id)  # the previous replica did not accept it
            numbers, (request, tries) = self._numbers, waiting
            silent = {numbers[name] for name in self._silent}
            tried = {numbers[name] for name in tries if name in numbers and tries[name] >= _TRIES}
            avoid = silent | tried
            if len(avoid) == len(numbers):  # a slow replica is better than a silent one
                avoid = silent
            number = self._router.route(request, time.monotonic(), avoid)
            replica = next(name for name, other in numbers.items() if other == number)
            tries[replica] += 1
        self.on_route()
        return replica

    def catch_up(self) -> None:
        with self._lock:
            self._router.catch_up()

    def first_token(self, request_id: str) -> None:
        with self._lock:
            self._router.first_token(request_id, time.monotonic())

    def finish(self, request_id: str) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
            self._router.finish(request_id)

    def apply(self, replica: str, batch: EventBatch) -> bool:
        """Apply a batch as `ReplicaIndex.apply` does, but let other threads route in between.

        One thread at a time may call this for one replica.
        """
        with self._lock:
            number = self._numbers.get(replica)
            if number is None:
                return True
            steps = self._router.index.steps(replace(batch, replica=number))
        while True:
            with self._lock:
                if self._numbers.get(replica) != number:  # a new replica may have its number
                    return True
                if next(steps, self) is self:
                    return self._router.index.is_current(number, batch.tier)
            time.sleep(0)  # yield to threads that wait for the lock

    def note_metrics(self, replica: str, metrics: list[Metric]) -> None:
        with self._lock:
            if replica in self._numbers:
                self._metrics[replica] = metrics

    def cached_tokens(self, request: RouteRequest) -> dict[str, int]:
        """Return how many tokens of a prompt each replica has cached."""
        with self._lock:
            cached = self._router.index.match(request.keys).cached
            return {name: request.tokens(cached[n]) for name, n in self._numbers.items()}


def add_up(metrics: Iterable[Metric]) -> list[Metric]:
    """Return one metric for each name and set of labels: the sum, or for percentages the mean."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Metric]] = defaultdict(list)
    for metric in metrics:
        groups[metric.name, tuple(metric.labels.items())].append(metric)
    return [_add(group) for group in groups.values()]


def _add(metrics: list[Any]) -> Any:
    first = metrics[0]
    if isinstance(first, Histogram):
        buckets = {bound: sum(m.buckets[bound] for m in metrics) for bound in first.buckets}
        count, total = sum(m.count for m in metrics), sum(m.sum for m in metrics)
        return replace(first, count=count, sum=total, buckets=buckets)
    value = sum(metric.value for metric in metrics)
    if first.name == "vllm:kv_cache_usage_perc":
        value /= len(metrics)
    return replace(first, value=value)
