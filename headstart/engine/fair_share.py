"""Fair shares: among owners that compete, who has had least for its weight is next.

Start-time fair queueing (Goyal, Vin, Cheng, 1996). Every request gets a turn when it is queued, a
point in virtual time, and turns decide the order among requests of one priority:

    turn  = max(now - credit, what its owner has had, in tokens for each unit of weight)
    now   = the latest turn that the first prompt of an owner has reached

So an owner that floods the queue only pushes its own turns away. One that asked for little is next,
and may be `CREDIT_STEPS` steps ahead: its burst does not wait for what a flood brought before it.
An owner has what is computed for it: prompts without what was cached, and answers, which are taken
to be as long as its last ones until they are known.

The queue's order does not suffice, since prompts are computed in chunks over many steps and hits
go first. So as a limit it holds back a prompt while another owner has one of an earlier turn. What
is generated is never held back.

Nobody gives up what runs, so a request is let in only where there is room. Some places and blocks
are kept for owners that have nothing running, and those blocks that another owner cached of late
within its share of the pool. An owner that waits for room saves up no turns meanwhile.

A step that is under way is not interrupted, so its length bounds the wait of a request that comes
meanwhile. While several owners are active, a step has at most a `STEP_SHARE`-th of its tokens for
prompts. An owner is active while it has requests, and for `ACTIVE_SECONDS` after its last one came.

Owners are those of `headstart.cache.Shares`. Without any, every turn is 0 and nothing is limited.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from headstart.cache import KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.request import Request

__all__ = ["FairShare"]

CREDIT_STEPS = 8
RESERVE = 8  # one place and one block of so many are kept for owners that have nothing running
MEMORY = 8  # what an owner cached is kept while as many tokens as fill so many pools are computed
STEP_SHARE = 32
SHORTEST_STEP = 64  # tokens of prompts; shorter steps compute prompts slowly
ACTIVE_SECONDS = 120.0
_FIRST_GUESS = 128  # tokens of an answer, before an owner had any
_SLACK = 64  # requests that are gone and still in a heap

_Entry = tuple[int, float, int, Request]


class _Owner:
    """What is known of an owner.

    had: tokens for each unit of its weight. expected: tokens of an answer. unread: requests whose
    prompts are not computed. order: a heap of these, and of some that are gone. lacks_room: when it
    asked last, there was no room for one more of its requests. seen: tokens that had been computed
    for all owners when it was last served, or asked. last_arrival: time of its latest request.
    """

    def __init__(self) -> None:
        self.had = 0.0
        self.expected = float(_FIRST_GUESS)
        self.answers = 0
        self.running: set[Request] = set()
        self.unread: set[Request] = set()
        self.order: list[_Entry] = []
        self.most_entries = _SLACK
        self.lacks_room = False
        self.seen = 0
        self.last_arrival = 0.0


class FairShare:
    """Turns of requests, and the limit that keeps to them."""

    def __init__(self, manager: KVCacheManager, config: EngineConfig) -> None:
        self._manager = manager
        self._shares = manager.shares
        self._credit = CREDIT_STEPS * config.max_num_batched_tokens
        self._places = config.max_num_seqs
        self._open_places = config.max_num_seqs - config.max_num_seqs // RESERVE
        self._reserved_blocks = manager.config.num_blocks // RESERVE
        self._memory = MEMORY * manager.config.num_blocks * manager.block_size
        self._step = config.max_num_batched_tokens
        self._shared_step = min(self._step, max(SHORTEST_STEP, self._step // STEP_SHARE))
        self._computed = 0  # tokens, for all owners
        self._now = 0.0
        self._last_arrival = 0.0  # of any owner's requests
        self._owners: dict[str, _Owner] = {}
        self._guesses: dict[Request, float] = {}  # tokens of their answers that were counted
        self._coming: dict[Request, int] = {}  # of each that runs: tokens that are yet to get rows
        self._to_come: dict[str, int] | None = None  # by owner; None until it is asked for
        # Of its last admission: preemptions before it, its cost, and where it began to compute.
        self._admissions: dict[Request, tuple[int, int, int]] = {}
        self._numbers = count()

    def _name(self, request: Request) -> str | None:
        return self._shares.owner(request.sequence.namespace.salt)

    def queue(self, request: Request) -> Request:
        """Give a request its turn, before the scheduler has it; returns the request."""
        name = self._name(request)
        if name is None:
            return request
        owner = self._owners.setdefault(name, _Owner())
        owner.seen = self._computed
        owner.last_arrival = self._last_arrival = request.group.arrival_time
        owner.had = request.turn = max(self._now - self._credit, owner.had)
        most = request.group.params.max_tokens
        guess = owner.expected if most is None else min(owner.expected, most)
        self._guesses[request] = guess
        self._charge(name, len(request.sequence.token_ids) + guess)
        self._wait(owner, request)
        return request

    def max_prompt_tokens(self) -> int:
        """Return how many tokens of prompts the next step may have."""
        active = (owner for owner in self._owners.values() if self._is_active(owner))
        several = next(active, None) is not None and next(active, None) is not None
        return self._shared_step if several else self._step

    def _is_active(self, owner: _Owner) -> bool:
        if owner.running or owner.last_arrival >= self._last_arrival - ACTIVE_SECONDS:
            return True
        return self._first(owner) is not None

    def catch_up(self) -> bool:
        """Move the turns of who lacks room on to now; True if any moved, and order with them.

        What others had meanwhile took nothing from him. It would let him go first for as long, once
        there is room, and his requests would stand before all others in the queue.
        """
        lacking = [owner for owner in self._owners.values() if owner.lacks_room]
        held = {one: first for one in lacking if (first := self._first(one)) is not None}
        turns = [self._rank(first)[1] for one, first in held.items() if first not in one.running]
        lag = self._now + self._step - min(turns, default=self._now + self._step)
        if lag < self._step:
            return False
        # Who is far ahead of now is not moved: now would follow him, and the next lag be twice it.
        bound = self._now + self._step + self._credit
        for owner, first in held.items():
            moved = min(lag, max(0.0, bound - self._rank(first)[1]))
            owner.had += moved
            for request in owner.unread - owner.running:
                request.turn += moved
            owner.order = [(*one.rank, number, one) for *_, number, one in owner.order]
            heapify(owner.order)
            owner.lacks_room = not self._has_room(owner, first)  # it may not have been asked since
        return True

    def _charge(self, name: str, tokens: float) -> None:
        self._owners[name].had += tokens / self._shares.weight(name)

    def _wait(self, owner: _Owner, request: Request) -> None:
        owner.unread.add(request)
        heappush(owner.order, (*request.rank, next(self._numbers), request))
        if len(owner.order) > owner.most_entries:
            owner.order = [entry for entry in owner.order if self._is_unread(owner, entry[-1])]
            heapify(owner.order)
            owner.most_entries = 2 * len(owner.order) + _SLACK

    def _is_unread(self, owner: _Owner, request: Request) -> bool:
        """False for a prompt that is computed; also for one that is gone, which is forgotten."""
        if request in owner.unread and request.finish_reason is not None:
            owner.unread.discard(request)
            _, charged, _ = self._admissions.pop(request, (0, 0, 0))
            guess = self._guesses.pop(request, 0.0)
            name = self._name(request)
            if request.missed is None and name is not None:  # it never ran
                self._charge(name, -len(request.group.prompt_token_ids) - guess - charged)
        return request in owner.unread

    # As a limit

    def applies(self, request: Request) -> bool:
        """A request is limited that was an owner's when it was queued."""
        return request in self._guesses

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """All of it, or nothing while another owner is before it."""
        name = self._name(request)
        assert name is not None
        owner = self._owners[name]
        runs = request in owner.running
        if len(self._owners) == 1 or (runs and request not in owner.unread):
            return stop
        if not runs and not self._has_room(owner, request):
            owner.lacks_room = True
            return None
        for other in self._owners.values():
            if other is not owner and self._is_before(other, self._rank(request)):
                return start if runs else None
        return stop

    def _rank(self, request: Request) -> tuple[int, float]:
        """As the scheduler ranks requests, but a prompt's turn goes on with what is computed.

        What it hits was computed for others, or before it gave way.
        """
        name = self._name(request)
        _, _, start = self._admissions.get(request, (0, 0, 0))
        computed = request.sequence.num_computed_tokens - start
        return request.priority, request.turn + max(0, computed) / self._shares.weight(name)

    def _is_before(self, other: _Owner, rank: tuple[int, float]) -> bool:
        """True if the owner has a prompt of a lower rank that could be computed now."""
        first = self._first(other)
        if first is None or self._rank(first) >= rank:
            return False
        if first.awaits_writer:  # what writes for it may be the very request that asks
            return False
        return first in other.running or (self._fits(first) and self._has_room(other, first))

    def _first(self, owner: _Owner) -> Request | None:
        """The prompt of an owner that is next by its turn."""
        order = owner.order
        while order and not self._is_unread(owner, order[0][-1]):
            heappop(order)
        return order[0][-1] if order else None

    def _fits(self, request: Request) -> bool:
        """True if a waiting request could run beside all that run.

        Nobody waits for one that could not: he would give way, and what he computed may be lost.
        """
        if len(self._manager.sequences) >= self._places:
            return False
        blocks = -(-len(request.sequence.token_ids) // self._manager.block_size)
        if blocks <= self._manager.num_free_blocks:
            return True
        return self._manager.can_admit(self._manager.get_computed_blocks(request.sequence))

    def _has_room(self, owner: _Owner, request: Request) -> bool:
        """True if a request leaves what is kept for owners without any that run.

        Blocks that running requests are yet to get, for their prompts and answers, are not free.
        """
        if not owner.running:
            return True
        running = sum(len(one.running) for one in self._owners.values())
        if running >= self._open_places:
            return False
        if self._to_come is None:
            coming = self._coming
            self._to_come = {
                name: sum(coming.get(one, 0) for one in other.running)
                for name, other in self._owners.items()
            }
        tokens = sum(self._to_come.values()) + self._whole(request)
        blocks = tokens // self._manager.block_size + running + 1
        since, size = self._computed - self._memory, self._manager.block_size
        recent = {
            name: -(-self._to_come[name] // size)
            for name, other in self._owners.items()
            if other is owner or other.seen >= since
        }
        kept = max(self._reserved_blocks, self._manager.count_kept(self._name(request), recent))
        return blocks + kept <= self._manager.num_free_blocks

    def _whole(self, request: Request) -> int:
        """Tokens of a request at its end, as far as can be told; before any answer, at the most."""
        name, most = self._name(request), request.group.params.max_tokens
        assert name is not None
        owner = self._owners[name]
        answer = owner.expected
        if most is not None:
            answer = min(answer, most) if owner.answers else most
        known, prompt = request.sequence.token_ids, request.group.prompt_token_ids
        return max(len(known), len(prompt) + int(answer))

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Note what is computed, where it is not what was counted before."""
        name = self._name(request)
        assert name is not None
        owner = self._owners[name]
        self._computed += stop - start
        owner.seen = self._computed
        if request not in owner.running:
            owner.lacks_room = False
            owner.running.add(request)
            self._admit(name, request, start)
        elif request not in owner.unread:
            answered = len(request.sampling.output_token_ids)
            if answered > self._guesses.get(request, 0.0):
                self._charge(name, stop - start)
        self._to_come = None
        self._coming[request] = self._whole(request) - stop
        first = self._first(owner) or request  # others may have gone before it
        self._now = max(self._now, min(self._rank(first)[1], self._rank(request)[1]))
        if stop == len(request.sequence.token_ids):
            owner.unread.discard(request)

    def _admit(self, name: str, request: Request, start: int) -> None:
        """Charge the owner for an admission, in place of one that a failed step took back."""
        times = request.num_preemptions
        cost = (len(request.sequence.token_ids) if times else 0) - start
        before, charged, _ = self._admissions.get(request, (-1, 0, 0))
        self._charge(name, cost - charged if before == times else cost)
        self._admissions[request] = times, cost, start

    def leave(self, request: Request) -> None:
        """It waits again, or is gone; one that is gone is forgotten when it would be first."""
        name = self._name(request)
        assert name is not None
        owner = self._owners[name]
        self._coming.pop(request, None)  # first, or an interruption would leave it for ever
        self._to_come = None
        if request not in owner.running:
            return
        owner.running.discard(request)
        owner.unread.discard(request)
        if request.finish_reason is None:
            self._wait(owner, request)
            return
        self._admissions.pop(request, None)
        answered = len(request.sampling.output_token_ids)
        owner.answers += 1
        owner.expected += (answered - owner.expected) / min(owner.answers, 8)
        self._charge(name, min(0.0, answered - self._guesses.pop(request, 0.0)))
