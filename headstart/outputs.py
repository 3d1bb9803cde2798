"""The names of `vllm.outputs` and `vllm.logprobs`."""

from headstart.engine.outputs import CompletionOutput, Logprob, RequestOutput
from headstart.vllm_imports import find_names

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]

__getattr__ = find_names(__name__, __all__)
