"""The names of `vllm.sequence`."""

from headstart.engine.outputs import Logprob

__all__ = ["Logprob"]
