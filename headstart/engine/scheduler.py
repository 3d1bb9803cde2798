"""The scheduler: which requests run in the next step, and with how many tokens.

    waiting ──admit──▶ running ──finish / abort──▶ gone
       ▲                  │
       └────preempt───────┘   its blocks are freed; it resumes by hitting them

Running requests come first, in the order of their admission, each with all tokens that it has yet
to compute, within the step's token budget: a decoding request has one, a long prompt is cut into
chunks. When blocks run out, the request admitted last gives up its blocks.

Waiting requests are admitted first come first served, but among the first 16 a better cache hit
goes first. A request that was bypassed `max_bypassed` times is not bypassed any more. A request
whose next block another request is computing is left waiting, so that no block is computed twice;
it is admitted as soon as that is done, or the other is gone.

This holds among requests of one priority, usually 0. A request of a lower value is before all
others: it is admitted and computed earlier, and gives up its blocks later. Where owners share the
engine, requests of one priority are in the order of their turns (`fair_share.py`).

A limit (`step.py`) may allow fewer tokens of a request now, or none. A running request then waits
in its place; if nothing can run because of limits, the request admitted last is preempted. A
waiting request is bypassed, as above. If limits stop all running requests, a waiting request that
lacks blocks is bypassed too, since they may wait for a request behind it.

While several owners are active, a step has fewer tokens of prompts, so that the next request of any
of them finds a short step running. Decoding requests have their token in each step regardless.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter, is_not

from headstart.cache import Allocation, ComputedBlocks, KVCacheManager, RowCopy
from headstart.engine.request import Request
from headstart.engine.step import Batch, EngineHooks, Limit, ScheduledTokens

_rank = attrgetter("rank")
LOOKAHEAD = 16  # waiting requests that are looked up to find the best hit


class Scheduler:
    """The waiting and the running requests; every step's batch comes from `schedule`.

    waits_for_inputs: in the last step a request waited for its own inputs. max_prompt_tokens:
    returns how many tokens of prompts the next step may have.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_tokens: int,
        max_running: int,
        max_bypassed: int,
        limits: Sequence[Limit] = (),
        max_prompt_tokens: Callable[[], int] | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.waits_for_inputs = False
        self._admitted: list[tuple[Request, int]] = []  # in the last step, with their first tokens
        self._manager = manager
        self._max_tokens = max_tokens
        self._max_running = max_running
        self._max_bypassed = max_bypassed
        self._limits = tuple(limits)
        self._max_prompt_tokens = max_prompt_tokens or (lambda: max_tokens)
        self._limited: dict[Request, tuple[Limit, ...]] = {}  # requests that a limit applies to
        self._is_held_up = False  # in this step a limit stopped a running request
        self._hooks = hooks

    def add(self, request: Request) -> None:
        self._find_limits(request)
        self.waiting.insert(_place_after(self.waiting, request), request)

    def reorder(self) -> None:
        """Put waiting requests in the order of their ranks, after their turns moved."""
        self.waiting = deque(sorted(self.waiting, key=_rank))

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request, and free its blocks. Not during its step."""
        if request in self.running:
            self._free(request)
            self._leave_limits(request)
            self.running.remove(request)
        elif request in self.waiting:
            self._leave_limits(request)  # it may wait for a load, which holds blocks
            self.waiting.remove(request)
        self._limited.pop(request, None)

    def restart(self) -> None:
        """Queue the requests of a failed step again, once the manager has their blocks back.

        Requests that the step was to admit did not run, so they were not preempted either.
        """
        admitted = dict(self._admitted)
        lost = [r for r in self.running if not self._manager.is_known(r.sequence)]
        self.running = [r for r in self.running if self._manager.is_known(r.sequence)]
        for request in lost:
            self._leave_limits(request)
            if request in admitted:
                request.withdrawn(admitted[request])
            else:
                self._count_preemption(request)
            self._find_limits(request)
        self.waiting = deque(sorted([*lost, *self.waiting], key=_rank))
        self._admitted.clear()

    def reset(self) -> None:
        """Forget all requests, in any state after an exception."""
        for request in self._limited:
            self._leave_limits(request)
        self._limited.clear()
        self._admitted.clear()
        self.running.clear()
        self.waiting.clear()

    def committed(self) -> None:
        """Note that the scheduled step succeeded: admitted requests stay."""
        self._admitted.clear()

    def _find_limits(self, request: Request) -> None:
        limits = tuple(limit for limit in self._limits if limit.applies(request))
        if limits:
            self._limited[request] = limits

    def schedule(self) -> Batch:
        """Return the next step, with slots for each of its tokens; empty if nothing can run."""
        self._admitted.clear()
        self.waits_for_inputs = False
        preempted = self.num_preemptions
        batch = self._schedule()
        while not batch.scheduled and self._is_held_up:
            if self.num_preemptions == preempted:
                self._preempt(self.running.pop())
            # Else the request that stopped another was preempted itself.
            preempted = self.num_preemptions
            batch = self._schedule()
        return batch

    def _schedule(self) -> Batch:
        self._is_held_up = False
        preempted = self.num_preemptions
        scheduled, budget = self._schedule_running()
        copies: list[RowCopy] = []
        if self.waiting and self.num_preemptions == preempted:
            self._admit(scheduled, copies, budget)
        return Batch(tuple(scheduled), tuple(copies))

    def _schedule_running(self) -> tuple[list[ScheduledTokens], int]:
        """Schedule running requests; return their tokens and the rest of the prompt budget."""
        budget = self._max_tokens
        prompt_budget = self._max_prompt_tokens()
        append_slots, limited = self._manager.append_slots, self._limited
        scheduled: list[ScheduledTokens] = []
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            sequence = request.sequence
            start = sequence.num_computed_tokens
            length = len(sequence.token_ids)
            decodes = length - start == 1
            count = 1 if decodes else min(length - start, budget, prompt_budget)
            if not count:
                index += 1
                continue
            stop = start + count
            if request in limited:
                reached = self._reach(request, start, stop)
                if reached is None or reached == start:
                    self._is_held_up |= reached is not None
                    index += 1
                    continue
                stop = reached
            if append_slots(sequence, stop - start):
                if request in limited:
                    self._enter(request, start, stop)
                scheduled.append(ScheduledTokens(request, start, stop, stop == length))
                budget -= stop - start
                prompt_budget -= 0 if decodes else stop - start
                index += 1
            else:
                self._preempt(self.running.pop())
        return scheduled, min(budget, prompt_budget)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; queue it before the waiting requests of its rank."""
        self._free(request)
        self._leave_limits(request)
        self._count_preemption(request)
        self._find_limits(request)
        self.waiting.insert(bisect_left(self.waiting, request.rank, key=_rank), request)

    def preempt_all(self) -> None:
        """Make all requests wait, without blocks. Not during a step."""
        while self.running:
            self._preempt(self.running.pop())
        for request in self.waiting:
            self._leave_limits(request)

    def _free(self, request: Request) -> None:
        if self._manager.is_known(request.sequence):
            self._manager.free(request.sequence)

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, scheduled: list[ScheduledTokens], copies: list[RowCopy], budget: int) -> None:
        waiting = 0
        while self._has_room(budget) and len(self.waiting) != waiting:  # a round admitted none
            waiting = len(self.waiting)
            for request in self._admission_order():
                if not self._has_room(budget):
                    return
                computed = self._look_up(request)
                is_saved = self._manager.save_fork(computed)
                request.awaits_writer = is_saved or computed.writer is not None
                if request.awaits_writer:
                    continue
                start, length = computed.num_tokens, len(request.sequence.token_ids)
                stop = self._reach(request, start, min(length, start + budget))
                if stop is None:
                    continue
                allocation = self._allocate(request, computed, stop - start)
                if allocation is None and stop == start:
                    # A limit excludes it. If requests could bypass it without end, they could
                    # keep it excluded for ever.
                    if request.times_bypassed >= self._max_bypassed:
                        return
                    continue
                if allocation is None:  # for lack of blocks: requests behind it do not pass it
                    if scheduled or not self._is_held_up:
                        return
                    continue
                self._enter(request, start, stop)
                is_due = False  # a request that this one bypasses was bypassed for the last time
                for other in takewhile(partial(is_not, request), self.waiting):
                    other.times_bypassed += 1
                    is_due |= other.times_bypassed == self._max_bypassed
                self.waiting.remove(request)
                self.running.insert(_place_after(self.running, request), request)
                self._admitted.append((request, start))
                request.admitted(start, allocation.missed)
                if self._hooks is not None:
                    self._hooks.admitted(request, start)
                scheduled.append(ScheduledTokens(request, start, stop, stop == length))
                copies += allocation.copies
                budget -= stop - start
                if is_due:
                    break  # the bypassed request is before all others that are left

    def _reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return how far all limits allow the request; see `Limit.reach`."""
        for limit in self._limited.get(request, ()):
            reached = limit.reach(request, start, stop)
            if reached is None:
                self.waits_for_inputs = True
                return None
            if reached == start:
                return start
            stop = reached
        return stop

    def _enter(self, request: Request, start: int, stop: int) -> None:
        for limit in self._limited.get(request, ()):
            limit.enter(request, start, stop)

    def _leave_limits(self, request: Request) -> None:
        for limit in self._limited.get(request, ()):
            limit.leave(request)

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self.running) < self._max_running

    def _admission_order(self) -> list[Request]:
        """Return the first waiting requests, best hit first; none passes one at `max_bypassed`."""
        ranked = []
        era = 0
        for index, request in enumerate(islice(self.waiting, LOOKAHEAD)):
            due = request.times_bypassed >= self._max_bypassed
            era += due
            hit = 0 if due else self._look_up(request).num_tokens
            ranked.append((request.group.priority, era, not due, -hit, index, request))
        return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]

    def _look_up(self, request: Request) -> ComputedBlocks:
        """Look up the request; no hit if it is to compute its whole prompt."""
        computed = self._manager.get_computed_blocks(request.sequence)
        if not request.reads_cache:
            return self._manager.cut(computed, 0)
        if self._hooks is not None and computed.blocks:
            usable = self._hooks.usable_blocks(request, computed)
            if usable < len(computed.blocks):
                return self._manager.cut(computed, usable)
        return computed

    def _allocate(
        self, request: Request, computed: ComputedBlocks, count: int
    ) -> Allocation | None:
        """Allocate slots for the first tokens, if the free blocks suffice for all its tokens.

        Otherwise two long prompts could be admitted of which only one can be computed.
        """
        if not count or not self._manager.can_admit(computed):
            return None
        read = computed if request.reads_cache else None
        return self._manager.allocate_slots(request.sequence, count, read)


def _place_after(queue: Sequence[Request], request: Request) -> int:
    """Return a request's place in a queue: after those whose rank is at most its own."""
    if not queue or queue[-1].rank <= request.rank:
        return len(queue)
    return bisect_right(queue, request.rank, key=_rank)
