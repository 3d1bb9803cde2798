"""The names of `vllm.engine.arg_utils`."""

from headstart.frontend.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
