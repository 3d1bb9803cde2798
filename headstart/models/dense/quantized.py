"""Reads a checkpoint's linear layers into 8, 5 or 4 bits."""

from torch import Tensor, nn

from headstart.models.dense.weights import FloatReader
from headstart.models.linear import Int8Embedding, WeightKind, make_linear
from headstart.models.linear.int8 import Int8Linear, Int8Weight, quantize_int8

__all__ = ["QuantizedReader"]


class QuantizedReader:
    """Linear layers of a kind, and all else as a float reader makes it.

    The LM head is int8 whatever the kind, and so is an embedding that shares its weight.
    """

    def __init__(self, floats: FloatReader, kind: WeightKind, tied: bool) -> None:
        self._floats, self._kind, self._tied = floats, kind, tied

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        own = self._floats.tensor(f"{name}.bias") if bias else None
        return make_linear(self._floats.tensor(f"{name}.weight"), own, self._kind)

    def vector(self, name: str, width: int) -> Tensor:
        return self._floats.vector(name, width)

    def embedding(self, name: str, count: int, width: int) -> nn.Module:
        if not self._tied:
            return self._floats.embedding(name, count, width)
        weight = quantize_int8(self._floats.tensor(f"{name}.weight"))
        return Int8Embedding(weight, self._floats.dtype)

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if isinstance(embedding, Int8Embedding):
            return Int8Linear(Int8Weight(embedding.values, embedding.scales))
        return make_linear(self._floats.tensor(f"{name}.weight"), None, "int8")

    def release(self) -> None:
        self._floats.release()
