"""Counterpart of `vllm.engine.llm_engine`, for programs written for vLLM."""

from headstart.frontend.llm import LLMEngine

__all__ = ["LLMEngine"]
