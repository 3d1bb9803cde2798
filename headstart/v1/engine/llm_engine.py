"""The names of `vllm.v1.engine.llm_engine`."""

from headstart.engine.vllm_api.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
