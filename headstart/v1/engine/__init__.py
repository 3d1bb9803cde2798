"""vLLM's names of modules."""

from headstart.vllm_imports import find_names

__getattr__ = find_names(__name__, [])
