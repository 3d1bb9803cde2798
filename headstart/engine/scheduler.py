"""The scheduler, which chooses the requests and the tokens of each step.

    waiting ──admit──▶ running ──finish / abort──▶ removed
       ▲                  │
       └────preempt───────┘   its blocks are freed; it resumes by hitting them

Running requests come first, in the order of their admission. Each computes as many of its
uncomputed tokens as the step's token budget allows. A decoding request has one such token; a long
prompt is computed in chunks. When blocks run out, the request admitted last is preempted.

Waiting requests are admitted first come first served, except that among the first 16 the best cache
hit goes first. A request that was bypassed `max_bypassed` times is not bypassed again. A request is
not admitted while another request computes the next block of its prompt. So no block is computed
twice.

This order applies to requests of the same priority, usually 0. Requests with a lower value go
first: they are admitted and computed earlier, and preempted later. If several owners (tenants)
share the engine, requests of the same priority are in the order of their turns in virtual time
(`fair_share.py`).

A limit (`step.py`) may reduce a request's tokens in a step, or stop the request for the step. A
running request that is stopped stays in `running`, with its blocks. A waiting request that is
stopped is bypassed.

A waiting request that lacks blocks ends the admissions of the step, so that later requests do not
take blocks before it. There is one exception: if the step is empty because a limit stopped a
running request, later requests are tried too, since the running request may wait for one of them.
If the step stays empty, the request admitted last is preempted.

While several owners are active, a step has fewer prompt tokens, so that a new request waits only
for a short step. This does not limit the tokens of decoding requests.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter, is_not

from headstart.cache import Allocation, ComputedBlocks, KVCacheManager, RowCopy
from headstart.engine.config import EngineConfig
from headstart.engine.drafts.drafting import Drafting
from headstart.engine.request import Request
from headstart.engine.step import Batch, EngineHooks, Limit, ScheduledTokens

_rank = attrgetter("rank")
LOOKAHEAD = 16  # waiting requests that are looked up to find the best hit


class Scheduler:
    """The waiting and the running requests; `schedule` returns each step's batch.

    waits_for_inputs: True if a limit stopped a request whose inputs have not arrived yet.
    max_prompt_tokens: returns the limit of prompt tokens in the next step.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: EngineConfig,
        *,
        limits: Sequence[Limit] = (),
        max_prompt_tokens: Callable[[], int] | None = None,
        hooks: EngineHooks | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.waits_for_inputs = False
        self._admitted: list[tuple[Request, int]] = []  # in the last step, with their cached tokens
        self._manager = manager
        self._max_tokens = config.max_num_batched_tokens
        self._max_running = config.max_num_seqs
        self._max_bypassed = config.max_bypassed
        self._limits = tuple(limits)
        self._max_prompt_tokens = max_prompt_tokens or (lambda: self._max_tokens)
        self._limited: dict[Request, tuple[Limit, ...]] = {}  # the limits that apply to a request
        self._is_blocked = False  # a limit stopped a running request in this step
        self._hooks = hooks
        self._drafting = drafting

    def add(self, request: Request) -> None:
        self._find_limits(request)
        self.waiting.insert(_insertion_index(self.waiting, request), request)

    def reorder(self) -> None:
        """Sort the waiting requests by rank again, after their turns changed."""
        self.waiting = deque(sorted(self.waiting, key=_rank))

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request, and free its blocks. Call only between steps."""
        if request in self.running:
            self._free(request)
            self._leave_limits(request)
            self.running.remove(request)
        elif request in self.waiting:
            self._leave_limits(request)  # stops loading its prefix from a tier
            self.waiting.remove(request)
        self._limited.pop(request, None)
        if self._drafting is not None:
            self._drafting.end(request)

    def restart(self) -> None:
        """Queue the requests of a failed step again, after the manager has freed their blocks.

        Requests that the step would have admitted never ran, so they do not count as preempted.
        """
        admitted = dict(self._admitted)
        lost = [r for r in self.running if not self._manager.is_known(r.sequence)]
        self.running = [r for r in self.running if self._manager.is_known(r.sequence)]
        for request in lost:
            self._leave_limits(request)
            if request in admitted:
                request.undo_admission(admitted[request])
            else:
                self._count_preemption(request)
            self._find_limits(request)
        self.waiting = deque(sorted([*lost, *self.waiting], key=_rank))
        self._admitted.clear()

    def reset(self) -> None:
        """Forget all requests, after an exception at any point of a step."""
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
        """Return the next batch, with slots for its tokens; it is empty if nothing can run."""
        self._admitted.clear()
        self.waits_for_inputs = False
        preempted = self.num_preemptions
        batch = self._schedule()
        while not batch.scheduled and self._is_blocked:
            if self.num_preemptions == preempted:
                self._preempt(self.running.pop())
            # After a preemption, limits may allow more, so schedule again.
            preempted = self.num_preemptions
            batch = self._schedule()
        return batch

    def _schedule(self) -> Batch:
        self._is_blocked = False
        preempted = self.num_preemptions
        scheduled, budget = self._schedule_running()
        copies: list[RowCopy] = []
        if self.waiting and self.num_preemptions == preempted:
            self._admit(scheduled, copies, budget)
        return Batch(tuple(scheduled), tuple(copies))

    def _schedule_running(self) -> tuple[list[ScheduledTokens], int]:
        """Schedule running requests; return their tokens and the remaining prompt budget."""
        budget = self._max_tokens
        prompt_budget = self._max_prompt_tokens()
        append_slots, limited = self._manager.append_slots, self._limited
        if self._drafting is not None and self.running:
            self._drafting.begin_step(self.running)
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
                    self._is_blocked |= reached is not None
                    index += 1
                    continue
                stop = reached
            draft: tuple[int, ...] = ()
            if decodes and self._drafting is not None:
                spare = budget - (len(self.running) - index)  # the other requests need a token each
                draft = tuple(self._drafting.propose(request, spare))
                if draft and not append_slots(sequence, 1, len(draft)):
                    draft = ()
            # Limits are not queried again after a preemption. They might prefer the preempted
            # request, and then the two requests could preempt each other forever.
            while not draft and not append_slots(sequence, stop - start):
                last = self.running.pop()
                self._preempt(last)
                if last is request:
                    break
            else:
                if request in limited:
                    self._enter(request, start, stop)
                scheduled.append(ScheduledTokens(request, start, stop, stop == length, draft))
                budget -= stop - start + len(draft)
                prompt_budget -= 0 if decodes else stop - start
                index += 1
        return scheduled, min(budget, prompt_budget)

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks; queue it before the waiting requests of its rank."""
        self._free(request)
        self._leave_limits(request)
        self._count_preemption(request)
        self._find_limits(request)
        self.waiting.insert(bisect_left(self.waiting, request.rank, key=_rank), request)

    def preempt_all(self) -> None:
        """Preempt all running requests, and end all loads. Call only between steps."""
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
        # Repeat until no request was admitted.
        while self._can_admit_more(budget) and len(self.waiting) != waiting:
            waiting = len(self.waiting)
            for request in self._admission_order():
                if not self._can_admit_more(budget):
                    return
                computed = self._look_up(request)
                # If this step saves a state for the request, the request resumes from this state
                # in a later step.
                saves_state = self._manager.save_fork(computed)
                request.awaits_writer = saves_state or computed.writer is not None
                if request.awaits_writer:
                    continue
                start, length = computed.num_tokens, len(request.sequence.token_ids)
                stop = self._reach(request, start, min(length, start + budget))
                if stop is None:
                    continue
                allocation = self._allocate(request, computed, stop - start)
                if allocation is None and stop == start:
                    # A limit stops the request until other requests release resources. Requests
                    # that bypass it could hold these resources forever, so limit the bypasses.
                    if request.times_bypassed >= self._max_bypassed:
                        return
                    continue
                if allocation is None:  # too few blocks are free; other requests must not take them
                    if scheduled or not self._is_blocked:
                        return
                    continue
                self._enter(request, start, stop)
                is_due = False  # True if a bypassed request must not be bypassed again
                for other in takewhile(partial(is_not, request), self.waiting):
                    other.times_bypassed += 1
                    is_due |= other.times_bypassed == self._max_bypassed
                self.waiting.remove(request)
                self.running.insert(_insertion_index(self.running, request), request)
                self._admitted.append((request, start))
                request.admitted(start, allocation.missed)
                if self._hooks is not None:
                    self._hooks.admitted(request, start)
                scheduled.append(ScheduledTokens(request, start, stop, stop == length))
                copies += allocation.copies
                budget -= stop - start
                if is_due:
                    break  # compute the order again: the bypassed request is first now

    def _reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return the position up to which all limits allow the request; see `Limit.reach`."""
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

    def _can_admit_more(self, budget: int) -> bool:
        return budget > 0 and len(self.running) < self._max_running

    def _admission_order(self) -> list[Request]:
        """Return the first waiting requests, the best hit first unless a bypass is forbidden."""
        ranked = []
        num_due = 0  # requests so far that must not be bypassed
        for index, request in enumerate(islice(self.waiting, LOOKAHEAD)):
            is_due = request.times_bypassed >= self._max_bypassed
            num_due += is_due
            hit = 0 if is_due else self._look_up(request).num_tokens
            ranked.append((request.group.priority, num_due, not is_due, -hit, index, request))
        return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]

    def _look_up(self, request: Request) -> ComputedBlocks:
        """Return the request's hit, which is empty if it must compute its whole prompt."""
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
        """Allocate slots for the first `count` tokens, if the free blocks suffice for all tokens.

        Without this condition, two long prompts could be admitted although only one fits the pool.
        """
        if not count or not self._manager.can_admit(computed):
            return None
        read = computed if request.reads_cache else None
        return self._manager.allocate_slots(request.sequence, count, read)


def _insertion_index(queue: Sequence[Request], request: Request) -> int:
    """Return a request's index in a queue: after all requests of the same or a lower rank."""
    if not queue or queue[-1].rank <= request.rank:
        return len(queue)
    return bisect_right(queue, request.rank, key=_rank)
