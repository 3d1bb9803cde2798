"""Counterpart of `vllm.inputs`, for programs written for vLLM."""

from headstart.frontend.vllm_compat import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
