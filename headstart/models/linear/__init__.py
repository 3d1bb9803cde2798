"""Linear layers whose weights are kept in 8, 5 or 4 bits."""

from headstart.models.linear.base import REVISIONS, QuantizedLinear, WeightKind, find_kind
from headstart.models.linear.embedding import Int8Embedding
from headstart.models.linear.make import make_linear

__all__ = [
    "REVISIONS",
    "Int8Embedding",
    "QuantizedLinear",
    "WeightKind",
    "find_kind",
    "make_linear",
]
