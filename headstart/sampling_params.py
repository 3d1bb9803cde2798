"""The names of `vllm.sampling_params`."""

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
