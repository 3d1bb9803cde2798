"""Counterpart of `vllm.engine.arg_utils`, for programs written for vLLM."""

from headstart.frontend.vllm_compat import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
