"""The names of `vllm.inputs`."""

from headstart.frontend.vllm_compat import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
