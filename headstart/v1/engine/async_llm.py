"""The names of `vllm.v1.engine.async_llm`."""

from headstart.frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
