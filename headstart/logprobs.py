"""The names of `vllm.logprobs`."""

from headstart.engine.outputs import Logprob

__all__ = ["Logprob"]
