"""The simulator: a trace, a router and many replicas, in discrete events.

There are two kinds of events: a request comes, and a replica's step ends. A request is routed
the moment it comes. At the end of a step the replica's events reach the router's index, then
the router is told of first tokens and finished replies. Nothing else takes time: routing, the
network and a snapshot's way are free. Requests come when the trace says, however far behind
the replicas are (an open loop).
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush

from headstart.cache import CacheConfig, TokenSequence
from headstart.cluster import EventPublisher, Router, make_policy
from headstart.cluster.index import PrefixKey, prefix_keys
from headstart.cluster.load import RouteRequest
from headstart.errors import ConfigError
from headstart.replay.replica import Job, Replica
from headstart.replay.results import ReplayResult, summarise
from headstart.replay.speed import SpeedModel
from headstart.replay.trace import Trace, TraceRequest, private_units

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas, and how much KV memory each has, in tokens."""

    replicas: int
    kv_tokens: int
    block_size: int
    eviction: str = "adaptive-lru"

    def cache_config(self, grain: int, share: int = 1, *, events: bool = False) -> CacheConfig:
        """The options of a manager with the memory of `share` replicas, in units of a trace.

        Raises ConfigError for a block size that is no multiple of the trace's.
        """
        if self.block_size < grain or self.block_size % grain:
            raise ConfigError(
                f"block_size is {self.block_size}; allowed: a multiple of {grain}, the tokens "
                "that the trace tells apart"
            )
        return CacheConfig(
            num_blocks=max(share * (self.kv_tokens // self.block_size), 1),
            block_size=self.block_size // grain,
            eviction=self.eviction,
            ghost_entries=0,
            events=events,
        )


def replay(
    trace: Trace,
    fleet: Fleet,
    policy: str,
    speed: SpeedModel | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Send a trace through a router of this policy. `progress` is told of each finished reply.

    Raises ConfigError for options out of range, or a request that no replica can hold.
    """
    if not trace.requests:
        raise ConfigError("the trace has no requests; allowed: at least one")
    simulation = _Simulation(trace, fleet, policy, speed or SpeedModel())
    with _rare_collections():
        return simulation.run(progress)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage rarely: millions of blocks live long, and hardly any is in a ring.

    With Python's own thresholds a replay takes half as long again.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Simulation:
    def __init__(self, trace: Trace, fleet: Fleet, policy: str, speed: SpeedModel) -> None:
        self.trace, self.fleet, self.policy = trace, fleet, policy
        chosen = make_policy(policy)
        self.router = Router(fleet.replicas, chosen, speed.prefill_rate)
        pool = fleet.cache_config(trace.grain, events=chosen.needs_prefixes)
        self.replicas = [Replica(pool, trace.grain, speed) for _ in range(fleet.replicas)]
        self.publishers = [EventPublisher(replica) for replica in range(fleet.replicas)]
        self.jobs: list[Job] = []
        self._fresh: Iterator[int] = private_units()
        self._ends: list[tuple[float, int, int]] = []  # a heap of (time, replica, version)
        self._versions = [0] * fleet.replicas
        self._is_idle = [True] * fleet.replicas
        self._num_steps = 0

    def run(self, progress: Progress | None) -> ReplayResult:
        """All events in the order of their times."""
        start, now = time.perf_counter(), 0.0
        for number, request in enumerate(self.trace.requests):
            while self._ends and self._ends[0][0] <= request.time:
                now = self._end_step(progress)
            self._arrive(str(number), request)
        while self._ends:
            now = self._end_step(progress)
        assert all(job.first_token >= 0 for job in self.jobs), "a request was left waiting"
        result = summarise(self.policy, self.jobs, self.replicas, now)
        spent = time.perf_counter() - start
        result.events_per_second = (len(self.jobs) + self._num_steps) / spent
        return result

    def _arrive(self, name: str, request: TraceRequest) -> None:
        job = self._job(name, request)
        self.replicas[0].check_fits(job.num_blocks, name)
        keys: Sequence[PrefixKey] = ()
        if self.router.policy.needs_keys:
            keys = prefix_keys(self.replicas[0].manager.block_hashes(job.sequence))
        asked = RouteRequest(name, keys, job.num_tokens, self.fleet.block_size, request.session)
        at = self.router.route(asked, request.time)
        job.replica = at
        self.jobs.append(job)
        replica = self.replicas[at]
        replica.add(job)
        if self._is_idle[at]:
            self._schedule(at, replica.begin(request.time))
        else:
            sooner = replica.interrupt(request.time)
            if sooner is not None:
                self._schedule(at, sooner)

    def _job(self, name: str, request: TraceRequest) -> Job:
        grain = self.trace.grain
        units = request.units()
        if request.num_tokens % grain:
            units.append(next(self._fresh))
        total = -(-(request.num_tokens + request.num_output) // grain)
        return Job(
            name=name,
            sequence=TokenSequence(name, units),
            num_tokens=request.num_tokens,
            num_output=request.num_output,
            num_blocks=-(-total * grain // self.fleet.block_size),
            reply=[next(self._fresh) for _ in range(total - len(units))],
            arrived=request.time,
        )

    def _schedule(self, replica: int, end: float | None) -> None:
        """The replica's step ends then; an end that was planned before counts no more."""
        self._is_idle[replica] = end is None
        if end is not None:
            self._versions[replica] += 1
            heappush(self._ends, (end, replica, self._versions[replica]))

    def _end_step(self, progress: Progress | None) -> float:
        now, at, version = heappop(self._ends)
        if version != self._versions[at]:
            return now
        replica = self.replicas[at]
        self._num_steps += 1
        result = replica.end(now)
        self._publish(at)
        for job in result.started:
            self.router.first_token(job.name, now)
        for job in result.finished:
            self.router.finish(job.name)
        if progress is not None and result.finished:
            progress(len(result.finished))
        self._schedule(at, replica.begin(now))
        return now

    def _publish(self, at: int) -> None:
        events = self.replicas[at].manager.take_events()
        if events:
            batch = self.publishers[at].publish(events)
            if batch is not None and not self.router.index.apply(batch):
                self.router.index.apply(self.publishers[at].snapshot())
