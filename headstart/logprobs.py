"""Counterpart of `vllm.logprobs`, for programs written for vLLM."""

from headstart.engine.outputs import Logprob

__all__ = ["Logprob"]
