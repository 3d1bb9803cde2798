"""vLLM's names of modules: a program that imports from `vllm.v1` finds them here."""

from headstart.vllm_imports import find_names

__getattr__ = find_names(__name__, [])
