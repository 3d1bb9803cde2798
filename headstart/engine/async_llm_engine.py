"""The names of `vllm.engine.async_llm_engine`."""

from headstart.frontend.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
