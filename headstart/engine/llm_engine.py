"""The names of `vllm.engine.llm_engine`."""

from headstart.frontend.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
