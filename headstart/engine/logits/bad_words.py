"""Words that an answer may not have: a token that would complete one is banned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headstart.engine.logits.protocol import Failures, Rows, TokenMask
from headstart.errors import RequestError
from headstart.frontend.text.codec import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BadWords", "spell_words"]

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


def spell_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Word]:
    """The token ids of each word, and of it after a space where that begins with another token.

    Raises RequestError.
    """
    if tokenizer is None:
        raise RequestError("the model came without a tokenizer: bad_words cannot be spelled")
    spelled: dict[Word, None] = {}
    for word in words:
        plain, spaced = (
            tuple(encode_text(tokenizer, text, add_special_tokens=False))
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not plain:
            raise RequestError(f"bad_words has {word!r}, which has no tokens")
        spelled[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spelled[spaced] = None
    return list(spelled)
