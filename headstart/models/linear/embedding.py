"""Token embeddings that share an int8 weight with the LM head."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.models.linear.base import WeightKind
from headstart.models.linear.int8 import Int8Linear, Int8Panels, Int8Weight, quantize_int8
from headstart.models.packed import PackedWeight

__all__ = ["Int8Embedding"]


class Int8Embedding(nn.Module):
    """Replaces an `nn.Embedding`; `dtype` is that of its rows."""

    kind: ClassVar[WeightKind] = "int8"
    has_own_bits = False
    """The weight was in these bits before it came here: nothing was rounded."""
    values: Tensor | None  # None where panels have them
    scales: Tensor

    def __init__(self, weight: Int8Weight, dtype: torch.dtype) -> None:
        super().__init__()
        values, scales = weight
        self.num_embeddings, self.embedding_dim = values.shape
        panels = values if isinstance(values, Int8Panels) else None
        plain = None if isinstance(values, Int8Panels) else values
        self._packed: PackedWeight | Int8Panels | None = panels
        self.register_buffer("values", plain, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self._dtype = dtype

    @property
    def weight(self) -> Int8Weight:
        """The table; a copy of it if the head has packed it for rows in bfloat16."""
        packed = self._packed
        values = packed.unpack() if isinstance(packed, PackedWeight) else packed or self.values
        assert values is not None
        return Int8Weight(values, self.scales)

    def share(self, head: Int8Linear) -> None:
        """Read rows where the head, whose weight it is, has packed it: there is no second copy."""
        self._packed = head.packed or head.panels
        if self._packed is not None:
            self.values = None

    def unpack(self) -> Tensor:
        """The table that rows are read from, float32 `[count, width]`."""
        return self.weight.unpack()

    def is_of(self, weight: Tensor) -> bool:
        """True if the table is what quantising `weight` gives."""
        if weight.shape != (self.num_embeddings, self.embedding_dim):
            return False
        return torch.equal(quantize_int8(weight).unpack(), self.unpack())

    def forward(self, numbers: Tensor) -> Tensor:
        if self._packed is not None:
            values = self._packed.rows(numbers)
        else:
            assert self.values is not None
            values = self.values[numbers]
        return (values * self.scales[numbers].unsqueeze(-1)).to(self._dtype)
