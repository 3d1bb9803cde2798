"""Conversion of texts to token ids and back, with a bound on the length of a text.

A text of n UTF-8 bytes has at least n / (bytes of the longest token) tokens, if every byte of it
ends up in a token. A tokenizer may lose some: NFKC makes one byte of up to four, white space may
be stripped or collapsed, unknown words may become one token. So the bound is four times as wide
for a tokenizer that does not give a difficult text back as it was. A text beyond that bound is
refused even if its tokenizer would make few tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.errors import PromptTooLongError, RequestError
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import check_utf8, describe, shorten

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["Spelling", "TextLimit", "check_text_fits", "encode_text", "too_many_tokens"]

_LONG = 1 << 16  # characters


def too_many_tokens(count: int, max_model_len: int) -> PromptTooLongError:
    """Make the error for a prompt that is too long."""
    return PromptTooLongError(
        f"the prompt has {count} tokens; with room for one more it may have "
        f"{max_model_len - 1} at the most (max_model_len {max_model_len})",
        max_model_len,
    )


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    add_special_tokens: bool = True,
    max_model_len: int | None = None,
) -> list[int]:
    """Return the token ids of a text. Raises RequestError if the tokenizer refuses it.

    max_model_len: refuse a long text of as many tokens before they are made Python's.

    A long text is encoded without the mask and the offsets that transformers computes: for a
    million tokens these stop every thread for 0.1 s.
    """
    try:
        backend: Tokenizer | None = None
        if len(text) > _LONG:
            backend = load_module("headstart.models.auto_tokenizer").plain_backend(tokenizer)
        if backend is not None:
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            if max_model_len is not None and len(encoding) >= max_model_len:
                raise too_many_tokens(len(encoding), max_model_len)
            ids: list[int] = encoding.ids
            return ids
        token_ids: list[int] = tokenizer.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
    except RequestError:
        raise
    # A vocabulary without a token for unknown words has tokenizers raise a bare Exception.
    except Exception as error:
        raise RequestError(
            f"the tokenizer refuses {describe(text)}: {type(error).__name__}: {shorten(str(error))}"
        ) from error
    return token_ids


class Spelling:
    """Pieces of prompts to ids and back; `tokenizer` is None for a model without one.

    max_model_len: refuse texts of as many tokens, where that saves work. A subclass may have texts
    and ids that stand for something else, such as an image.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises RequestError if there is none."""
        if self._tokenizer is None:
            raise RequestError("the model came without a tokenizer, so it cannot chat")
        return self._tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text in which the template has written the special tokens."""
        return encode_text(
            self.tokenizer, text, add_special_tokens=False, max_model_len=self._max_model_len
        )

    def tokenize_anchored(self, text: str) -> list[list[int]]:
        """Return the ids of a text in the middle of a prompt; empty if they are unknown.

        At the beginning some tokenizers put a space that they put nowhere else. After a special
        token, with which nothing can merge, they do not.
        """
        for token_id in self.tokenizer.all_special_ids[:1]:
            anchored = self.tokenize(self.spell([token_id]) + text)
            if anchored[:1] == [token_id]:
                return [anchored[1:]]
        return []

    def spell(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def show(self, text: str) -> str:
        """Return the result of `spell` for the ids of a prompt's text."""
        return text

    def quote(self, text: str) -> str:
        """Return a text of the model in the form that prompts are made from."""
        return text


_LEAST_LONGEST = 16
"""Bytes that the longest token is taken to have at least: texts below this need no vocabulary."""

_SHRINK = 4

# Runs of white space, a digit in a circle, a decomposed letter, a ligature, an emoji.
_DIFFICULT = "  a \n\n\t b \u2460 e\u0301 \ufb01 \u2126 \U0001f642 end"


class TextLimit:
    """Refuses texts that cannot fit `max_model_len` tokens. May be used from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        """Tokens of the longest sequence."""

    def check(self, what: str, text: str) -> None:
        """Refuse a text that is too long or has a lone surrogate. Raises RequestError.

        Costs one pass over the text; the vocabulary is looked at once, for the first long text.
        """
        size = check_utf8(what, text)
        if size <= self.max_model_len * _LEAST_LONGEST:
            return
        if size > self.max_bytes:
            raise PromptTooLongError(
                f"{what} has {size:,} bytes of text; allowed: {self.max_bytes:,} at most "
                f"(max_model_len {self.max_model_len})",
                self.max_model_len,
            )

    def check_messages(self, count: int) -> None:
        """Refuse a conversation of more messages than tokens. Raises RequestError."""
        if count > self.max_model_len:
            raise RequestError(
                f"the conversation has {count:,} messages; allowed: {self.max_model_len:,} at "
                "most (max_model_len)"
            )

    @cached_property
    def max_bytes(self) -> int:
        """The longest text in UTF-8 bytes that may fit."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return self.max_model_len * _LEAST_LONGEST
        longest = max(len(token.encode("utf-8", "replace")) for token in tokenizer.get_vocab())
        factor = 1 if _is_lossless(tokenizer) else _SHRINK
        return self.max_model_len * max(longest, _LEAST_LONGEST) * factor


def check_text_fits(folder: Path, text: str, limit: int) -> None:
    """Raise RequestError for a text of as many tokens as a context holds, or more. Or ModelError.

    For what is to be known before the model in the folder is loaded; limit: tokens of the context.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        return
    TextLimit(tokenizer, limit).check("the prompt", text)
    count = len(encode_text(tokenizer, text, add_special_tokens=False))
    if count >= limit:
        raise RequestError(
            f"the prompt has {count:,} tokens with its files; the context holds {limit:,}, and an "
            "answer needs one at least"
        )


def _is_lossless(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a difficult text comes back whole and no added token absorbs white space."""
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return False
    try:
        token_ids = encode_text(tokenizer, _DIFFICULT, add_special_tokens=False)
    except RequestError:
        return False
    text = tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return bool(text == _DIFFICULT)
