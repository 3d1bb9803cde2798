"""A quantised weight as checkpoints keep it, and how its integers lie in their tensors.

    AWQ                 qweight int32 [inputs, outputs / 8]: the fields of a word are the outputs
                        0 2 4 6 1 3 5 7 of eight; qzeros alike [groups, outputs / 8]
    GPTQ                qweight int32 [inputs / fields, outputs], qzeros [groups, outputs / fields],
                        the lowest field first; g_idx [inputs]: the group of each input
    compressed-tensors  weight_packed int32 [outputs, inputs / fields], weight_zero_point
                        [outputs / fields, groups], of signed values plus half their range; or
                        weight int8 [outputs, inputs] as it is
    torchao             _weight_qdata int8 [outputs, inputs], _weight_zero_point int8
                        [outputs / rows, groups]: neighbouring outputs may share a step

Scales are `[groups, outputs]` in the first two, `[outputs, groups]` in the third, and in torchao as
zero points are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headstart.weights.grouped import GROUP, Form, Grid, GroupedWeight, pack_groups
from headstart.weights.int8 import Int8Weight
from headstart.weights.prequantized_layout import Module
from headstart.weights.scheme import Scheme

__all__ = ["Grouped", "Parts", "read_grouped"]

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

    def in_groups(self) -> GroupedWeight | None:
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
        packed = pack_groups(Grid(values, steps, (form.zero - zeros) * steps), form)
        return packed._replace(scales=units.squeeze(1), inputs=inputs)

    def as_int8(self) -> Int8Weight | None:
        """The weight, value for value.

        None if it has other bits, several steps for an output, or a zero point.
        """
        if self.bits != 8 or self.steps.shape[1] != 1 or not (self.zeros == _MIDDLE).all():
            return None
        values = (self.values ^ _MIDDLE).view(torch.int8)
        return Int8Weight(values, self.steps.squeeze(1))


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
