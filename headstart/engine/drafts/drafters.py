"""Sources of a request's drafts, and the measured acceptance of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headstart.cache import KVCacheManager, TokenSequence
from headstart.tiers.worker import Job

_BORDER = -1  # between the tokens of two requests
_REPEATED = 2  # number of latest tokens whose earlier occurrence is looked up
_EXPECTED = 3  # number of latest tokens that are searched for in an expected answer
_DECAY = 0.8  # each compared token reduces the weight of earlier tokens by this factor


class Drafter(Protocol):
    """Proposes tokens that may follow a request's tokens. Each request has its own drafters."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the sequence's tokens, possibly none."""


class TreeDrafter:
    """Drafter of the tokens after the same prefix in an earlier request of the tenant."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens of the tree of cached prefixes, possibly none."""
        return self._manager.draft(sequence, count)


class RepetitionDrafter:
    """Drafter of the tokens after the last occurrence of the latest two tokens.

    The two tokens are looked up in the tokens of another request (`earlier`) and in the request's
    own tokens. While the request's new tokens equal the tokens after the occurrence, drafts
    continue there without another lookup. If a new token differs, such as a replaced word in a
    copy, the latest two tokens are looked up again. If these have not occurred before, drafts
    continue after the token that differs. Each new token takes constant time.
    """

    def __init__(self, earlier: Sequence[int] = ()) -> None:
        # The position after the last occurrence of two tokens, by these tokens.
        self._next: dict[tuple[int, ...], int] = {}
        self._tokens = [*earlier, _BORDER]
        self._start = len(self._tokens)
        self._num_read = _REPEATED - 1
        self._position: int | None = None  # of the token that probably comes next
        self._may_skip = False  # if the next token differs, drafts may continue after it

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the sequence's tokens, possibly none."""
        tokens = self._tokens
        new = sequence.token_ids[len(tokens) - self._start :]
        tokens += new
        for end in range(self._num_read + 1, len(tokens)):
            self._next[tuple(tokens[end - _REPEATED : end])] = end
        self._num_read = max(self._num_read, len(tokens) - 1)
        position = self._position = self._find(new)
        if position is None:
            return []
        period = len(tokens) - position
        drafted = [tokens[position + i % period] for i in range(count)]
        return drafted[: drafted.index(_BORDER)] if _BORDER in drafted else drafted

    def _find(self, new: list[int]) -> int | None:
        """Return the position of tokens that may follow the new tokens; None if there are none."""
        tokens, position = self._tokens, self._position
        end = position + len(new) if position is not None else 0
        if position is not None and tokens[position:end] == new:
            self._may_skip = True
            return end
        match = self._next.get(tuple(tokens[-_REPEATED:]))
        skips = match is None and self._may_skip and tokens[position : end - 1] == new[:-1]
        self._may_skip = match is not None
        return end if skips else match


class AnswerDrafter:
    """Drafter of the tokens of an expected answer, in their order.

    Where the answer differs, drafts stop until its latest three tokens occur in the expected
    answer, and then continue after this occurrence. The expected answer is searched from the
    current position on, then from its beginning.
    """

    def __init__(self, expected: Sequence[int], num_prompt_tokens: int) -> None:
        """Draft the tokens in `expected`, after `num_prompt_tokens` tokens of the sequence.

        expected: may be empty at first. Another thread may then add all tokens in one operation.
        """
        self._expected = expected
        self._text = ""  # the expected tokens as characters, see `_as_text`
        self._num_read = num_prompt_tokens
        self._latest = ""  # the latest tokens of the answer as characters
        self._position = 0  # of the next token in the expected answer
        self._follows = True  # True if the answer continues at this position

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the sequence's tokens, possibly none."""
        self._text = self._text or _as_text(self._expected)
        if not self._text:
            return []
        new = _as_text(sequence.token_ids[self._num_read :])
        self._num_read += len(new)
        self._latest = (self._latest + new)[-_EXPECTED:]
        if self._follows and self._text.startswith(new, self._position):
            self._position += len(new)
        else:
            self._follows = self._search()
        if not self._follows:
            return []
        return [ord(token) for token in self._text[self._position : self._position + count]]

    def _search(self) -> bool:
        """Move to the position after the answer's latest tokens; return False without a match."""
        if len(self._latest) < _EXPECTED:
            return False
        start = self._text.find(self._latest, self._position)
        if start < 0:
            start = self._text.find(self._latest)
        if start >= 0:
            self._position = start + _EXPECTED
        return start >= 0


def _as_text(token_ids: Sequence[int]) -> str:
    """Return the tokens as characters of a string, because `str.find` is fast."""
    return "".join(map(chr, token_ids))


@dataclass(eq=False, kw_only=True)
class StoredReply(Job):
    """A job that looks up a prompt's reply in the tiers, where an earlier process stored it.

    identity: bytes that identify the prompt. tokens: the reply; empty until it is found.
    """

    identity: bytes
    tokens: list[int] = field(default_factory=list)


class DraftSource:
    """A drafter of one request, with the probability that its next token is right.

    To measure the probability, proposed tokens are compared with the tokens that the request gets
    later, even if no step verifies the draft. So a drafter whose drafts are not verified any more,
    because too many were wrong, is used again when its proposals become right.

    prior: the probability that is expected at first. acceptance: the measured probability; the
    prior counts as one token, and earlier tokens count less. num_compared: number of compared
    tokens.
    """

    def __init__(self, drafter: Drafter, prior: float) -> None:
        self.drafter = drafter
        self.acceptance = self.prior = prior
        self.num_compared = self._num_right = 0
        self._right = self._all = 0.0
        self._proposed: Sequence[int] = ()
        self._position = 0

    @property
    def overall_acceptance(self) -> float:
        """The measured probability, with the same weight for all tokens of the request."""
        return (self._num_right + self.prior) / (self.num_compared + 1)

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow, after measuring the previous draft."""
        self.measure(sequence)
        self._position = len(sequence.token_ids)
        self._proposed = self.drafter.propose(sequence, count)
        return self._proposed

    def measure(self, sequence: TokenSequence) -> None:
        """Compare the latest draft with the sequence's tokens. Call once for each draft."""
        new = sequence.token_ids[self._position : self._position + len(self._proposed)]
        for expected, token in zip(self._proposed, new, strict=False):
            self._right = _DECAY * self._right + (expected == token)
            self._all = _DECAY * self._all + 1
            self.num_compared += 1
            self._num_right += expected == token
            if expected != token:
                break
        self.acceptance = (self._right + self.prior) / (self._all + 1)
