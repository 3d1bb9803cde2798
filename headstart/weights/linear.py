"""Linear layers whose weights are kept in 8, 5 or 4 bits."""

from headstart.weights.base import (
    OWN_BITS_REVISION,
    REVISIONS,
    QuantizedLinear,
    WeightKind,
    find_kind,
)
from headstart.weights.embedding import QuantizedEmbedding
from headstart.weights.make import kind_of_layer, make_linear

__all__ = [
    "OWN_BITS_REVISION",
    "REVISIONS",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "WeightKind",
    "find_kind",
    "kind_of_layer",
    "make_linear",
]
