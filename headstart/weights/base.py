"""What all linear layers with quantised weights share."""

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from headstart.errors import ConfigError
from headstart.weights.float_weight import FloatWeight
from headstart.weights.packed import PackedWeight

__all__ = [
    "OWN_BITS_REVISION",
    "REVISIONS",
    "QuantizedLinear",
    "WeightKind",
    "find_kind",
    "scratch",
    "tile_outputs",
]

WeightKind = Literal["int8", "int5", "int4"]
"""How the weights of linear layers are kept, if not as the checkpoint has them."""


def find_kind(name: str) -> WeightKind | None:
    """The kind of this name, None for "auto": the checkpoint's own; raises `ConfigError`."""
    kinds: tuple[WeightKind, ...] = get_args(WeightKind)
    if name != "auto" and name not in kinds:
        raise ConfigError(f"weights is {name!r}; it may be auto, {', '.join(kinds)}")
    return next((kind for kind in kinds if kind == name), None)


REVISIONS: dict[WeightKind, int] = {"int8": 6, "int5": 3, "int4": 4}
"""How a kind rounds weights and rows: another number where that changes, and so do K and V."""

OWN_BITS_REVISION = 4
"""How weights are read that are in a kind's bits before: as above."""


_TILE = 1 << 21  # elements: 8 MiB, which stay in a core's caches between writing and multiplying
_WHOLE = 32  # outputs: with a number that is no multiple, MKL's product takes a quarter longer


def tile_outputs(inputs: int) -> int:
    """How many outputs of a weight are made float32 at a time for a product of many rows."""
    outputs = max(1, _TILE // max(1, inputs))
    return outputs if outputs < _WHOLE else outputs // _WHOLE * _WHOLE


class QuantizedLinear(nn.Module, ABC):
    """Replaces an `nn.Linear`; it has no parameter `weight`.

    Rows are multiplied in float32, or in what a kind's own product takes, and come back in the
    dtype in which they came. A row that is not finite gives a row that is not finite.
    """

    kind: ClassVar[WeightKind]
    rounding: ClassVar[float]
    """The unit in the last place of a row as it is multiplied, as a part of its largest element."""
    is_prequantized = False
    """The weight was in these bits before it came here: nothing was rounded."""
    scales: Tensor
    bias: Tensor | None
    packed: PackedWeight | None = None
    """The weight and the bias, where the compiled kernels multiply rows in bfloat16 by them."""
    float_weight: FloatWeight | None = None
    """The same, where they multiply rows in float32."""

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        self.register_buffer("bias", bias, persistent=False)

    @classmethod
    @abstractmethod
    def quantize(
        cls, weight: Tensor, bias: Tensor | None, rows: torch.dtype = torch.float32
    ) -> "QuantizedLinear":
        """A layer for a floating-point `[outputs, inputs]` and a bias `[outputs]` or None.

        rows: the dtype in which most rows come.
        """

    @abstractmethod
    def unpack(self) -> Tensor:
        """The weight that the layer multiplies by, float32 `[outputs, inputs]`."""

    @abstractmethod
    def rows(self, numbers: Tensor) -> Tensor:
        """Outputs of the weight by number, integers of any shape: float32 `[..., inputs]`.

        Raises `IndexError` for one that the weight does not have.
        """

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """Rows float32 `[rows, inputs]`, at least one, times the weight: `[rows, outputs]`.

        Only for layers that have neither a `packed` nor a `float_weight`.
        """

    def is_of(self, weight: Tensor) -> bool:
        """True if the layer's weight is `weight`, in its dtype, or what quantising it gives."""
        if weight.shape != (self.out_features, self.in_features):
            return False
        own = self.unpack()
        return torch.equal(own.to(weight.dtype), weight) or torch.equal(
            self.quantize(weight, None).unpack(), own
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` times the weight, plus the bias: `[..., outputs]` in x's dtype."""
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.out_features))
        if self.packed is not None:
            return self.packed.multiply(x.to(torch.bfloat16)).to(x.dtype)
        rows = x.reshape(-1, self.in_features).float()
        if self.float_weight is not None:
            out = self.float_weight.multiply(rows)
        else:
            out = self.multiply(rows)
            if self.bias is not None:
                out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


_local = threading.local()


def scratch(size: int, device: torch.device) -> Tensor:
    """Memory of this thread for `size` float32 values, until the next call.

    Kept, since fresh memory costs a page fault for every 4 KiB: as much as dequantising into it.
    """
    kept: dict[torch.device, Tensor] = _local.__dict__.setdefault("kept", {})
    if device not in kept or len(kept[device]) < size:
        with torch.inference_mode(False):  # for uses outside it, too
            kept[device] = torch.empty(size, dtype=torch.float32, device=device)
    return kept[device][:size]
