"""The names of `vllm.v1.engine.async_llm`."""

from headstart.frontend.async_llm import AsyncLLM
from headstart.vllm_imports import find_names

__all__ = ["AsyncLLM"]

__getattr__ = find_names(__name__, __all__)
