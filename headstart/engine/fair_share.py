"""Fair shares: the next request comes from the owner with the least service per weight.

Start-time fair queueing (Goyal, Vin, Cheng, 1996). Every request gets a turn when it is queued. A
turn is a point in virtual time; turns determine the order of requests of one priority:

    turn  = max(now - credit, service of its owner / weight of its owner)

The position of a request in virtual time begins at its turn. It advances by the request's computed
tokens, divided by the weight of the owner. When a request is scheduled, `now` rises to its
position, or to the position of its owner's first unfinished prompt if this is smaller.

So an owner that floods the queue delays only itself. The credit is the number of tokens in
`CREDIT_STEPS` steps. It lets an owner with few requests go before an earlier flood of another
owner. The service of an owner is the number of tokens computed for it: prompts without their cached
part, and answers. Until an answer ends, its length is estimated from the owner's earlier answers.

The order of the queue does not suffice, since prompts are computed in chunks over many steps and
better hits are admitted first. So `FairShare` is also a limit: a prompt waits while another owner
has a prompt with an earlier turn. Decoding is never delayed.

A request is admitted only if it can run together with all running requests. Some places for running
requests, and some blocks, are reserved for owners without running requests. The cached blocks of
recently served owners are reserved too, up to each owner's share of the pool. While an owner waits
for space, its turns are moved forward to `now`.

A request that arrives during a step waits for the end of the step. So while several owners are
active, only 1 / `STEP_SHARE` of a step's tokens may be prompt tokens. An owner is active while it
has requests, and for `ACTIVE_SECONDS` after its last request arrived.

The owners are defined by `headstart.cache.Shares`. Without owners every turn is 0 and nothing is
limited.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from headstart.cache import KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.request import Request

CREDIT_STEPS = 8
RESERVE = 8  # one in 8 places and blocks is reserved for owners without running requests
MEMORY = 8  # pool sizes; after this many computed tokens, an idle owner's reservation ends
STEP_SHARE = 32
SHORTEST_STEP = 64  # prompt tokens; smaller chunks are inefficient
ACTIVE_SECONDS = 120.0
_FIRST_GUESS = 128.0  # estimated tokens of an owner's first answer
_SLACK = 64  # stale entries that may remain in a heap

_Entry = tuple[int, float, int, Request]


@dataclass(eq=False)
class _Owner:
    """The state of an owner.

    service: tokens computed for it, per unit of its weight. expected: estimated tokens of an
    answer. unread: requests whose prompts are not fully computed. order: a heap of these requests,
    with stale entries. lacks_space: the last attempt to admit one of its requests failed.
    last_served: number of tokens that had been computed for all owners when this owner was last
    served or queued a request. last_arrival: time of its latest request.
    """

    service: float = 0.0
    expected: float = _FIRST_GUESS
    answers: int = 0
    running: set[Request] = field(default_factory=set)
    unread: set[Request] = field(default_factory=set)
    order: list[_Entry] = field(default_factory=list)
    most_entries: int = _SLACK
    lacks_space: bool = False
    last_served: int = 0
    last_arrival: float = 0.0


class FairShare:
    """Turns of requests, and the limit that enforces them."""

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
        self._last_arrival = 0.0  # the latest of all owners
        self._owners: dict[str, _Owner] = {}
        self._guesses: dict[Request, float] = {}  # estimated tokens of answers, already charged
        self._pending: dict[Request, int] = {}  # tokens that running requests still need space for
        self._pending_by_owner: dict[str, int] | None = None  # None until it is needed
        # For each request, its last admission: earlier preemptions, charged tokens, first token.
        self._admissions: dict[Request, tuple[int, int, int]] = {}
        self._numbers = count()

    def _name(self, request: Request) -> str:
        """Return the name of the request's owner; "" without an owner."""
        return self._shares.owner(request.sequence.namespace.salt) or ""

    def queue(self, request: Request) -> Request:
        """Give a request its turn, before the scheduler gets the request; return the request."""
        if not (name := self._name(request)):
            return request
        owner = self._owners.setdefault(name, _Owner())
        owner.last_served = self._computed
        owner.last_arrival = self._last_arrival = request.group.arrival_time
        owner.service = request.turn = max(self._now - self._credit, owner.service)
        most = request.group.params.max_tokens
        guess = owner.expected if most is None else min(owner.expected, most)
        self._guesses[request] = guess
        self._charge(name, len(request.sequence.token_ids) + guess)
        self._wait(owner, request)
        return request

    def max_prompt_tokens(self) -> int:
        """Return the limit of prompt tokens in the next step."""
        num_active = 0
        for owner in self._owners.values():
            is_recent = owner.last_arrival >= self._last_arrival - ACTIVE_SECONDS
            num_active += bool(owner.running or is_recent or self._first(owner) is not None)
            if num_active > 1:
                return self._shared_step
        return self._step

    def catch_up(self) -> bool:
        """Move the turns of owners that lack space to now; return True if any turn moved.

        An owner without space cannot be served, so its turns fall behind those of other owners. If
        they did not move, only this owner would be served after the wait, for as long as it waited.
        """
        lacking = [owner for owner in self._owners.values() if owner.lacks_space]
        delayed = {owner: first for owner in lacking if (first := self._first(owner)) is not None}
        turns = [self._rank(r)[1] for owner, r in delayed.items() if r not in owner.running]
        lag = self._now + self._step - min(turns, default=self._now + self._step)
        if lag < self._step:
            return False
        # No turn moves beyond this bound. Otherwise, `now` would jump to the moved turn when its
        # request runs, and the lag of the other owners would double.
        bound = self._now + self._step + self._credit
        for owner, first in delayed.items():
            shift = min(lag, max(0.0, bound - self._rank(first)[1]))
            owner.service += shift
            for request in owner.unread - owner.running:
                request.turn += shift
            owner.order = [(*r.rank, number, r) for *_, number, r in owner.order]
            heapify(owner.order)
            owner.lacks_space = not self._has_space(owner, first)  # there may be space now
        return True

    def _charge(self, name: str, tokens: float) -> None:
        self._owners[name].service += tokens / self._shares.weight(name)

    def _wait(self, owner: _Owner, request: Request) -> None:
        owner.unread.add(request)
        heappush(owner.order, (*request.rank, next(self._numbers), request))
        if len(owner.order) > owner.most_entries:
            owner.order = [entry for entry in owner.order if self._is_unread(owner, entry[-1])]
            heapify(owner.order)
            owner.most_entries = 2 * len(owner.order) + _SLACK

    def _is_unread(self, owner: _Owner, request: Request) -> bool:
        """Return True if the prompt is not fully computed; forget a request that has ended."""
        if request in owner.unread and request.finish_reason is not None:
            owner.unread.discard(request)
            _, charged, _ = self._admissions.pop(request, (0, 0, 0))
            guess = self._guesses.pop(request, 0.0)
            name = self._name(request)
            if request.missed is None and name:  # the request never ran
                self._charge(name, -len(request.group.prompt_token_ids) - guess - charged)
        return request in owner.unread

    # As a limit

    def applies(self, request: Request) -> bool:
        return request in self._guesses

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return `stop` unless another owner goes first, or the request is waiting and lacks space.

        In these cases, return `start` for a running request and None for a waiting request.
        """
        owner = self._owners[self._name(request)]
        runs = request in owner.running
        if len(self._owners) == 1 or (runs and request not in owner.unread):
            return stop
        if not runs and not self._has_space(owner, request):
            owner.lacks_space = True
            return None
        rank = self._rank(request)
        for other in self._owners.values():
            if other is owner:
                continue
            # A prompt of another owner goes first if it has a lower rank and can be computed now.
            # A prompt that waits for a block cannot: this request may be computing the block.
            first = self._first(other)
            if first is None or self._rank(first) >= rank or first.awaits_writer:
                continue
            if first in other.running or (self._fits(first) and self._has_space(other, first)):
                return start if runs else None
        return stop

    def _rank(self, request: Request) -> tuple[int, float]:
        """Return the scheduler's rank, with a turn that grows with the computed tokens.

        Hits do not count: they were computed for other requests, or before a preemption.
        """
        _, _, start = self._admissions.get(request, (0, 0, 0))
        computed = request.sequence.num_computed_tokens - start
        weight = self._shares.weight(self._name(request))
        return request.group.priority, request.turn + max(0, computed) / weight

    def _first(self, owner: _Owner) -> Request | None:
        """Return the unread request of an owner that is next by rank."""
        order = owner.order
        while order and not self._is_unread(owner, order[0][-1]):
            heappop(order)
        return order[0][-1] if order else None

    def _fits(self, request: Request) -> bool:
        """Return True if a waiting request could run together with all running requests.

        If not, other requests do not wait for it. The window blocks must suffice for the window and
        a step's tokens. Two more blocks are needed, since these tokens may begin and end within a
        block.
        """
        if len(self._manager.sequences) >= self._places:
            return False
        manager = self._manager
        blocks = -(-len(request.sequence.token_ids) // manager.block_size)
        if blocks <= manager.num_free_blocks and manager.group is None:
            return True
        computed = manager.get_computed_blocks(request.sequence)
        if not request.reads_cache:
            computed = manager.cut(computed, 0)
        return manager.can_admit(computed, self._step + 2 * manager.block_size)

    def _has_space(self, owner: _Owner, request: Request) -> bool:
        """Return True if a request needs none of the places and blocks reserved for other owners.

        Blocks that running requests still need for their prompts and answers do not count as free.
        """
        if not owner.running:
            return True
        running = sum(len(other.running) for other in self._owners.values())
        if running >= self._open_places:
            return False
        if self._pending_by_owner is None:
            pending = self._pending
            self._pending_by_owner = {
                name: sum(pending.get(r, 0) for r in other.running)
                for name, other in self._owners.items()
            }
        tokens = sum(self._pending_by_owner.values()) + self._expected_length(request)
        blocks = tokens // self._manager.block_size + running + 1
        start, size = self._computed - self._memory, self._manager.block_size
        recent = {
            name: -(-self._pending_by_owner[name] // size)
            for name, other in self._owners.items()
            if other is owner or other.last_served >= start
        }
        reserved = max(
            self._reserved_blocks, self._manager.count_protected(self._name(request), recent)
        )
        return blocks + reserved <= self._manager.num_free_blocks

    def _expected_length(self, request: Request) -> int:
        """Return a request's expected length; its maximum length if its owner has no answer yet."""
        most = request.group.params.max_tokens
        owner = self._owners[self._name(request)]
        answer = owner.expected
        if most is not None:
            answer = min(answer, most) if owner.answers else most
        tokens, prompt = request.sequence.token_ids, request.group.prompt_token_ids
        return max(len(tokens), len(prompt) + int(answer))

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Charge the owner for the tokens, unless they were charged before."""
        name = self._name(request)
        owner = self._owners[name]
        self._computed += stop - start
        owner.last_served = self._computed
        if request not in owner.running:
            owner.lacks_space = False
            owner.running.add(request)
            # If a failed step rolled back the last admission, replace the charge for it.
            times = request.num_preemptions
            cost = (len(request.sequence.token_ids) if times else 0) - start
            last_times, charged, _ = self._admissions.get(request, (-1, 0, 0))
            self._charge(name, cost - charged if last_times == times else cost)
            self._admissions[request] = times, cost, start
        elif request not in owner.unread:
            num_tokens = len(request.sampling.output_token_ids)  # a draft may have added several
            if (excess := num_tokens - self._guesses.get(request, num_tokens)) > 0:
                self._charge(name, excess)
                self._guesses[request] = num_tokens
        self._pending_by_owner = None
        self._pending[request] = self._expected_length(request) - stop
        first = self._first(owner) or request
        self._now = max(self._now, min(self._rank(first)[1], self._rank(request)[1]))
        if stop == len(request.sequence.token_ids):
            owner.unread.discard(request)

    def leave(self, request: Request) -> None:
        """Queue a preempted request again, or forget a request that has ended."""
        name = self._name(request)
        owner = self._owners[name]
        self._pending.pop(request, None)
        self._pending_by_owner = None
        if request not in owner.running:
            return
        owner.running.discard(request)
        owner.unread.discard(request)
        if request.finish_reason is None:
            self._wait(owner, request)
            return
        self._admissions.pop(request, None)
        num_tokens = len(request.sampling.output_token_ids)
        owner.answers += 1
        owner.expected += (num_tokens - owner.expected) / min(owner.answers, 8)
        self._charge(name, num_tokens - self._guesses.pop(request, num_tokens))
