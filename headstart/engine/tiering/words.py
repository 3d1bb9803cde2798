"""The text that is kept with blocks, so that people recognise their prompts; where they asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headstart.engine.config import EngineConfig
from headstart.frontend.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Spell", "make_spell"]

_MOST = 80  # characters of a block

Spell = Callable[[Sequence[int]], str]
"""The text of some tokens from anywhere in a prompt. Raises nothing."""


def make_spell(tokenizer: PreTrainedTokenizerBase | None, config: EngineConfig) -> Spell | None:
    """A function from a model's tokens to their text; None if no text is to be kept."""
    if tokenizer is None or not config.cache_words:
        return None

    def spell(token_ids: Sequence[int]) -> str:
        part = Detokenizer(tokenizer)
        try:
            part.push(token_ids[0])  # or the first word would lose the space before it
            return part.finish(token_ids)[:_MOST]
        except Exception:  # whatever a tokenizer raises: no step fails for its sake
            return ""

    return spell
