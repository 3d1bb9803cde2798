"""The names of `vllm.lora`."""

from headstart.vllm_imports import find_names

__getattr__ = find_names(__name__, [])
