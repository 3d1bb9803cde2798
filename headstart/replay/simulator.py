"""A discrete-event simulation of a trace, a router and many replicas.

There are three kinds of events: a request arrives, a replica's step ends, and a prompt's K/V arrive
at another replica. A request is routed when it arrives. At the end of a step, the router's index
receives the replica's cache events. Then the router is notified of first tokens and finished
replies. Routing and cache events take no time. Requests arrive at the times of the trace, even if
the replicas cannot keep up (an open loop).

With prefill replicas, the router chooses only among them. The other replicas decode. When a prefill
replica has computed a prompt and its first token, it frees the prompt's blocks, which stay cached.
Then it sends the K/V to the least loaded decoding replica. It sends one prompt at a time.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from statistics import fmean as mean

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence
from headstart.cache.identity import BlockKey
from headstart.cluster import EventPublisher, Router, make_policy
from headstart.cluster.index import PrefixKey, prefix_keys
from headstart.cluster.router import RouteRequest
from headstart.errors import ConfigError
from headstart.replay.replica import ReplayRequest, Replica, SpeedModel
from headstart.replay.trace import Trace, TraceRequest, private_units

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas, each with KV memory for `kv_tokens` tokens. Raises ConfigError.

    prefill_replicas: number of replicas that only compute prompts, for the other replicas; with 0,
    each replica computes prompts and decodes.
    """

    replicas: int
    kv_tokens: int
    block_size: int
    eviction: str = "adaptive-lru"
    prefill_replicas: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; allowed: at least 1")

    @property
    def num_prefill_replicas(self) -> int:
        """Number of replicas that compute prompts. These replicas have the lowest indices."""
        return self.prefill_replicas or self.replicas

    def cache_config(self, grain: int, share: int = 1, *, events: bool = False) -> CacheConfig:
        """Return the options of a cache manager with the memory of `share` replicas.

        The manager counts units of `grain` tokens. Raises ConfigError for a block size that is not
        a multiple of `grain`.
        """
        if self.block_size < grain or self.block_size % grain:
            raise ConfigError(
                f"block_size is {self.block_size}; allowed: a multiple of {grain}, the number of "
                "tokens of the trace's smallest blocks"
            )
        return CacheConfig(
            num_blocks=max(share * (self.kv_tokens // self.block_size), 1),
            block_size=self.block_size // grain,
            eviction=self.eviction,
            ghost_entries=0,
            events=events,
        )


@dataclass(slots=True)
class ReplayResult:
    """The figures of one trace, router and fleet.

    hit_rate: the share of prompt tokens that were hits. ttft_*: seconds from a request's arrival to
    its first token. tpot_*: seconds per token after the first. imbalance: prompt tokens computed by
    the busiest replica, divided by the mean. load: prompt tokens computed, divided by the number
    that the replicas could compute in `seconds` without decoding. evictions: cached blocks whose
    memory was reused. seconds: from the first request to the last token. events_per_second:
    requests and steps simulated per second of real time.
    """

    router: str
    replicas: int
    requests: int
    prompt_tokens: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    imbalance: float
    load: float
    evictions: int
    seconds: float
    events_per_second: float = 0.0


def replay(
    trace: Trace,
    fleet: Fleet,
    policy: str,
    speed: SpeedModel | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay a trace with this routing policy; calls `progress(finished, total)` as replies end.

    Raises ConfigError for options out of range, or a request that no replica can hold.
    """
    if not trace.requests:
        raise ConfigError("the trace has no requests; allowed: at least one")
    if not 0 <= fleet.prefill_replicas < max(fleet.replicas, 1):
        raise ConfigError(
            f"prefill_replicas is {fleet.prefill_replicas}; allowed: 0, or fewer than the "
            f"{fleet.replicas} replicas"
        )
    simulation = _Simulation(trace, fleet, policy, speed or SpeedModel())
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)  # with Python's defaults a replay takes 1.5 times as long
    try:
        return simulation.run(progress)
    finally:
        gc.set_threshold(*thresholds)


class Transfers:
    """Transfers of K/V from prefill replicas (senders) to decoding replicas (receivers).

    Each sender sends one prompt after another, each to the receiver with the fewest requests.
    Requests that are being sent to a receiver count too.
    """

    def __init__(self, receivers: Sequence[Replica], senders: int, speed: SpeedModel) -> None:
        self._receivers = receivers
        self._rate = speed.transfer_rate
        self._free_at = [0.0] * senders  # when each sender has sent its last prompt
        self._incoming = [0] * len(receivers)
        # A heap of (time, ticket, receiver, request).
        self._arrivals: list[tuple[float, int, int, ReplayRequest]] = []
        self._ticket = 0

    def next_time(self) -> float:
        """Return when the next prompt arrives; infinity if no transfer is running."""
        return self._arrivals[0][0] if self._arrivals else math.inf

    def send(self, job: ReplayRequest, sender: int, now: float) -> None:
        """Send the prompt to the receiver with the fewest requests."""
        receivers = range(len(self._receivers))
        receiver = min(receivers, key=lambda i: self._receivers[i].num_active + self._incoming[i])
        self._incoming[receiver] += 1
        end = max(now, self._free_at[sender]) + job.num_tokens / self._rate
        self._free_at[sender] = end
        self._ticket += 1
        heappush(self._arrivals, (end, self._ticket, receiver, job))

    def take(self) -> tuple[float, int, ReplayRequest]:
        """Remove the next prompt that arrives; return its time, receiver and request."""
        end, _, receiver, job = heappop(self._arrivals)
        self._incoming[receiver] -= 1
        return end, receiver, job


class _Simulation:
    def __init__(self, trace: Trace, fleet: Fleet, policy: str, speed: SpeedModel) -> None:
        self.trace, self.fleet, self.policy = trace, fleet, policy
        routing_policy = make_policy(policy)
        self.router = Router(fleet.num_prefill_replicas, routing_policy, speed.prefill_rate)
        pool = fleet.cache_config(trace.grain, events=routing_policy.needs_prefixes)
        plain = replace(pool, events=False)
        self.replicas = [
            Replica(pool if i < fleet.num_prefill_replicas else plain, trace.grain, speed)
            for i in range(fleet.replicas)
        ]
        self.publishers = [EventPublisher(replica) for replica in range(fleet.num_prefill_replicas)]
        self.transfers = Transfers(
            self.replicas[fleet.num_prefill_replicas :], fleet.num_prefill_replicas, speed
        )
        self.jobs: list[ReplayRequest] = []
        self._requests: dict[str, TraceRequest] = {}  # requests to decode on another replica
        self._fresh: Iterator[int] = private_units()
        self._ends: list[tuple[float, int, int]] = []  # a heap of (time, replica, version)
        self._versions = [0] * fleet.replicas
        self._is_idle = [True] * fleet.replicas
        self._num_steps = 0

    def run(self, progress: Progress | None) -> ReplayResult:
        """Handle all events in the order of their times."""
        start, now = time.perf_counter(), 0.0
        for number, request in enumerate(self.trace.requests):
            while self._next_time() <= request.time:
                now = self._handle_next(progress)
            self._arrive(str(number), request)
        while self._next_time() < math.inf:
            now = self._handle_next(progress)
        assert len(self.jobs) == len(self.trace.requests), "a request was left waiting"
        simulated = now - self.trace.requests[0].time  # a trace need not begin at time 0
        result = self._summarize(simulated)
        elapsed = time.perf_counter() - start
        result.events_per_second = (len(self.jobs) + self._num_steps) / elapsed
        return result

    def _summarize(self, seconds: float) -> ReplayResult:
        ttfts = sorted(job.first_token - job.arrived for job in self.jobs)
        tpots = sorted(
            (job.finished - job.first_token) / (job.num_output - 1)
            for job in self.jobs
            if job.num_output > 1
        ) or [0.0]
        work = [
            replica.computed_tokens for replica in self.replicas[: self.fleet.num_prefill_replicas]
        ]
        num_tokens = sum(job.num_tokens for job in self.jobs)
        return ReplayResult(
            router=self.policy,
            replicas=len(self.replicas),
            requests=len(self.jobs),
            prompt_tokens=num_tokens,
            hit_rate=sum(job.hit_tokens for job in self.jobs) / num_tokens,
            ttft_mean=mean(ttfts),
            ttft_p50=_percentile(ttfts, 0.5),
            ttft_p99=_percentile(ttfts, 0.99),
            tpot_mean=mean(tpots),
            tpot_p99=_percentile(tpots, 0.99),
            imbalance=max(work) / mean(work),
            load=mean(work) / self.replicas[0].speed.prefill_rate / seconds,
            evictions=sum(replica.manager.num_evictions for replica in self.replicas),
            seconds=seconds,
        )

    def _next_time(self) -> float:
        step = self._ends[0][0] if self._ends else math.inf
        return min(step, self.transfers.next_time())

    def _handle_next(self, progress: Progress | None) -> float:
        if self._ends and self._ends[0][0] < self.transfers.next_time():
            return self._end_step(progress)
        now, receiver, job = self.transfers.take()
        self._enqueue(self.fleet.num_prefill_replicas + receiver, job, now)
        return now

    def _arrive(self, name: str, request: TraceRequest) -> None:
        job = self._job(name, request)
        self.replicas[0].check_fits(job.num_blocks, name)
        if self.fleet.prefill_replicas and request.num_output > 1:
            self._requests[name] = request
            job = replace(
                job, num_output=1, reply=[], num_blocks=self._num_blocks(request.num_tokens)
            )
        keys: Sequence[PrefixKey] = ()
        if self.router.policy.needs_keys:
            keys = prefix_keys(self.replicas[0].manager.block_hashes(job.sequence))
        route_request = RouteRequest(
            name, keys, job.num_tokens, self.fleet.block_size, request.session
        )
        self._enqueue(self.router.route(route_request, request.time), job, request.time)

    def _enqueue(self, number: int, job: ReplayRequest, now: float) -> None:
        """Queue a request at a replica."""
        job.replica = number
        replica = self.replicas[number]
        replica.num_requests += 1
        replica.waiting.append(job)
        if self._is_idle[number]:
            self._schedule(number, replica.begin(now))
        elif (end := replica.interrupt(now)) is not None:
            self._schedule(number, end)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.fleet.block_size)

    def _job(self, name: str, request: TraceRequest) -> ReplayRequest:
        grain = self.trace.grain
        units = request.units()
        if request.num_tokens % grain:
            units.append(next(self._fresh))
        total = -(-(request.num_tokens + request.num_output) // grain)
        return ReplayRequest(
            name=name,
            sequence=TokenSequence(name, units),
            num_tokens=request.num_tokens,
            num_output=request.num_output,
            num_blocks=self._num_blocks(request.num_tokens + request.num_output),
            reply=[next(self._fresh) for _ in range(total - len(units))],
            arrived=request.time,
        )

    def _schedule(self, replica: int, end: float | None) -> None:
        """Schedule the end of the replica's step; replaces an earlier scheduled end."""
        self._is_idle[replica] = end is None
        if end is not None:
            self._versions[replica] += 1
            heappush(self._ends, (end, replica, self._versions[replica]))

    def _end_step(self, progress: Progress | None) -> float:
        now, number, version = heappop(self._ends)
        if version != self._versions[number]:
            return now
        replica = self.replicas[number]
        self._num_steps += 1
        started, finished = replica.end(now)
        if number < self.fleet.num_prefill_replicas:
            if events := replica.manager.take_events():
                batch = self.publishers[number].publish(events)
                if batch is not None and not self.router.index.apply(batch):
                    self.router.index.apply(self.publishers[number].snapshot())
            for job in started:
                self.router.first_token(job.name, now)
            for job in finished:
                self.router.finish(job.name)
        complete = [job for job in finished if not self._forward(job, now)]
        self.jobs += complete
        if progress is not None and complete:
            progress(len(self.jobs), len(self.trace.requests))
        self._schedule(number, replica.begin(now))
        return now

    def _forward(self, job: ReplayRequest, now: float) -> bool:
        """Send a request to a decoding replica; return False if its reply is complete."""
        request = self._requests.pop(job.name, None)
        if request is None:
            return False
        moved = replace(
            self._job(job.name, request),
            is_moved=True,
            hit_tokens=job.hit_tokens,
            first_token=job.first_token,
        )
        self.transfers.send(moved, job.replica, now)
        return True


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated between the two nearest values.

    >>> _percentile([1.0, 2.0, 4.0], 0.5), _percentile([1.0, 2.0, 4.0], 0.75)
    (2.0, 3.0)
    """
    index = share * (len(ordered) - 1)
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Optimum:
    """Token hit rates of one engine, with the memory of all replicas and with unlimited memory."""

    same_memory: float
    unlimited: float


def best_hit_rate(
    trace: Trace, fleet: Fleet, progress: Callable[[int, int], None] | None = None
) -> Optimum:
    """Return the hit rates of a trace. Raises ConfigError for a request that exceeds the memory."""
    return Optimum(
        _with_memory(trace, fleet, progress or (lambda done, total: None)), _unlimited(trace, fleet)
    )


def _with_memory(trace: Trace, fleet: Fleet, progress: Callable[[int, int], None]) -> float:
    """Look up each prompt in a real manager, compute it with its reply, and free it."""
    manager = KVCacheManager(fleet.cache_config(trace.grain, fleet.replicas))
    fresh, hit, grain = private_units(), 0, trace.grain
    for number, request in enumerate(trace.requests):
        units = request.units()
        if request.num_tokens % grain:
            units.append(next(fresh))
        sequence = TokenSequence(str(number), units)
        computed = manager.get_computed_blocks(sequence)
        reply = -(-(request.num_tokens + request.num_output) // grain) - len(units)
        allocation = manager.allocate_slots(sequence, len(units) - computed.num_tokens, computed)
        for _ in range(reply):
            sequence.append(next(fresh))
        if allocation is None or (reply and not manager.append_slots(sequence, reply)):
            raise ConfigError(f"request {number} does not fit into the KV memory of all replicas")
        manager.commit_step()
        manager.free(sequence)
        hit += min(computed.num_tokens * grain, request.num_tokens)
        progress(number + 1, len(trace.requests))
    return hit / trace.num_tokens


def _unlimited(trace: Trace, fleet: Fleet) -> float:
    """Look up each prompt in a trie of all earlier blocks. Only whole blocks are hits."""
    size = fleet.cache_config(trace.grain).block_size
    nodes: dict[tuple[int, BlockKey], int] = {}
    hit = 0
    for number, request in enumerate(trace.requests):
        units = request.units()
        last = (request.num_tokens - 1) // trace.grain  # at least one token is computed
        node, depth, is_hit = 0, 0, True
        for depth, key in enumerate(TokenSequence(str(number), units or [0]).cut(size)):
            old_node = nodes.get((node, key))
            is_hit = is_hit and old_node is not None
            hit += size * trace.grain if is_hit and (depth + 1) * size <= last else 0
            node = nodes.setdefault((node, key), len(nodes) + 1)
    return hit / trace.num_tokens
