"""The names of `vllm.engine.arg_utils`."""

from headstart.frontend.vllm_compat import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
