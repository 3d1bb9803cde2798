"""The names of `vllm.entrypoints`."""

from headstart.frontend.llm import LLM

__all__ = ["LLM"]
