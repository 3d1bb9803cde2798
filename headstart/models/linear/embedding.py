"""Token embeddings that share an int8 weight with the LM head."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.models.linear.base import WeightKind
from headstart.models.linear.int8 import Int8Weight

__all__ = ["Int8Embedding"]


class Int8Embedding(nn.Module):
    """Replaces an `nn.Embedding`; `dtype` is that of its rows."""

    kind: ClassVar[WeightKind] = "int8"
    has_own_bits = False
    """The weight was in these bits before it came here: nothing was rounded."""
    values: Tensor
    scales: Tensor

    def __init__(self, weight: Int8Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.values.shape
        self.register_buffer("values", weight.values, persistent=False)
        self.register_buffer("scales", weight.scales, persistent=False)
        self._dtype = dtype

    def forward(self, numbers: Tensor) -> Tensor:
        rows = self.values[numbers] * self.scales[numbers].unsqueeze(-1)
        return rows.to(self._dtype)
