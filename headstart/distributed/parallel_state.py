"""Counterpart of `vllm.distributed.parallel_state`, for programs written for vLLM."""

from headstart.distributed import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]
