"""What is known of a model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["Vocabulary"]


class Vocabulary(NamedTuple):
    """The tokens of a model: how they spell text (None if unknown), how many, which end a text.

    `size` is the width of the logits, which may be more than the tokenizer has.
    """

    tokenizer: PreTrainedTokenizerBase | None
    size: int
    eos_token_ids: frozenset[int]
