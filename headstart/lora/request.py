"""Counterpart of `vllm.lora.request`, for programs written for vLLM."""

from headstart.engine.adapter_names import LoRARequest

__all__ = ["LoRARequest"]
