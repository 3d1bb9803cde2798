"""Counterpart of `vllm.sampling_params`, for programs written for vLLM."""

from headstart.engine.params import RequestOutputKind, SamplingParams, SamplingType
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.frontend.beam_search import BeamSearchParams

__all__ = [
    "BeamSearchParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
