"""Who runs in the next step, and with how many tokens.

    waiting ──admit──▶ running ──finish / abort──▶ gone
       ▲                  │
       └────preempt───────┘   its blocks are freed; it resumes by hitting them

Running requests come first, in the order of their admission, each with all tokens it knows and
has not computed, under the step's token budget: a decoding request has one, a long prompt is
cut into chunks. When blocks run out, the request admitted last gives up its own.

Waiting requests are admitted first come first served, but among the first 16 one that hits more
of the cache goes first. A request that was overtaken `max_overtaken` times is not overtaken any
more. One whose next block another request is computing is left waiting, so that no block is
computed twice; it is let in as soon as that is done, or the other is gone.

A gate may say that fewer tokens of a request can be computed now than there are, or none; a
running request then waits where it is. If all that run wait, the last one gives way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from headstart.cache import Allocation, ComputedBlocks, KVCacheManager, RowCopy
from headstart.engine.batch import Batch, ScheduledTokens
from headstart.engine.hooks import EngineHooks
from headstart.engine.request import Request

LOOKAHEAD = 16  # waiting requests that are looked up to find the best hit


class TokenGate(Protocol):
    """Says how many tokens a request that is more than token ids may have in a step."""

    def reach(self, request: Request, start: int, stop: int) -> int:
        """How far, from `start` up to `stop`, tokens can be computed now. Changes nothing."""

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Tokens `start` to `stop - 1` are in the step; `reach` has allowed them."""

    def leave(self, request: Request) -> None:
        """The request runs no longer."""


class Scheduler:
    """Keeps the waiting and the running requests; every step's batch comes from `schedule`.

    `may_run`: whether a waiting request may run beside the running ones, blocks aside.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_tokens: int,
        max_running: int,
        max_overtaken: int,
        may_run: Callable[[Request, Sequence[Request]], bool] = lambda request, running: True,
        hooks: EngineHooks | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.gate: TokenGate | None = None
        self._admitted: list[tuple[Request, int]] = []  # in the last step, and from which token on
        self._manager = manager
        self._max_tokens = max_tokens
        self._max_running = max_running
        self._max_overtaken = max_overtaken
        self._may_run = may_run
        self._hooks = hooks

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """The request is finished or aborted: its blocks are free. Not during its step."""
        if request in self.running:
            self._free(request)
            self._leave_gate(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def restart(self, live: Iterable[Request]) -> None:
        """Have those of the live requests that hold no blocks wait, before all others.

        For after a step that did not come about, once the manager has taken its blocks back.
        Wherever `schedule` or `remove` was interrupted, each live request is in one place then.
        """
        living = dict.fromkeys(live)
        kept = {r for r in self.running if r in living and self._manager.is_known(r.sequence)}
        again = [r for r in self.running if r in living and r not in kept]
        placed = {*self.running, *self.waiting}
        lost = [r for r in living if r not in placed]
        for request in {*placed, *lost} - kept:
            self._free(request)
            self._leave_gate(request)
        for request, start in self._admitted:
            request.withdrawn(start)
        self._admitted.clear()
        for request in again:
            self._count_preemption(request)
        waiting = dict.fromkeys((*again, *lost, *self.waiting))
        self.running, self.waiting = (
            [request for request in self.running if request in kept],
            deque(request for request in waiting if request in living and request not in kept),
        )

    @property
    def waits_for_inputs(self) -> bool:
        """Whether some request's inputs are still coming; it may hold what another needs."""
        return not all(map(self._is_ready, (*self.running, *self.waiting)))

    def _is_ready(self, request: Request) -> bool:
        return self._hooks is None or self._hooks.is_ready(request)

    def schedule(self) -> Batch:
        """The next step, with slots for each of its tokens; empty when nothing can run."""
        self._admitted.clear()
        batch = self._schedule()
        while not batch.scheduled and any(map(self._is_ready, self.running)):  # stuck at the gate
            self._preempt(self.running.pop())
            batch = self._schedule()
        return batch

    def _schedule(self) -> Batch:
        preempted = self.num_preemptions
        scheduled, budget = self._schedule_running()
        copies: list[RowCopy] = []
        if self.waiting and self.num_preemptions == preempted:
            self._admit(scheduled, copies, budget)
        return Batch(tuple(scheduled), tuple(copies))

    def _schedule_running(self) -> tuple[list[ScheduledTokens], int]:
        """What running requests compute, and how many tokens of the budget are left."""
        budget = self._max_tokens
        append_slots = self._manager.append_slots
        scheduled: list[ScheduledTokens] = []
        at = 0
        while at < len(self.running) and budget:
            request = self.running[at]
            if not self._is_ready(request):
                at += 1
                continue
            sequence = request.sequence
            start = sequence.num_computed_tokens
            left = len(sequence.token_ids) - start
            count = self._reach(request, start, left if left <= budget else budget)
            if not count:
                at += 1
            elif append_slots(sequence, count):
                self._enter(request, start, start + count)
                scheduled.append(ScheduledTokens(request, start, start + count, count == left))
                budget -= count
                at += 1
            else:
                self._preempt(self.running.pop())
        return scheduled, budget

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it goes to the head of the waiting ones."""
        self._free(request)
        self._leave_gate(request)
        self._count_preemption(request)
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        if self._manager.is_known(request.sequence):
            self._manager.free(request.sequence)

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, scheduled: list[ScheduledTokens], copies: list[RowCopy], budget: int) -> None:
        waiting = 0
        while self._has_room(budget) and len(self.waiting) != waiting:  # a round let nobody in
            waiting = len(self.waiting)
            for request in self._admission_order():
                if not self._has_room(budget):
                    return
                computed = self._look_up(request)
                if computed.writer is not None:
                    continue
                if not self._may_run(request, self.running):
                    if request.times_overtaken >= self._max_overtaken:
                        return  # or those that run on would keep it out for ever
                    continue
                start = computed.num_tokens
                left = len(request.sequence.token_ids) - start
                count = self._reach(request, start, min(left, budget))
                allocation = self._allocate(request, computed, count) if count else None
                if allocation is None:
                    return
                self._enter(request, start, start + count)
                self._leave_queue(request)
                self._admitted.append((request, start))
                request.admitted(start, allocation.missed)
                if self._hooks is not None:
                    self._hooks.admitted(request, start)
                scheduled.append(ScheduledTokens(request, start, start + count, count == left))
                copies += allocation.copies
                budget -= count

    def _reach(self, request: Request, start: int, count: int) -> int:
        """How many of the next `count` tokens can be computed now."""
        if self.gate is None or request.group.extras is None:
            return count
        return self.gate.reach(request, start, start + count) - start

    def _enter(self, request: Request, start: int, stop: int) -> None:
        if self.gate is not None and request.group.extras is not None:
            self.gate.enter(request, start, stop)

    def _leave_gate(self, request: Request) -> None:
        if self.gate is not None and request.group.extras is not None:
            self.gate.leave(request)

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self.running) < self._max_running

    def _admission_order(self) -> list[Request]:
        """The first waiting requests, best hit first, nobody before one that is due."""
        ranked = []
        era = 0
        for at, request in enumerate(islice(self.waiting, LOOKAHEAD)):
            if not self._is_ready(request):
                continue
            due = request.times_overtaken >= self._max_overtaken
            era += due
            hit = 0 if due else self._look_up(request).num_tokens
            ranked.append((era, not due, -hit, at, request))
        return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]

    def _look_up(self, request: Request) -> ComputedBlocks:
        """What the request hits; nothing, if it needs the logits of its whole prompt."""
        found = self._manager.get_computed_blocks(request.sequence)
        if request.needs_prompt_logits:
            return found._replace(blocks=[], num_tokens=0, partial=None, writer=None, node=None)
        if self._hooks is not None and found.blocks:
            usable = self._hooks.usable_blocks(request, found)
            if usable < len(found.blocks):
                return found.cut(usable, self._manager.block_size)
        return found

    def _allocate(
        self, request: Request, computed: ComputedBlocks, count: int
    ) -> Allocation | None:
        """Slots for the first tokens, if the free blocks would do for all that is known.

        Otherwise two long prompts could be let in of which only one can be computed.
        """
        if not self._manager.can_admit(computed):
            return None
        read = None if request.needs_prompt_logits else computed
        return self._manager.allocate_slots(request.sequence, count, read)

    def _leave_queue(self, request: Request) -> None:
        """From waiting to running; everybody it went past is counted as overtaken."""
        for other in self.waiting:
            if other is request:
                break
            other.times_overtaken += 1
        self.waiting.remove(request)
        self.running.append(request)
