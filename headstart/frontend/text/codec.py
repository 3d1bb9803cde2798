"""Texts and token ids, back and forth, for prompts that are put together from pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.errors import PromptTooLongError, RequestError
from headstart.imports import load_module
from headstart.validation import describe, shorten

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["Spelling", "encode_text", "too_many_tokens"]

_LONG = 1 << 16  # characters


def too_many_tokens(count: int, max_model_len: int) -> PromptTooLongError:
    """The error of a prompt that is too long."""
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
    """The ids of a text by a tokenizer. Raises RequestError for what the tokenizer refuses.

    max_model_len: refuse a long text of as many tokens before they are made Python's.

    A long text is encoded without what transformers asks for beside the ids: a mask and places in
    the text. Making and dropping those of a million tokens stops every thread for 0.1 s.
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
    """A tokenizer's way of spelling; `tokenizer` is None for a model without one.

    max_model_len: refuse texts of as many tokens, where that saves work. A subclass may know texts
    and ids that stand for something else than they say.
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
        """The ids of a text whose special tokens the template has spelled."""
        return encode_text(
            self.tokenizer, text, add_special_tokens=False, max_model_len=self._max_model_len
        )

    def tokenize_anchored(self, text: str) -> list[list[int]]:
        """The ids of a text that does not stand at the beginning; empty if there is no telling.

        At the beginning some tokenizers put a space that they put nowhere else. After a special
        token, with which nothing can merge, they do not.
        """
        for token_id in self.tokenizer.all_special_ids[:1]:
            anchored = self.tokenize(self.spell([token_id]) + text)
            if anchored[:1] == [token_id]:
                return [anchored[1:]]
        return []

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def show(self, text: str) -> str:
        """The result of `spell` for the token ids of a prompt's text."""
        return text

    def quote(self, text: str) -> str:
        """How a text that the model wrote stands in a text that a prompt is made from."""
        return text
