"""The names of `vllm.inputs`: prompts as dicts, and their types."""

from headstart.frontend.prompt_types import PromptType, TextPrompt, TokensPrompt
from headstart.vllm_imports import find_names

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

__getattr__ = find_names(__name__, __all__)
