"""Counterpart of `vllm.sequence`, for programs written for vLLM."""

from headstart.engine.outputs import Logprob

__all__ = ["Logprob"]
