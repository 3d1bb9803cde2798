"""A replica of the simulation: a real cache manager and a simple scheduler in simulated time.

The queue is in order of arrival. A step first continues running prefills, oldest first. Then it
admits requests from the head of the queue. A step has at most `chunk` prompt tokens in all. Every
decoding request gets one token. As in the engine, a request waits while another request computes
a block that both need next. It also waits until the pool has space for its whole prompt and reply,
so no request is ever preempted. A request whose prompt was computed on another replica decodes as
soon as it is admitted. Steps without prefill are simulated as one event, which lasts until a reply
ends or a request arrives.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from headstart.cache import BlockHasher, CacheConfig, KVCacheManager, TokenSequence
from headstart.errors import ConfigError
from headstart.validation import Number, check_fields, option

MAX_SKIPPED = 16
"""The largest number of queued requests that a step bypasses while they wait for blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    """The speed of a simulated replica.

    A step computes p prompt tokens and generates a token for each of n decoding requests. It takes,
    in seconds,

        step_time + p / prefill_rate + n * decode_time

    The defaults are roughly those of a 70B model on four accelerators: 15,000 prompt tokens or 50
    decode steps per second. Attention costs the same for every context length.

    The default `transfer_rate` is 13 GB/s at 128 KB per token. Raises ConfigError.
    """

    prefill_rate: float = option(15_000.0, "prompt tokens computed per second", Number(float, 1))
    step_time: float = option(0.02, "seconds of a step without prompt tokens", Number(float, 0))
    decode_time: float = option(0.0001, "seconds added per decoding request", Number(float, 0))
    chunk: int = option(2048, "maximum prompt tokens per step", Number(int, 1))
    max_running: int = option(128, "maximum running requests", Number(int, 1))
    transfer_rate: float = option(
        100_000.0, "K/V that a prefill replica sends, in tokens per second", Number(float, 1)
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.step_time + self.decode_time:
            raise ConfigError("step_time and decode_time are 0; allowed: one of them above 0")

    def seconds(self, num_tokens: int, num_decoding: int) -> float:
        """Return the seconds of one step."""
        return self.step_time + num_tokens / self.prefill_rate + num_decoding * self.decode_time


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request: its sequence of units (see `headstart.replay.trace`), and the times of its events.

    num_blocks: number of blocks of prompt and reply. reply: ids of the units after the
    prompt's last unit. is_moved: another replica computed its prompt and sent the K/V.
    computed: number of units with K/V, hits included. Times are in seconds; `finished` is the time
    of the last token.
    """

    name: str
    sequence: TokenSequence
    num_tokens: int
    num_output: int
    num_blocks: int
    reply: list[int] = field(repr=False)
    arrived: float
    is_moved: bool = False
    replica: int = 0
    computed: int = 0
    hit_tokens: int = 0
    first_token: float = -1.0
    finished: float = -1.0


@dataclass(slots=True)
class _Step:
    """A step with prefill, or `count` decode steps that are simulated as one event."""

    start: float
    seconds: float  # duration of each of the `count` steps
    count: int
    num_tokens: int  # prompt tokens computed


class Replica:
    """A cache manager, the requests sent to it, and the current step."""

    def __init__(self, pool: CacheConfig, grain: int, speed: SpeedModel) -> None:
        """Create an idle replica. The sizes in `pool` are in units of `grain` tokens."""
        self.manager = KVCacheManager(pool, BlockHasher(pool.block_size))
        self.grain = grain
        self.speed = speed
        self.waiting: deque[ReplayRequest] = deque()
        self.computed_tokens = 0
        self.num_requests = 0
        self._prompts: list[ReplayRequest] = []  # running prefills
        # A heap of (number of the request's last decode step, ticket, request).
        self._decoding: list[tuple[int, int, ReplayRequest]] = []
        self._decoded = 0  # decode steps so far
        self._ticket = 0
        self._reserved = 0  # blocks that running requests have not allocated yet
        self._step: _Step | None = None

    @property
    def num_active(self) -> int:
        """Number of requests here that are not finished."""
        return len(self.waiting) + len(self._prompts) + len(self._decoding)

    def check_fits(self, num_blocks: int, name: str) -> None:
        """Raise ConfigError if a request needs more blocks than the pool has."""
        capacity, size = self.manager.config.num_blocks, self.manager.block_size * self.grain
        if num_blocks > capacity:
            raise ConfigError(
                f"request {name} needs {num_blocks * size:,} tokens of KV memory, and a replica "
                f"has {capacity * size:,}; allowed: more memory per replica"
            )

    def begin(self, now: float) -> float | None:
        """Plan the next step; return when it ends, None if there is nothing to do."""
        num_tokens = 0
        for job in self._prompts:
            if num_tokens >= self.speed.chunk:
                break
            num_tokens += self._compute(job, self.speed.chunk - num_tokens)
        num_tokens += self._admit(self.speed.chunk - num_tokens)
        if not num_tokens and not self._decoding:
            return None
        count = 1 if num_tokens else max(1, self._decoding[0][0] - self._decoded)
        seconds = self.speed.seconds(num_tokens, len(self._decoding))
        self._step = _Step(now, seconds, count, num_tokens)
        return now + count * seconds

    def interrupt(self, now: float) -> float | None:
        """End repeated steps early for a new request; return the new end, None if unchanged."""
        step = self._step
        if step is None or step.count == 1:
            return None
        done = int((now - step.start) / step.seconds) + 1
        if done >= step.count:
            return None
        step.count = done
        return step.start + done * step.seconds

    def end(self, now: float) -> tuple[list[ReplayRequest], list[ReplayRequest]]:
        """End the step; return the requests that got their first token, and the finished ones."""
        step, self._step = self._step, None
        assert step is not None
        self.manager.commit_step()
        self.computed_tokens += step.num_tokens
        self._decoded += step.count
        finished = []
        while self._decoding and self._decoding[0][0] <= self._decoded:
            finished.append(heappop(self._decoding)[2])
        started = []
        if step.num_tokens:
            started = [j for j in self._prompts if j.computed >= len(j.sequence.token_ids)]
            self._prompts = [j for j in self._prompts if j.computed < len(j.sequence.token_ids)]
        for job in started:
            job.first_token = now
            if job.num_output > 1:
                self._decode(job)
            else:
                finished.append(job)
        for job in finished:
            job.finished = now
            self.manager.free(job.sequence)
            self._reserved -= job.num_blocks - self._blocks(job.computed)
        return started, finished

    def _blocks(self, num_units: int) -> int:
        return -(-num_units // self.manager.block_size)

    def _tokens(self, job: ReplayRequest, num_units: int) -> int:
        return min(num_units * self.grain, job.num_tokens)

    def _chunk(self, job: ReplayRequest, start: int, budget: int) -> int:
        """Return how many units to compute next: at least one, even if it exceeds the budget."""
        return min(max(budget // self.grain, 1), len(job.sequence.token_ids) - start)

    def _compute(self, job: ReplayRequest, budget: int) -> int:
        """Continue a prefill; return its tokens in this step."""
        start = job.computed
        count = self._chunk(job, start, budget)
        has_slots = self.manager.append_slots(job.sequence, count)
        assert has_slots, "blocks were reserved"
        return self._advance(job, start, start + count)

    def _advance(self, job: ReplayRequest, start: int, stop: int) -> int:
        self._reserved -= self._blocks(stop) - self._blocks(job.computed)
        job.computed = stop
        return self._tokens(job, stop) - self._tokens(job, start)

    def _admit(self, budget: int) -> int:
        """Admit requests from the head of the queue; return their tokens in this step."""
        num_tokens = 0
        skipped: list[ReplayRequest] = []
        while (
            self.waiting
            and num_tokens < budget
            and len(self._prompts) + len(self._decoding) < self.speed.max_running
            and len(skipped) < MAX_SKIPPED
        ):
            job = self.waiting[0]
            computed = self.manager.get_computed_blocks(job.sequence)
            if computed.writer is not None:
                skipped.append(self.waiting.popleft())
                continue
            if job.num_blocks > self.manager.num_free_blocks - self._reserved:
                break
            start, end = computed.num_tokens, len(job.sequence.token_ids)
            count = end - start
            if not job.is_moved:
                count = self._chunk(job, start, budget - num_tokens)
            admitted = self.manager.allocate_slots(job.sequence, count, computed)
            assert admitted is not None, "enough blocks are free"
            self.waiting.popleft()
            self._reserved += job.num_blocks
            if job.is_moved:
                self._advance(job, start, end)
                self._decode(job)
                continue
            self._prompts.append(job)
            job.hit_tokens = self._tokens(job, start)
            num_tokens += self._advance(job, start, start + count)
        self.waiting.extendleft(reversed(skipped))
        return num_tokens

    def _decode(self, job: ReplayRequest) -> None:
        """Allocate the whole reply of a request whose prompt is computed."""
        for unit in job.reply:
            job.sequence.append(unit)
        if job.reply:
            has_slots = self.manager.append_slots(job.sequence, len(job.reply))
            assert has_slots, "blocks were reserved"
            self._advance(job, job.computed, job.computed + len(job.reply))
        self._ticket += 1  # breaks ties in the heap: requests cannot be compared
        heappush(self._decoding, (self._decoded + job.num_output - 1, self._ticket, job))
