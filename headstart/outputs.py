"""The names of `vllm.outputs` and `vllm.logprobs`."""

from headstart.engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
