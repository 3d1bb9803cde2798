"""The tensors of a checkpoint with quantised weights, as a model of floats would have them."""

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.weights.grouped import GroupedWeight
from headstart.weights.int8 import Int8Weight
from headstart.weights.linear import WeightKind
from headstart.weights.prequantized_layout import NAMES, find_modules
from headstart.weights.prequantized_values import Grouped, read_grouped
from headstart.weights.reader import Checkpoint
from headstart.weights.scheme import Scheme
from headstart.weights.torchao import check_pickle, find_described

__all__ = ["PrequantizedCheckpoint"]

_log = logging.getLogger(__name__)
_MOST = 512.0  # that a value's distance from its zero point may be, twice


class PrequantizedCheckpoint(Checkpoint):
    """As `Checkpoint`; the packed tensors of a module stand for its weight.

    Raises `DamagedModelError` for tensors that do not fit together, `UnsupportedLayerError` for a
    layout that is not read here, and `UnsupportedModelError` for torchao's pickles.
    """

    def __init__(self, files: Sequence[Path], scheme: Scheme) -> None:
        described = scheme.method == "torchao"
        if described:
            check_pickle(files)
        super().__init__(files)
        self._folder = folder = files[0].parent
        self._scheme = scheme
        if described:
            self._modules = find_described(folder, scheme, self.entries, self.metadata)
        else:
            self._modules = find_modules(folder, scheme, self.entries, super().tensor)

    @cached_property
    def _parts(self) -> frozenset[str]:
        return frozenset(part for module in self._modules.values() for part in module.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, and that of every quantised weight."""
        plain = {n: shape for n, shape in super().shapes.items() if n not in self._parts}
        return plain | {name: module.shape for name, module in self._modules.items()}

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """The dtypes of these tensors, of a quantised weight that of its scales."""
        scales = NAMES[self._scheme.method].scales
        return super().dtypes(
            f"{name.removesuffix('weight')}{scales}" if name in self._modules else name
            for name in names
        )

    def tensor(self, name: str) -> Tensor:
        """The tensor; a quantised weight in float32, in memory of its own."""
        return self._read(name).weight() if name in self._modules else super().tensor(name)

    def kind(self, name: str) -> WeightKind | None:
        """What a weight becomes that is not kept in its own bits; None for a float."""
        return "int8" if name in self._modules else None

    def packed(self, name: str) -> GroupedWeight | Int8Weight | None:
        """The weight in its own bits; None if no kind of ours holds it."""
        read = self._read(name)
        packed = read.as_int8() or read.in_groups()
        if packed is None:
            _log.info("%s is rounded again, to int8: its %s", name, read.describe())
        return packed

    def tell(self, tied: bool) -> None:
        """Log in one line what is read."""
        bits = sorted({module.bits for module in self._modules.values()})
        _log.info(
            "%d weights of the %s checkpoint have %s bits",
            len(self._modules),
            self._scheme.method,
            " or ".join(map(str, bits)) or "no",
        )

    def _read(self, name: str) -> Grouped:
        module, prefix = self._modules[name], name.removesuffix("weight")
        held = {part: super(PrequantizedCheckpoint, self).tensor(part) for part in module.parts}
        read = read_grouped(self._scheme, module, lambda part: held.get(f"{prefix}{part}"))
        if not torch.isfinite(read.steps * _MOST).all():
            raise DamagedModelError(f"{name} in {self._folder} has scales that are not finite")
        if (most := int(read.values.max())) >> read.bits:
            raise DamagedModelError(
                f"{name} in {self._folder} has a value that is {most} above its smallest possible, "
                f"and {read.bits} bits"
            )
        low, high = (int(end) for end in torch.aminmax(read.zeros))
        if low < 0 or high >> read.bits:
            middle = 1 << (read.bits - 1)
            raise DamagedModelError(
                f"{name} in {self._folder} has zero points from {low - middle} to {high - middle}; "
                f"those of {read.bits} bits are {-middle} to {middle - 1}"
            )
        low, high = (int(end) for end in torch.aminmax(read.groups))
        if low < 0 or high >= read.steps.shape[1]:
            raise DamagedModelError(
                f"{name} in {self._folder} has inputs of the groups {low} to {high}, of "
                f"{read.steps.shape[1]} groups"
            )
        return read
