"""The names of `vllm.lora.request`."""

from headstart.engine.adapters.request import LoRARequest

__all__ = ["LoRARequest"]
