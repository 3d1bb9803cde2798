"""Words that an answer may not have: a token that would complete one is banned."""

from collections.abc import Sequence

import numpy as np

from headstart.engine.logits.protocol import Failures, Rows, TokenMask

__all__ = ["BadWords", "Word"]

Word = tuple[int, ...]


class BadWords(TokenMask):
    """Bans the last token of each word whose other tokens the answer ends with.

    As in vLLM a word is known by how the tokenizer spells it, at the beginning of a text and after
    a space; other tokens may still spell the same letters. Words are found by the token before
    their last, so a step looks only at those that the answer's last token leads to.
    """

    rank = 2

    def __init__(self, words: Sequence[Word]) -> None:
        self._past: list[int] = []
        self._longest = max(map(len, words)) - 1
        self._always = [word[-1] for word in words if len(word) == 1]
        self._after: dict[int, list[Word]] = {}
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are banned now."""
        banned = list(self._always)
        for word in self._after.get(self._past[-1], ()) if self._past else ():
            before = len(word) - 1
            if tuple(self._past[-before:]) == word[:-1]:
                banned.append(word[-1])
        return banned

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Clear the bits of each row's tokens."""
        for row, one in rows:
            for token_id in one.token_ids:
                allowed[row, token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return {}

    def accept(self, token_id: int) -> None:
        """Remember as many tokens as the longest word needs."""
        self._past.append(token_id)
        del self._past[: -self._longest or len(self._past)]
