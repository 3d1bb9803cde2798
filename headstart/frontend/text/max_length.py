"""A bound on the length of a text, checked before the text is tokenised.

A text of n UTF-8 bytes has at least n / (bytes of the longest token) tokens, if every byte of it
ends up in a token. A tokenizer may lose some: NFKC makes one byte of up to four, white space may
be stripped or collapsed, unknown words may become one token. So the bound is four times as wide
for a tokenizer that does not give a difficult text back as it was. A text beyond that bound is
refused even if its tokenizer would make few tokens of it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.errors import PromptTooLongError, RequestError
from headstart.frontend.text.codec import encode_text
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import check_utf8

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextLimit", "check_text_fits"]

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
