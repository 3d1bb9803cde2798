"""Counterpart of `vllm.v1.engine.async_llm`, for programs written for vLLM."""

from headstart.frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
