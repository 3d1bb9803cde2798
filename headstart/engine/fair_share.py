"""Fair shares of the engine among owners, by start-time fair queueing.

Source: Goyal, Vin, Cheng, 1996. The unit of virtual time is a computed token of an owner with
weight 1. Each owner has a finish tag, the virtual time at which its queued requests end. A request
gets its turn, the start tag of the paper, when it is queued:

    turn       = max(now - credit, finish tag of its owner)
    finish tag = turn + (tokens of the prompt + expected tokens of the answer) / weight of its owner

The scheduler orders requests of the same priority by their turns. The turns of an owner's requests
follow one another, so an owner that floods the queue delays only itself. The credit is the number
of tokens in `CREDIT_STEPS` steps. It moves the turn of an owner with few requests ahead of requests
that another owner has queued earlier.

The finish tag is corrected later. Cached tokens are subtracted when the request is admitted. Tokens
that are computed again after a preemption are added. The expected length of the answer, estimated
from the owner's earlier answers, is replaced by its actual length.

Each request has a position in virtual time. It begins at the turn, and advances by the request's
computed tokens, divided by the weight of the owner. A scheduled request raises `now` to its
position. If its owner has an unfinished prompt at a smaller position, `now` rises only to that
position.

The order of the queue does not suffice, since prompts are computed in chunks over many steps, and
requests with better hits are admitted first. So `FairShare` is also a limit: a prompt waits while
another owner has a prompt with a smaller position that can be computed now. Decoding never waits.

The limit also reserves space for other owners: blocks, and some of the `max_num_seqs` running
requests. A request of an owner without running requests may use all free space. Any other request
is admitted only if the reserve stays free. Blocks that the running requests will still need do not
count as free. The reserve is:

    requests  1 / `RESERVE` of `max_num_seqs`
    blocks    the larger of two numbers: 1 / `RESERVE` of all blocks, and the free cached blocks
              within the shares of other owners that were recently served

While an owner waits for space, its turns advance with `now` (`catch_up`).

A request that arrives during a step waits for the end of the step, so steps must be short. While
several owners are active, a step has at most `max_num_batched_tokens` / `STEP_SHARE` prompt tokens,
but at least `SHORTEST_STEP`. An owner is active while it has requests, and for `ACTIVE_SECONDS`
after its last request arrived.

The owners are defined by `headstart.cache.Shares`. Without owners every turn is 0 and nothing is
limited.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from headstart.cache import KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.request import Request

CREDIT_STEPS = 8
RESERVE = 8  # an eighth of `max_num_seqs` and of the blocks is reserved
# An owner counts as recently served until the engine has computed 8 times as many tokens as fit in
# the pool.
MEMORY = 8
STEP_SHARE = 32
SHORTEST_STEP = 64  # prompt tokens; smaller chunks are inefficient
ACTIVE_SECONDS = 120.0
_FIRST_GUESS = 128.0  # estimated tokens of an owner's first answer
_SLACK = 64  # stale entries that may remain in a heap

_Entry = tuple[int, float, int, Request]


@dataclass(eq=False)
class _Owner:
    """The state of an owner.

    finish_tag: the virtual time at which its queued requests end. expected: estimated tokens of an
    answer. answers: number of its finished answers. prefills: requests whose prompts are not fully
    computed. order: a heap of these requests, with stale entries. max_entries: length at which
    stale entries are removed from the heap. lacks_space: a request could not be admitted for lack
    of space, and no request was admitted since. last_served: the value of `FairShare._computed`
    when the owner was last served or queued a request. last_arrival: time of its latest request.
    """

    finish_tag: float = 0.0
    expected: float = _FIRST_GUESS
    answers: int = 0
    running: set[Request] = field(default_factory=set)
    prefills: set[Request] = field(default_factory=set)
    order: list[_Entry] = field(default_factory=list)
    max_entries: int = _SLACK
    lacks_space: bool = False
    last_served: int = 0
    last_arrival: float = 0.0


class _Admission(NamedTuple):
    """The last admission of a request.

    num_preemptions: number of the request's preemptions before this admission. charged: tokens that
    it added to the owner's finish tag, negative for cached tokens. start: index of the first token
    that was not cached.
    """

    num_preemptions: int = -1
    charged: int = 0
    start: int = 0


_NOT_ADMITTED = _Admission()


class FairShare:
    """Turns of requests, and the limit that enforces them."""

    def __init__(self, manager: KVCacheManager, config: EngineConfig) -> None:
        self._manager = manager
        self._shares = manager.shares
        self._credit = CREDIT_STEPS * config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._unreserved_seqs = config.max_num_seqs - config.max_num_seqs // RESERVE
        self._reserved_blocks = manager.config.num_blocks // RESERVE
        self._recent_tokens = MEMORY * manager.config.num_blocks * manager.block_size
        self._step = config.max_num_batched_tokens
        self._shared_step = min(self._step, max(SHORTEST_STEP, self._step // STEP_SHARE))
        self._computed = 0  # tokens, of all owners since the start
        self._now = 0.0  # virtual time
        self._last_arrival = 0.0  # the latest of all owners
        self._owners: dict[str, _Owner] = {}
        self._guesses: dict[Request, float] = {}  # estimated tokens of answers, already charged
        self._pending: dict[Request, int] = {}  # tokens that running requests still need space for
        self._pending_by_owner: dict[str, int] | None = None  # None until it is needed
        self._admissions: dict[Request, _Admission] = {}
        self._numbers = count()  # for heap entries of the same rank, in the order of their pushes

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
        owner.finish_tag = request.turn = max(self._now - self._credit, owner.finish_tag)
        limit = request.group.params.max_tokens
        guess = owner.expected if limit is None else min(owner.expected, limit)
        self._guesses[request] = guess
        self._charge(name, len(request.sequence.token_ids) + guess)
        self._add_prefill(owner, request)
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
        """Advance the turns of owners that lack space; return True if any turn was advanced.

        Do nothing while all waiting requests of these owners have positions after `now`. Otherwise,
        advance all these owners by the same distance, so that the smallest position becomes `now`
        plus the tokens of one step.

        While an owner lacks space, `now` advances with the other owners. Without this correction,
        the waiting owner would have the smallest positions when there is space again. It would then
        go before all other owners until it has caught up.
        """
        lacking = [owner for owner in self._owners.values() if owner.lacks_space]
        delayed = {owner: first for owner in lacking if (first := self._first(owner)) is not None}
        turns = [self._rank(r)[1] for owner, r in delayed.items() if r not in owner.running]
        lag = self._now + self._step - min(turns, default=self._now + self._step)
        if lag < self._step:
            return False
        # Do not move an owner's first request beyond this bound. When the request runs, `now` jumps
        # to its position, and then the other owners would lag far behind `now`.
        bound = self._now + self._step + self._credit
        for owner, first in delayed.items():
            shift = min(lag, max(0.0, bound - self._rank(first)[1]))
            owner.finish_tag += shift
            for request in owner.prefills - owner.running:
                request.turn += shift
            owner.order = [(*r.rank, number, r) for *_, number, r in owner.order]
            heapify(owner.order)
            owner.lacks_space = not self._has_space(owner, first)  # there may be space now
        return True

    def _charge(self, name: str, tokens: float) -> None:
        """Advance the owner's finish tag by the virtual time of these tokens."""
        self._owners[name].finish_tag += tokens / self._shares.weight(name)

    def _add_prefill(self, owner: _Owner, request: Request) -> None:
        owner.prefills.add(request)
        heappush(owner.order, (*request.rank, next(self._numbers), request))
        if len(owner.order) > owner.max_entries:
            owner.order = [entry for entry in owner.order if self._is_prefill(owner, entry[-1])]
            heapify(owner.order)
            owner.max_entries = 2 * len(owner.order) + _SLACK

    def _is_prefill(self, owner: _Owner, request: Request) -> bool:
        """Return True if the prompt is not fully computed; forget a request that has ended."""
        if request in owner.prefills and request.finish_reason is not None:
            owner.prefills.discard(request)
            charged = self._admissions.pop(request, _NOT_ADMITTED).charged
            guess = self._guesses.pop(request, 0.0)
            name = self._name(request)
            if request.missed is None and name:  # the request never ran
                self._charge(name, -len(request.group.prompt_token_ids) - guess - charged)
        return request in owner.prefills

    # Methods of `Limit`

    def applies(self, request: Request) -> bool:
        return request in self._guesses

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return `stop` if the request may be computed now.

        If another owner goes first, or if a waiting request lacks space, return `start` for a
        running request and None for a waiting request.
        """
        owner = self._owners[self._name(request)]
        runs = request in owner.running
        if len(self._owners) == 1 or (runs and request not in owner.prefills):
            return stop
        if not runs and not self._has_space(owner, request):
            owner.lacks_space = True
            return None
        rank = self._rank(request)
        for other in self._owners.values():
            if other is owner:
                continue
            # The first prompt of another owner goes first if it has a lower rank and can be
            # computed now. It does not go first if it awaits a block that another request computes:
            # if `request` computes that block, the two would wait for each other.
            first = self._first(other)
            if first is None or self._rank(first) >= rank or first.awaits_writer:
                continue
            if first in other.running or (self._fits(first) and self._has_space(other, first)):
                return start if runs else None
        return stop

    def _rank(self, request: Request) -> tuple[int, float]:
        """Return the request's rank, with its position in virtual time instead of its turn.

        Cached tokens do not advance the position, because they were computed for other requests or
        before a preemption.
        """
        start = self._admissions.get(request, _NOT_ADMITTED).start
        computed = request.sequence.num_computed_tokens - start
        weight = self._shares.weight(self._name(request))
        return request.group.priority, request.turn + max(0, computed) / weight

    def _first(self, owner: _Owner) -> Request | None:
        """Return the owner's first request, by rank, whose prompt is not fully computed."""
        order = owner.order
        while order and not self._is_prefill(owner, order[0][-1]):
            heappop(order)
        return order[0][-1] if order else None

    def _fits(self, request: Request) -> bool:
        """Return True if a waiting request fits `max_num_seqs` and the free blocks and states.

        Other requests do not wait for a request that could not be admitted anyway. Window blocks
        must suffice for a window and the tokens of a step. The tokens of two blocks are added,
        since a step may begin and end within a block.
        """
        if len(self._manager.sequences) >= self._max_num_seqs:
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
        """Return True if a request leaves the reserve for other owners free.

        Blocks that running requests still need for their prompts and answers do not count as free.
        """
        if not owner.running:
            return True
        running = sum(len(other.running) for other in self._owners.values())
        if running >= self._unreserved_seqs:
            return False
        if self._pending_by_owner is None:
            pending = self._pending
            self._pending_by_owner = {
                name: sum(pending.get(r, 0) for r in other.running)
                for name, other in self._owners.items()
            }
        tokens = sum(self._pending_by_owner.values()) + self._expected_length(request)
        blocks = tokens // self._manager.block_size + running + 1
        oldest, size = self._computed - self._recent_tokens, self._manager.block_size
        pending_blocks = {
            name: -(-self._pending_by_owner[name] // size)
            for name, other in self._owners.items()
            if other is owner or other.last_served >= oldest
        }
        protected = self._manager.count_protected(self._name(request), pending_blocks)
        reserved = max(self._reserved_blocks, protected)
        return blocks + reserved <= self._manager.num_free_blocks

    def _expected_length(self, request: Request) -> int:
        """Return a request's expected length in tokens.

        Until its owner has a finished answer, assume that the answer has `max_tokens` tokens.
        """
        limit = request.group.params.max_tokens
        owner = self._owners[self._name(request)]
        answer_length = owner.expected
        if limit is not None:
            answer_length = min(answer_length, limit) if owner.answers else limit
        tokens, prompt = request.sequence.token_ids, request.group.prompt_token_ids
        return max(len(tokens), len(prompt) + int(answer_length))

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Correct the owner's finish tag, and advance `now`.

        At the first step after an admission, subtract the cached tokens; after a preemption, add
        the tokens that are computed again. While a request decodes, add the tokens of its answer
        that exceed the estimate.
        """
        name = self._name(request)
        owner = self._owners[name]
        self._computed += stop - start
        owner.last_served = self._computed
        if request not in owner.running:
            owner.lacks_space = False
            owner.running.add(request)
            # If a failed step rolled back the last admission, replace the charge for it.
            preemptions = request.num_preemptions
            cost = (len(request.sequence.token_ids) if preemptions else 0) - start
            last = self._admissions.get(request, _NOT_ADMITTED)
            is_repeated = last.num_preemptions == preemptions
            self._charge(name, cost - last.charged if is_repeated else cost)
            self._admissions[request] = _Admission(preemptions, cost, start)
        elif request not in owner.prefills:
            num_tokens = len(request.sampling.output_token_ids)  # a draft may have added several
            if (excess := num_tokens - self._guesses.get(request, num_tokens)) > 0:
                self._charge(name, excess)
                self._guesses[request] = num_tokens
        self._pending_by_owner = None
        self._pending[request] = self._expected_length(request) - stop
        first = self._first(owner) or request
        self._now = max(self._now, min(self._rank(first)[1], self._rank(request)[1]))
        if stop == len(request.sequence.token_ids):
            owner.prefills.discard(request)

    def leave(self, request: Request) -> None:
        """Queue a preempted request again, or forget a request that has ended."""
        name = self._name(request)
        owner = self._owners[name]
        self._pending.pop(request, None)
        self._pending_by_owner = None
        if request not in owner.running:
            return
        owner.running.discard(request)
        owner.prefills.discard(request)
        if request.finish_reason is None:
            self._add_prefill(owner, request)
            return
        self._admissions.pop(request, None)
        num_tokens = len(request.sampling.output_token_ids)
        owner.answers += 1
        owner.expected += (num_tokens - owner.expected) / min(owner.answers, 8)
        self._charge(name, num_tokens - self._guesses.pop(request, num_tokens))
