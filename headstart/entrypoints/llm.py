"""The names of `vllm.entrypoints.llm`."""

from headstart.frontend.llm import LLM

__all__ = ["LLM"]
