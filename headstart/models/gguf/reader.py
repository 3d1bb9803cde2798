"""Reads a GGUF file's weights in their own bits, or in the nearest of ours."""

from torch import nn

from headstart.models.dense.quantized import QuantizedReader
from headstart.models.dense.weights import FloatReader
from headstart.models.gguf.checkpoint import GGUFCheckpoint
from headstart.models.linear import make_linear
from headstart.models.linear.int4 import Int4Linear, Int5Linear

__all__ = ["GGUFReader"]


class GGUFReader(QuantizedReader):
    """Every linear layer of the kind that the file's tensor is nearest to."""

    def __init__(self, checkpoint: GGUFCheckpoint, floats: FloatReader, tied: bool) -> None:
        quantised = checkpoint.kind("model.embed_tokens.weight") is not None
        super().__init__(floats, "int8", tied and quantised)
        self._checkpoint = checkpoint
        checkpoint.tell()

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        kind = self._checkpoint.kind(f"{name}.weight")
        if kind is None:
            return self._floats.linear(name, inputs, outputs, bias)
        own = self._floats.tensor(f"{name}.bias") if bias else None
        packed = self._checkpoint.packed(f"{name}.weight")
        if packed is not None:
            return (Int5Linear if packed.form.bits == 5 else Int4Linear)(packed, own)
        return make_linear(self._floats.tensor(f"{name}.weight"), own, kind)

    def head(self, embedding: nn.Module | None, name: str, outputs: int, inputs: int) -> nn.Module:
        if isinstance(embedding, nn.Embedding) or (
            embedding is None and self._checkpoint.kind(f"{name}.weight") is None
        ):
            return self._floats.head(embedding, name, outputs, inputs)
        return super().head(embedding, name, outputs, inputs)
