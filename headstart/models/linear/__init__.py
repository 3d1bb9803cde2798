"""Linear layers whose weights are kept in 8, 5 or 4 bits."""

from headstart.models.linear.base import (
    OWN_BITS_REVISION,
    REVISIONS,
    QuantizedLinear,
    WeightKind,
    find_kind,
)
from headstart.models.linear.embedding import QuantizedEmbedding
from headstart.models.linear.make import kind_of_layer, make_linear

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
