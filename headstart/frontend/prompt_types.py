"""Prompts as dicts: vLLM's types of them, for type checkers and to be made like dicts."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class _PromptOptions(TypedDict):
    """multi_modal_data: `{"image": one or a list}`. multi_modal_uuids: names of those images.
    cache_salt: prompts of different salts share no K/V."""

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    cache_salt: NotRequired[str | None]


class TextPrompt(_PromptOptions):
    """A text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids, and the text that they came from."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
"""What `LLM.generate` takes one or many of."""
