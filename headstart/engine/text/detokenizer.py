"""Token ids to text, one at a time, never half a character.

The text of a token depends on its neighbours: a character may be spread over several tokens, and
a leading space may be dropped at the beginning. So each step decodes a short window twice, with
and without the new tokens, and emits the difference once it ends in a whole character. The
window begins one emission back; its length does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet


class TokenTexts:
    """The texts of single tokens, each decoded once. May be used from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """A token's text alone; U+FFFD stands for bytes that are a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            decoded = self._tokenizer.decode(
                [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            assert isinstance(decoded, str)
            text = self._texts[token_id] = decoded
        return text


class Detokenizer:
    """One answer's text. Without a tokenizer every text is empty.

    What `push` and `finish` return, put together, is what the tokenizer decodes of all ids. The
    exception: bytes that are no text, from a tokenizer with byte fallback. It spoils a whole run
    of bytes for one bad one, of which some may be out by then.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._window = 0  # index of the first token that is decoded again
        self._emitted = 0  # number of tokens whose text is out

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; "" while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._pending()
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The rest, after these tokens; an incomplete character becomes U+FFFD."""
        self._token_ids += token_ids
        return self._emit(self._pending())

    def _pending(self) -> str:
        """Text of the tokens that are not out yet."""
        known = self._decode(self._token_ids[self._window : self._emitted])
        return self._decode(self._token_ids[self._window :])[len(known) :]

    def _emit(self, text: str) -> str:
        if text:
            self._window, self._emitted = self._emitted, len(self._token_ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None or not token_ids:
            return ""
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text
