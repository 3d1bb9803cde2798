"""The names of `vllm.outputs`."""

from headstart.engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
