"""Counterpart of `vllm.outputs`, for programs written for vLLM."""

from headstart.engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
