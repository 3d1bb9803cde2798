"""Counterpart of `vllm.entrypoints.llm`, for programs written for vLLM."""

from headstart.frontend.llm import LLM

__all__ = ["LLM"]
