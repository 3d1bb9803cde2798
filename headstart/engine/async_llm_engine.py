"""Counterpart of `vllm.engine.async_llm_engine`, for programs written for vLLM."""

from headstart.frontend.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
