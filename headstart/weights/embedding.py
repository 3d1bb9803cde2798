"""Token embeddings that share a quantised weight with the LM head."""

import torch
from torch import Tensor, nn

from headstart.weights.base import QuantizedLinear

__all__ = ["QuantizedEmbedding"]


class QuantizedEmbedding(nn.Module):
    """Reads rows of the LM head's weight, in place of an `nn.Embedding`; `dtype` is theirs.

    There is one copy of the weight, and it is the head's.
    """

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: as a child, it would have a second name in the model
        self._dtype = dtype
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features

    @property
    def head(self) -> QuantizedLinear:
        """The layer whose weight it is."""
        return self._head[0]

    def unpack(self) -> Tensor:
        """The table that rows are read from, float32 `[count, width]`."""
        return self.head.unpack()

    def is_of(self, weight: Tensor) -> bool:
        """True if the table is `weight`, in its dtype, or what quantising it gives."""
        return self.head.is_of(weight)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head.rows(numbers).to(self._dtype)
