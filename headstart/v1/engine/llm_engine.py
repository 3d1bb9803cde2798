"""The names of `vllm.v1.engine.llm_engine`."""

from headstart.frontend.vllm_api.llm_engine import LLMEngine
from headstart.vllm_imports import find_names

__all__ = ["LLMEngine"]

__getattr__ = find_names(__name__, __all__)
