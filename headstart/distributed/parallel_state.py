"""The names of `vllm.distributed.parallel_state`."""

from headstart.distributed import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]
