"""Counterpart of `vllm.distributed`, for programs written for vLLM."""

import gc
import sys
from importlib import import_module

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, release the device memory that torch caches, and stop Ray if `shutdown_ray`.

    The memory of an `LLM` is freed by `close()`, or when the program no longer refers to it.
    """
    if shutdown_ray:
        import_module("ray").shutdown()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
