"""The server's books of its replicas: which there are, what each holds, where requests go.

    Ray Serve's thread    set_replicas, choose      which replicas run, and who gets a request
    the server's thread   expect, first_token, finish, apply

One lock covers all of it: the router is for one thread. Ray Serve names replicas, the router
numbers them; a number is used again when its replica is gone.

The request router, which Ray Serve makes inside the server's process, finds these books by the
name of the application: Ray hands it nothing but JSON.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from headstart.cluster.events import EventBatch
from headstart.cluster.router import Router, RouteRequest, make_policy
from headstart.cluster.serving.metric_sums import add_up
from headstart.engine.metrics import Gauge, Metric

__all__ = ["Dispatcher", "dispatcher_of", "register", "unregister"]

_DISPATCHERS: dict[str, Dispatcher] = {}
_TRIES = 3
"""How often a request may be sent to a replica that does not take it.

Ray waits longer each time, up to a second: one that is slow to answer keeps its prefixes, and one
that hangs holds up nobody long.
"""


def register(application: str, dispatcher: Dispatcher) -> None:
    """Have the request router of an application use these books."""
    _DISPATCHERS[application] = dispatcher


def unregister(application: str, dispatcher: Dispatcher) -> None:
    """Keep these books no more, unless others have taken their place."""
    if _DISPATCHERS.get(application) is dispatcher:
        del _DISPATCHERS[application]


def dispatcher_of(application: str) -> Dispatcher | None:
    """The books of an application, None in a process that serves it not."""
    return _DISPATCHERS.get(application)


@dataclass(slots=True)
class _Waiting:
    """A request that `choose` may be asked for. sent: how often to which replica, by name."""

    request: RouteRequest
    sent: Counter[str] = field(default_factory=Counter)


class Dispatcher:
    """Routes requests over replicas that come and go. May be used from several threads."""

    def __init__(self, policy: str, most: int, *, shares_store: bool = False) -> None:
        """`most` replicas may run at once; twice as many while some take over from others.

        shares_store: each can load what one of them has saved.
        """
        self._lock = threading.Lock()
        self._router = Router(2 * most, make_policy(policy), shares_store=shares_store)
        self._numbers: dict[str, int] = {}
        self._silent: set[str] = set()  # replicas that run and do not answer
        self._free = list(reversed(range(2 * most)))
        for number in self._free:
            self._router.set_alive(number, False)
        self._waiting: dict[str, _Waiting] = {}
        self._metrics: dict[str, list[Metric]] = {}
        self._past: list[Metric] = []
        self._on_change: Callable[[], object] = lambda: None
        self._on_route: Callable[[], object] = lambda: None

    def call_on_change(self, function: Callable[[], object]) -> None:
        """Call `function`, in any thread, when there are other replicas than before."""
        self._on_change = function

    def call_on_route(self, function: Callable[[], object]) -> None:
        """Call `function`, in any thread, when a replica is chosen: to have `catch_up` called."""
        self._on_route = function

    @property
    def replicas(self) -> list[str]:
        """The names of those that run."""
        with self._lock:
            return list(self._numbers)

    @property
    def answering(self) -> list[str]:
        """Return the names of the replicas that run and give signs of life."""
        with self._lock:
            return [name for name in self._numbers if name not in self._silent]

    @property
    def metrics(self) -> Mapping[str, list[Metric]]:
        """What each replica told last of its engine."""
        with self._lock:
            return dict(self._metrics)

    def list_metrics(self) -> list[Metric]:
        """All of these, and what the replicas that are gone had counted."""
        with self._lock:
            return [*self._past, *chain(*self._metrics.values())]

    def set_replicas(self, names: Collection[str]) -> None:
        """These run, and no others. What a replica held that is gone is forgotten."""
        with self._lock:
            before = self._numbers.keys()
            gone, new = before - set(names), [name for name in names if name not in before]
            for name in gone:
                number = self._numbers.pop(name)
                counts = [m for m in self._metrics.pop(name, ()) if not isinstance(m, Gauge)]
                self._past = add_up([*self._past, *counts])
                self._router.set_alive(number, False)
                self._silent.discard(name)
                self._free.append(number)
            for name in new[: len(self._free)]:
                self._numbers[name] = number = self._free.pop()
                self._router.set_alive(number, True)
        if gone or new:
            self._on_change()

    def note_silent(self, replica: str) -> set[str]:
        """Send a replica no more requests; returns the ids of those that it has.

        What it has cached is not forgotten: it may answer again.
        """
        with self._lock:
            number = self._numbers.get(replica)
            if number is None:
                return set()
            self._silent.add(replica)
            return self._router.requests_at(number)

    def note_heard(self, replica: str) -> bool:
        """Send a replica requests; returns True if it was silent."""
        with self._lock:
            was_silent = replica in self._silent
            self._silent.discard(replica)
            return was_silent

    def expect(self, request: RouteRequest) -> None:
        """A request that `choose` will be asked for, perhaps several times."""
        with self._lock:
            self._waiting[request.request_id] = _Waiting(request)

    def choose(self, request_id: str) -> str | None:
        """The replica to send a request to; None if none answers, or the request is gone.

        Not one that did not take it several times, if there is another.
        """
        with self._lock:
            waiting = self._waiting.get(request_id)
            if waiting is None or self._numbers.keys() <= self._silent:
                return None
            self._router.finish(request_id)  # it was sent somewhere, and did not get there
            numbers, sent = self._numbers, waiting.sent
            silent = {numbers[name] for name in self._silent}
            tried = {numbers[name] for name in sent if name in numbers and sent[name] >= _TRIES}
            avoid = silent | tried
            if len(avoid) == len(numbers):  # one that answers slowly, rather than one that hangs
                avoid = silent
            number = self._router.route(waiting.request, time.monotonic(), avoid)
            chosen = next(name for name, of in numbers.items() if of == number)
            sent[chosen] += 1
        self._on_route()
        return chosen

    def catch_up(self) -> None:
        """Note what the last request will compute, which it need not wait for."""
        with self._lock:
            self._router.catch_up()

    def first_token(self, request_id: str) -> None:
        """The request's prompt is computed."""
        with self._lock:
            self._router.first_token(request_id, time.monotonic())

    def finish(self, request_id: str) -> None:
        """The request is answered, or given up."""
        with self._lock:
            self._waiting.pop(request_id, None)
            self._router.finish(request_id)

    def apply(self, replica: str, batch: EventBatch) -> bool:
        """Take what a replica tells of its cache; False if something is missing before it.

        Requests are routed in between if it is much. One thread at a time calls for one replica.
        """
        with self._lock:
            number = self._numbers.get(replica)
            if number is None:
                return True
            steps = self._router.index.steps(replace(batch, replica=number))
        while True:
            with self._lock:
                if self._numbers.get(replica) != number:  # it is gone, and its number another's
                    return True
                try:
                    next(steps)
                except StopIteration as done:
                    return bool(done.value)
            time.sleep(0)  # whoever waits for the lock gets it

    def note_metrics(self, replica: str, metrics: list[Metric]) -> None:
        """What a replica tells of its engine."""
        with self._lock:
            if replica in self._numbers:
                self._metrics[replica] = metrics

    def held(self, request: RouteRequest) -> dict[str, int]:
        """How many tokens of a prompt each replica has cached."""
        with self._lock:
            found = self._router.index.match(request.keys).cached
            return {name: request.tokens(found[at]) for name, at in self._numbers.items()}
