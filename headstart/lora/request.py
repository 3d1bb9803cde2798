"""The names of `vllm.lora.request`."""

from headstart.engine.adapters.request import LoRARequest
from headstart.vllm_imports import find_names

__all__ = ["LoRARequest"]

__getattr__ = find_names(__name__, __all__)
