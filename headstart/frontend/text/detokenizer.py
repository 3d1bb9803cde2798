"""Token ids to text, one at a time, never half a character.

The text of a token depends on its neighbours: a character may be spread over several tokens, and
many decoders drop a leading space at the beginning. So each step decodes a short window twice,
with and without the new tokens, and emits the difference once it ends in a whole character. The
first window begins in the prompt, later ones one emission back; their length does not grow with
the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet
# Tokens of a prompt; more if they show nothing or begin in a character.
_CONTEXT_SIZES = (5, 20, 80)


class TokenTexts:
    """The texts of single tokens inside a text, each decoded once. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # An ordinary token to stand before each: at the beginning a space could be dropped.
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def __call__(self, token_id: int) -> str:
        """Return a token's text; U+FFFD stands for bytes that are a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            anchor = _decode(self._tokenizer, self._anchor, skip_special_tokens=False)
            anchored = _decode(
                self._tokenizer, [*self._anchor, token_id], skip_special_tokens=False
            )
            text = self._texts[token_id] = anchored[len(anchor) :]
        return text


class Detokenizer:
    """One answer's text, which continues that of its prompt. Empty without a tokenizer.

    The results of `push` and `finish` together are the text that the tokenizer decodes from the
    prompt and all ids, behind the prompt's own text. The exception: bytes that are no text, from a
    tokenizer with byte fallback. It replaces a whole run of bytes for a wrong one, of which some
    may be out by then.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = self._find_context(prompt_token_ids)
        self._window = 0  # index of the first token that is decoded again
        self._emitted = len(self._token_ids)  # number of tokens whose text is out
        # A window cannot begin where the emitted text ends within a character, as a prompt may.
        self._is_whole = not self._decode(self._token_ids).endswith(REPLACEMENT)

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
        text = self._decode(self._token_ids[self._window :])
        if not text.startswith(known):  # the new tokens complete the prompt's last character
            known = known.rstrip(REPLACEMENT)
        return text[len(known) :]

    def _find_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, enough for the text of what follows."""
        context: list[int] = []
        for size in _CONTEXT_SIZES if self._tokenizer is not None else ():
            context = list(prompt_token_ids[-size:])
            text = self._decode(context)
            if (text and not text.startswith(REPLACEMENT)) or size >= len(prompt_token_ids):
                break
        return context

    def _emit(self, text: str) -> str:
        if text:
            if self._is_whole:
                self._window = self._emitted
            self._is_whole = True
            self._emitted = len(self._token_ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None or not token_ids:
            return ""
        return _decode(self._tokenizer, token_ids, self._skip_special_tokens)


def _decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool
) -> str:
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text
