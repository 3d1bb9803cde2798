"""The names of `vllm.v1.engine.llm_engine`."""

from headstart.frontend.llm import LLMEngine

__all__ = ["LLMEngine"]
