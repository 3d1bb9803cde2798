"""The names of `vllm.lora.request`."""

from headstart.engine.adapter_names import LoRARequest

__all__ = ["LoRARequest"]
