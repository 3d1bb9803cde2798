"""Drafts: tokens that probably follow, which one step verifies together.

Decoding is limited by memory: a step reads all weights, for one row or for several. A drafted token
is accepted if the sampler chooses it from the logits before it. So the answer, its distribution and
the random numbers of each token are the same with and without drafts.

Two drafters are tried in turn: the tree of cached prefixes, which has what followed the same tokens
in an earlier request of the tenant, and the request's own tokens, which may have what followed the
latest three before. A request's drafts become longer while they are accepted, and rarer while they
are not.
"""

from collections.abc import Sequence
from typing import Protocol

from headstart.cache import KVCacheManager, TokenSequence
from headstart.engine.request import Request

MAX_DRAFT = 16  # tokens
_FIRST = 4  # tokens of a request's first draft
_MAX_PAUSE = 64  # steps
_ROWS = 32  # rows of all decoding requests together that cost little more than one each


class Drafter(Protocol):
    """A source of drafts."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the sequence's tokens; empty for none."""
        ...


class TreeDrafter:
    """Drafts from the cache: what followed these tokens in another request of the tenant."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        return self._manager.draft(sequence, count)


class RepetitionDrafter:
    """Drafts from one request's own tokens: what followed the latest three when they last occurred.

    Costs constant time for each new token.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int, int], int] = {}  # the position after three tokens
        self._num_read = 2

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        tokens = sequence.token_ids
        for position in range(self._num_read, len(tokens) - 1):
            self._next[tokens[position - 2], tokens[position - 1], tokens[position]] = position + 1
        self._num_read = max(self._num_read, len(tokens) - 1)
        if len(tokens) < 4:
            return []
        start = self._next.get((tokens[-3], tokens[-2], tokens[-1]))
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(count)]


class DraftLength:
    """The length of a request's next draft, by how many tokens of earlier ones were accepted."""

    def __init__(self) -> None:
        self.tokens = _FIRST
        self.repetition = RepetitionDrafter()
        self._pause = 0
        self._failures = 0

    def next(self) -> int:
        """Return the tokens of the next draft; 0 in a pause."""
        if self._pause:
            self._pause -= 1
            return 0
        return self.tokens

    def verified(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were accepted."""
        if accepted == drafted:
            self.tokens = min(2 * self.tokens, MAX_DRAFT)
        else:
            self.tokens = max(1, (self.tokens + accepted) // 2)
        self._failures = 0 if accepted else self._failures + 1
        if self._failures:
            self._pause = min(2**self._failures, _MAX_PAUSE)


class Drafting:
    """The drafts of an engine's requests.

    num_drafted and num_accepted: tokens of all requests.
    """

    def __init__(self, manager: KVCacheManager, max_tokens: int, max_model_len: int) -> None:
        self.num_drafted = self.num_accepted = 0
        self._tree = TreeDrafter(manager)
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len

    def propose(self, request: Request, budget: int, num_running: int) -> tuple[int, ...]:
        """Return the draft of a request that decodes; `budget` is the step's room in tokens."""
        if request.drafts is None:
            request.drafts = DraftLength()
        sequence, params = request.sequence, request.group.params
        room = self._max_model_len - len(sequence.token_ids)
        if params.max_tokens is not None:  # the last token needs no K/V
            room = min(room, params.max_tokens - len(request.sampling.output_token_ids) - 1)
        room = min(room, budget, self._max_tokens, _ROWS // num_running - 1)
        if room <= 0:
            return ()
        count = min(room, request.drafts.next())
        if not count:
            return ()
        tokens = self._tree.propose(sequence, count)
        return tuple(tokens or request.drafts.repetition.propose(sequence, count))

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Note how many tokens of a request's draft were accepted."""
        assert request.drafts is not None
        request.drafts.verified(drafted, accepted)
        request.num_drafted += drafted
        request.num_accepted += accepted
        self.num_drafted += drafted
        self.num_accepted += accepted
