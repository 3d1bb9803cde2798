"""The names of `vllm.sampling_params`."""

from headstart.engine.params import RequestOutputKind, SamplingParams, SamplingType
from headstart.frontend.beam_search import BeamSearchParams
from headstart.frontend.structured.params import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
