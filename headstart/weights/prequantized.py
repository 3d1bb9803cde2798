"""Checkpoints whose weights are already quantized: AWQ, GPTQ, compressed-tensors, torchao.

The integers of a weight lie in their tensors like this:

    AWQ                 qweight int32 [inputs, outputs / 8]: the fields of a word are the outputs
                        0 2 4 6 1 3 5 7 of eight; qzeros alike [groups, outputs / 8]
    GPTQ                qweight int32 [inputs / fields, outputs], qzeros [groups, outputs / fields],
                        the lowest field first; g_idx [inputs]: the group of each input
    compressed-tensors  weight_packed int32 [outputs, inputs / fields], weight_zero_point
                        [outputs / fields, groups], of signed values plus half their range; or
                        weight int8 [outputs, inputs] as it is
    torchao             _weight_qdata int8 [outputs, inputs], _weight_zero_point int8
                        [outputs / rows, groups]: neighboring outputs may share a step

Scales are `[groups, outputs]` in the first two, `[outputs, groups]` in the third, and in torchao as
zero points are.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headstart.errors import DamagedModelError
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.format import WeightKind
from headstart.weights.grouped import GROUP, Form, Grid, GroupedValues, pack_groups
from headstart.weights.int8 import Int8Values
from headstart.weights.layout import NAMES, Module, check_pickle, find_described, find_modules
from headstart.weights.quantize import StoredValues
from headstart.weights.scheme import Scheme

__all__ = ["Grouped", "Parts", "PrequantizedCheckpoint", "read_grouped"]

Parts = Callable[[str], Tensor | None]
"""The tensor of a module with this suffix, None if it has none."""

_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word, in the order of the outputs


class Grouped(NamedTuple):
    """weight[o, i] = steps[o, g] * (values[o, i] - zeros[o, g]), where g is the group of input i.

    values uint8 `[outputs, inputs]`; steps and zeros float32 `[outputs, groups]`; groups int64
    `[inputs]`.
    """

    values: Tensor
    steps: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def weight(self) -> Tensor:
        """The weight in float32."""
        return (self.values - self.zeros[:, self.groups]).mul_(self.steps[:, self.groups])

    def split(self, outputs: Sequence[int]) -> list["Grouped"]:
        """The weights of so many outputs each."""
        sizes = list(outputs)
        values, steps, zeros = (
            torch.split(part, sizes) for part in (self.values, self.steps, self.zeros)
        )
        return [
            self._replace(values=one, steps=step, zeros=zero)
            for one, step, zero in zip(values, steps, zeros, strict=True)
        ]

    def describe(self) -> str:
        """Its bits and groups, whether it has zero points, and whether inputs are out of order."""
        size = int(torch.bincount(self.groups).max())
        zeros = "" if (self.zeros == 1 << (self.bits - 1)).all() else " with zero points"
        order = "" if (self.groups.diff() >= 0).all() else ", and its inputs are out of order"
        return f"values have {self.bits} bits in groups of {size}{zeros}{order}"

    def in_groups(self) -> GroupedValues | None:
        """The weight, value for value; None if its bits or its groups are other than ours.

        Steps are float16 in units of a power of two for each output, in which its largest is near
        2048, or 256 of 8 bits: so starts are within float16, to which they are rounded, and no step
        that is float16 changes unless the largest is 2**24 or 2**21 times as large.
        """
        inputs = len(self.groups)
        padded = nn.functional.pad(self.groups, (0, -inputs % GROUP), value=-1).view(-1, GROUP)
        first = padded[:, :1]
        if self.bits not in _ROOM or not ((padded == first) | (padded < 0)).all():
            return None
        steps, zeros = self.steps[:, first.squeeze(1)], self.zeros[:, first.squeeze(1)]
        units = torch.frexp(steps.abs().amax(dim=1, keepdim=True).clamp_min_(_TINY))[1]
        units = torch.ldexp(torch.ones_like(units, dtype=torch.float32), units - _ROOM[self.bits])
        steps = steps / units
        values = nn.functional.pad(self.values, (0, -inputs % GROUP))
        form = Form(8 if self.bits == 8 else 4, in_bytes=False)
        grid = Grid(values, steps, (form.zero - zeros) * steps)
        return pack_groups(grid, form, units.squeeze(1), inputs=inputs)

    def as_int8(self) -> Int8Values | None:
        """The weight, value for value.

        None if it has other bits, several steps for an output, or a zero point.
        """
        if self.bits != 8 or self.steps.shape[1] != 1 or not (self.zeros == _MIDDLE).all():
            return None
        values = (self.values ^ _MIDDLE).view(torch.int8)
        return Int8Values(values, self.steps.squeeze(1))


_TINY = 1e-30
_ROOM = {4: 11, 8: 8}  # of bits: starts are at most 16 or 128 times 2**room, float16 ends at 2**16
_MIDDLE = 128


def read_grouped(scheme: Scheme, module: Module, parts: Parts) -> Grouped:
    """The weight of a module."""
    if scheme.method == "gptq":
        return _read_gptq(module, parts, scheme.zeros_less)
    read = {"awq": _read_awq, "compressed-tensors": _read_compressed, "torchao": _read_torchao}
    return read[scheme.method](module, parts)


def _read_awq(module: Module, parts: Parts) -> Grouped:
    values, zeros = (_in_order(_fields(_need(parts, n), 4)) for n in ("qweight", "qzeros"))
    steps = _need(parts, "scales").float()
    return _grouped(module, values.T, steps.T, zeros.T.float())


def _read_gptq(module: Module, parts: Parts, zeros_less: int) -> Grouped:
    outputs, bits = module.shape[0], module.bits
    values = _fields(_need(parts, "qweight").T, bits)
    zeros = _fields(_add_to_fields(_need(parts, "qzeros"), zeros_less, bits), bits)[:, :outputs]
    steps = _need(parts, "scales").float()
    return _grouped(module, values, steps.T, zeros.T.float(), parts("g_idx"))


def _read_compressed(module: Module, parts: Parts) -> Grouped:
    outputs, inputs = module.shape
    steps = _need(parts, "weight_scale").float()
    words, zeros = parts("weight_packed"), parts("weight_zero_point")
    if words is None:
        values = _need(parts, "weight").view(torch.uint8) ^ _MIDDLE
    else:
        values = _fields(words, module.bits)[:, :inputs]
    middle = 1 << (module.bits - 1)
    if zeros is None:
        zeros = torch.full_like(steps, middle)
    elif words is None:
        zeros = zeros.float() + middle
    else:
        zeros = _fields(zeros.T, module.bits)[:, :outputs].T.float()
    groups = parts("weight_g_idx")
    if groups is not None and (groups == -1).all():  # what older versions wrote for groups in order
        groups = None
    return _grouped(module, values, steps, zeros, groups)


def _read_torchao(module: Module, parts: Parts) -> Grouped:
    middle, values = 1 << (module.bits - 1), _need(parts, "_weight_qdata")
    steps, zeros = _need(parts, "_weight_scale").float(), parts("_weight_zero_point")
    zeros = torch.zeros_like(steps) if zeros is None else zeros.float()
    rows = len(values) // len(steps)
    return _grouped(
        module,
        # In bytes -128 is 128: the sum needs no more of them.
        values.view(torch.uint8) + middle,
        steps.repeat_interleave(rows, dim=0),
        zeros.repeat_interleave(rows, dim=0) + middle,
    )


def _grouped(
    module: Module, values: Tensor, steps: Tensor, zeros: Tensor, groups: Tensor | None = None
) -> Grouped:
    if groups is None:
        groups = torch.arange(values.shape[1]) // module.group
    assert values.shape == module.shape and steps.shape == zeros.shape
    return Grouped(
        values.contiguous(), steps.contiguous(), zeros.contiguous(), groups.long(), module.bits
    )


def _add_to_fields(words: Tensor, added: int, bits: int) -> Tensor:
    """Words of fields to each of which so much was added, with carry, as GPTQ's own code does it.

    It took 1 from whole words: a zero point of 0 borrowed from the next.
    """
    ones = sum(1 << at for at in range(0, 32, bits))
    sums = (words.long() + added * ones).contiguous()
    return sums.view(torch.int32)[..., ::2]  # the lower halves


def _fields(words: Tensor, bits: int) -> Tensor:
    """The values in int32 words, the lowest bits of a word first: uint8 `[..., values]`."""
    # `contiguous` leaves a side of one element with any stride, which no view takes.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _in_order(fields: Tensor) -> Tensor:
    """The fields of AWQ's words in the order of the outputs."""
    eights = fields.view(len(fields), -1, 8)
    return eights.index_select(2, torch.tensor(_AWQ_FIELDS)).flatten(1)


def _need(parts: Parts, name: str) -> Tensor:
    found = parts(name)
    assert found is not None, "a checkpoint is checked before it is read"
    return found


_log = logging.getLogger(__name__)
_MOST = 512.0  # that a value's distance from its zero point may be, twice


class PrequantizedCheckpoint(SafetensorsCheckpoint):
    """Safetensors files in which packed tensors stand for the weight of a module.

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
        """Every tensor's shape, and that of every quantized weight."""
        plain = {n: shape for n, shape in super().shapes.items() if n not in self._parts}
        return plain | {name: module.shape for name, module in self._modules.items()}

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """The dtypes of these tensors, of a quantized weight that of its scales."""
        scales = NAMES[self._scheme.method].scales
        return super().dtypes(
            f"{name.removesuffix('weight')}{scales}" if name in self._modules else name
            for name in names
        )

    def tensor(self, name: str) -> Tensor:
        """The tensor; a quantized weight in float32, in memory of its own."""
        return self._read(name).weight() if name in self._modules else super().tensor(name)

    def kind(self, name: str) -> WeightKind | None:
        """Return the kind for bits that no format has; None for a float."""
        return "int8" if name in self._modules else None

    def packed(self, name: str) -> StoredValues | None:
        """The weight in its own bits; None if no kind of ours holds it."""
        read = self._read(name)
        packed = read.as_int8() or read.in_groups()
        if packed is None:
            _log.info("%s is rounded again, to int8: its %s", name, read.describe())
        return packed

    def log(self, tied: bool) -> None:
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
