"""Drafts from a request's own tokens, and the length of its drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.cache import TokenSequence
from headstart.tiers import Job

MAX_DRAFT = 16  # tokens
_FIRST = 4  # tokens of a request's first draft
_MAX_PAUSE = 64  # steps
_BORDER = -1  # between the tokens of two requests


class RepetitionDrafter:
    """Drafts of what followed the latest three tokens when they last occurred.

    They are searched in the request's own tokens, and before those in `earlier`, tokens of another
    request. Costs constant time for each new token.
    """

    def __init__(self, earlier: Sequence[int] = ()) -> None:
        self._next: dict[tuple[int, int, int], int] = {}  # the position after three tokens
        self._tokens = [*earlier, _BORDER]
        self._start = len(self._tokens)
        self._num_read = 2

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return `count` tokens that may follow the sequence's tokens; empty for none."""
        tokens = self._tokens
        tokens += sequence.token_ids[len(tokens) - self._start :]
        for position in range(self._num_read, len(tokens) - 1):
            self._next[tokens[position - 2], tokens[position - 1], tokens[position]] = position + 1
        self._num_read = max(self._num_read, len(tokens) - 1)
        last = tokens[-3:]
        start = self._next.get((last[0], last[1], last[2])) if len(last) == 3 else None
        if start is None:
            return []
        period = len(tokens) - start
        drafted = [tokens[start + i % period] for i in range(count)]
        return drafted[: drafted.index(_BORDER)] if _BORDER in drafted else drafted


@dataclass(eq=False, kw_only=True)
class StoredReply(Job):
    """The reply to a prompt that tiers have from an earlier process; the job looks it up.

    identity: of the prompt. tokens: empty until the tiers have answered, or if they have none.
    """

    identity: bytes
    tokens: list[int] = field(default_factory=list)

    def propose(self, output: list[int], count: int) -> list[int]:
        """Return the next `count` tokens if the reply begins with `output`."""
        length = len(output)
        return self.tokens[length : length + count] if self.tokens[:length] == output else []


class DraftLength:
    """The length of a request's next draft, by how many tokens of earlier ones were accepted.

    repetition: the drafter over the request's tokens, and `earlier` ones of another request.
    """

    def __init__(self, earlier: Sequence[int] = ()) -> None:
        self.tokens = _FIRST
        self.repetition = RepetitionDrafter(earlier)
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
