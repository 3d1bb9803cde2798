"""The names of `vllm.inputs`: prompts as dicts, and their types."""

from headstart.engine.prompt_types import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
