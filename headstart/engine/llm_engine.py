"""The names of `vllm.engine.llm_engine`."""

from headstart.frontend.llm import LLMEngine

__all__ = ["LLMEngine"]
