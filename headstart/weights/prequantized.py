"""Checkpoints whose weights are already quantized: AWQ, GPTQ, compressed-tensors, torchao.

The layouts of a weight's integers. A field is an integer of 4 or 8 bits within an int32 word:

    AWQ                 qweight int32 [inputs, outputs / 8]: the fields of a word are the outputs
                        0 2 4 6 1 3 5 7 of eight; qzeros [groups, outputs / 8] has the same order
    GPTQ                qweight int32 [inputs / fields, outputs], qzeros [groups, outputs / fields],
                        the lowest field first; g_idx [inputs]: the group of each input
    compressed-tensors  weight_packed int32 [outputs, inputs / fields] and weight_zero_point
                        [outputs / fields, groups]: a field is a signed value plus half of the
                        range. Or, not packed, weight int8 [outputs, inputs]
    torchao             _weight_qdata int8 [outputs, inputs], _weight_zero_point int8
                        [outputs / rows, groups]: `rows` neighboring outputs share a step

Scales are `[groups, outputs]` for AWQ and GPTQ, `[outputs, groups]` for compressed-tensors, and
`[outputs / rows, groups]` for torchao.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.format import WeightKind
from headstart.weights.grouped import (
    GROUP,
    GroupedValues,
    PackedForm,
    QuantizationGrid,
    pack_groups,
)
from headstart.weights.int8 import Int8Values
from headstart.weights.layout import (
    NAMES,
    QuantizedWeight,
    find_torchao_weights,
    find_weights,
)
from headstart.weights.quantize import StoredValues
from headstart.weights.scheme import Scheme

_log = logging.getLogger(__name__)
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # fields of a word, in the order of the outputs
_TINY = 1e-30
# Exponents by bits. A step divided by its output's unit (see `in_groups`) is below 2**exponent. A
# start is at most 16 steps with 4 bits, or 128 steps with 8 bits, so float16 can store it.
_STEP_EXPONENTS = {4: 11, 8: 8}
_MIDDLE = 128
_MARGIN = 512.0  # more than twice the largest distance of a value from its zero point, 255


class Grouped(NamedTuple):
    """A weight whose values have a step and a zero point for each group of inputs.

        weight[o, i] = steps[o, groups[i]] * (values[o, i] - zeros[o, groups[i]])

    values: uint8 `[outputs, inputs]`. steps, zeros: float32 `[outputs, groups]`. groups: int64
    `[inputs]`, the group of each input.
    """

    values: Tensor
    steps: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def weight(self) -> Tensor:
        """Return the weight in float32."""
        return (self.values - self.zeros[:, self.groups]).mul_(self.steps[:, self.groups])

    def split(self, outputs: Sequence[int]) -> list["Grouped"]:
        """Split the weight into weights with these numbers of outputs."""
        parts = (torch.split(part, list(outputs)) for part in self[:3])
        return [
            self._replace(values=values, steps=steps, zeros=zeros)
            for values, steps, zeros in zip(*parts, strict=True)
        ]

    def describe(self) -> str:
        """Return a description of the bits, groups, zero points and order of inputs."""
        size = int(torch.bincount(self.groups).max())
        zeros = "" if (self.zeros == 1 << (self.bits - 1)).all() else " with zero points"
        order = "" if (self.groups.diff() >= 0).all() else ", and its inputs are out of order"
        return f"values have {self.bits} bits in groups of {size}{zeros}{order}"

    def in_groups(self) -> GroupedValues | None:
        """Return the weight with the same values; None if its bits or groups are not supported.

        Each output has a unit, a power of two. Steps and starts are divided by it and rounded to
        float16. The unit brings the output's largest step into the range 1024 to 2048 (128 to 256
        with 8 bits), so that float16 can store the starts. A step that was float16 stays exact
        unless the largest step is more than 2**24 times as large (2**21 with 8 bits).
        """
        inputs = len(self.groups)
        padded = nn.functional.pad(self.groups, (0, -inputs % GROUP), value=-1).view(-1, GROUP)
        first = padded[:, :1]
        if self.bits not in _STEP_EXPONENTS or not ((padded == first) | (padded < 0)).all():
            return None
        steps, zeros = self.steps[:, first.squeeze(1)], self.zeros[:, first.squeeze(1)]
        units = torch.frexp(steps.abs().amax(dim=1, keepdim=True).clamp_min_(_TINY))[1]
        units = torch.ldexp(
            torch.ones_like(units, dtype=torch.float32), units - _STEP_EXPONENTS[self.bits]
        )
        steps = steps / units
        values = nn.functional.pad(self.values, (0, -inputs % GROUP))
        form = PackedForm(8 if self.bits == 8 else 4, in_bytes=False)
        grid = QuantizationGrid(values, steps, (form.zero - zeros) * steps)
        return pack_groups(grid, form, units.squeeze(1), inputs=inputs)

    def as_int8(self) -> Int8Values | None:
        """Return the weight with the same values, if int8 can store it.

        int8 needs 8 bits, one step for each output, and no zero points.
        """
        if self.bits != 8 or self.steps.shape[1] != 1 or not (self.zeros == _MIDDLE).all():
            return None
        values = (self.values ^ _MIDDLE).view(torch.int8)
        return Int8Values(values, self.steps.squeeze(1))


def read_grouped(scheme: Scheme, weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> Grouped:
    """Return a weight. parts: its tensors, by the last part of their names."""
    values, steps, zeros = _READERS[scheme.method](scheme, weight, parts)
    if zeros is None:
        zeros = torch.full_like(steps, 1 << (weight.bits - 1))
    groups = parts.get(NAMES[scheme.method].group_index)
    is_compressed = scheme.method == "compressed-tensors"
    if groups is None or (is_compressed and (groups == -1).all()):  # old versions write -1
        groups = torch.arange(weight.shape[1]) // weight.group
    assert values.shape == weight.shape and steps.shape == zeros.shape
    values, steps, zeros = (part.contiguous() for part in (values, steps.float(), zeros.float()))
    return Grouped(values, steps, zeros, groups.long(), weight.bits)


_Read = tuple[Tensor, Tensor, Tensor | None]
"""Values, steps and zero points, each `[outputs, ...]`.

Zero points are None if all are in the middle of the range.
"""


def _read_awq(scheme: Scheme, weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> _Read:
    order = torch.tensor(_AWQ_FIELDS)
    values, zeros = (
        _fields(words, 4).view(len(words), -1, 8).index_select(2, order).flatten(1).T
        for words in (parts["qweight"], parts["qzeros"])
    )
    return values, parts["scales"].T, zeros


def _read_gptq(scheme: Scheme, weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> _Read:
    bits, outputs = weight.bits, weight.shape[0]
    # GPTQ subtracts 1 from all fields of a word at once, so a zero point of 0 borrows from the next
    # field. Adding to whole words reverses this.
    ones = sum(1 << shift for shift in range(0, 32, bits))
    sums = (parts["qzeros"].long() + scheme.zero_offset * ones).contiguous()
    lower_halves = sums.view(torch.int32)[..., ::2]
    zeros = _fields(lower_halves, bits)[:, :outputs].T
    return _fields(parts["qweight"].T, bits), parts["scales"].T, zeros


def _read_compressed_tensors(
    scheme: Scheme, weight: QuantizedWeight, parts: Mapping[str, Tensor]
) -> _Read:
    zeros, (outputs, inputs) = parts.get("weight_zero_point"), weight.shape
    if "weight_packed" in parts:
        values = _fields(parts["weight_packed"], weight.bits)[:, :inputs]
        zeros = _fields(zeros.T, weight.bits)[:, :outputs].T if zeros is not None else None
    else:
        values = parts["weight"].view(torch.uint8) ^ _MIDDLE
        zeros = zeros.float() + (1 << (weight.bits - 1)) if zeros is not None else None
    return values, parts["weight_scale"], zeros


def _read_torchao(scheme: Scheme, weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> _Read:
    steps, zeros = parts["_weight_scale"], parts.get("_weight_zero_point")
    middle = 1 << (weight.bits - 1)
    values = parts["_weight_qdata"].view(torch.uint8) + middle  # wraps around
    rows = weight.shape[0] // len(steps)
    if zeros is not None:
        zeros = zeros.float().repeat_interleave(rows, dim=0) + middle
    return values, steps.repeat_interleave(rows, dim=0), zeros


_READERS: dict[str, Callable[[Scheme, QuantizedWeight, Mapping[str, Tensor]], _Read]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "torchao": _read_torchao,
}


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of int32 words, lowest bits first, as uint8 `[..., values]`."""
    # Not `contiguous`: it allows any stride for a dimension of size 1, and `view` does not.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


class PrequantizedCheckpoint(SafetensorsCheckpoint):
    """Safetensors files with quantized weights, each stored as several tensors.

    Raises `DamagedModelError` for tensors that do not fit together, `UnsupportedLayerError` for an
    unsupported layout, and `UnsupportedModelError` for torchao's pickles.
    """

    def __init__(self, files: Sequence[Path], scheme: Scheme) -> None:
        is_torchao = scheme.method == "torchao"
        if is_torchao and (pickles := [file for file in files if file.suffix != ".safetensors"]):
            raise UnsupportedModelError(
                f"{pickles[0]} is a pickle of torchao's tensors, which is not supported: load the "
                "model with the torchao version that wrote it, and call save_pretrained of "
                "transformers 5 or later, or quantize the model again"
            )
        super().__init__(files)
        self._folder = folder = files[0].parent
        self._scheme = scheme
        if is_torchao:
            self._weights = find_torchao_weights(folder, self.entries, self.metadata)
        else:
            self._weights = find_weights(folder, scheme, self.entries, super().tensor)
        self._parts = {part for weight in self._weights.values() for part in weight.parts.values()}

    def rename(self, names: Mapping[str, str]) -> None:
        # Tensors that store quantized weights keep their names: `QuantizedWeight.parts` has them.
        super().rename({name: new for name, new in names.items() if name not in self._parts})
        self._weights = {names.get(name, name): weight for name, weight in self._weights.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all float tensors and quantized weights."""
        plain = {n: shape for n, shape in super().shapes.items() if n not in self._parts}
        return plain | {name: weight.shape for name, weight in self._weights.items()}

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """Return the dtypes of these tensors; for a quantized weight, the dtype of its scales."""
        scales = NAMES[self._scheme.method].scales
        return super().dtypes(
            self._weights[name].parts[scales] if name in self._weights else name for name in names
        )

    def tensor(self, name: str) -> Tensor:
        """Return the tensor; a quantized weight in float32, in separate memory."""
        return self._read(name).weight() if name in self._weights else super().tensor(name)

    def kind(self, name: str) -> WeightKind | None:
        """Return int8 for a quantized weight, None for a float."""
        return "int8" if name in self._weights else None

    def packed(self, name: str) -> StoredValues | None:
        """Return a quantized weight with unchanged values; None if no format supports it."""
        weight = self._read(name)
        packed = weight.as_int8() or weight.in_groups()
        if packed is None:
            _log.info("%s is rounded again to int8, since its %s", name, weight.describe())
        return packed

    def log(self, tied: bool) -> None:
        """Log the number of quantized weights and their bits in one line."""
        bits = sorted({weight.bits for weight in self._weights.values()})
        _log.info(
            "%d weights of the %s checkpoint have %s bits",
            len(self._weights),
            self._scheme.method,
            " or ".join(map(str, bits)) or "no",
        )

    def _read(self, name: str) -> Grouped:
        """Return a weight; raises `DamagedModelError` for numbers out of range."""
        weight = self._weights[name]
        parts = {
            part: super(PrequantizedCheckpoint, self).tensor(n) for part, n in weight.parts.items()
        }
        grouped = read_grouped(self._scheme, weight, parts)
        problem = None
        middle, largest = 1 << (grouped.bits - 1), int(grouped.values.max())
        first_zero, last_zero = (int(end) for end in torch.aminmax(grouped.zeros))
        first_group, last_group = (int(end) for end in torch.aminmax(grouped.groups))
        if not torch.isfinite(grouped.steps * _MARGIN).all():
            problem = "scales that are not finite"
        elif largest >> grouped.bits:
            problem = (
                f"the value {largest - middle}; allowed: up to {middle - 1} in {grouped.bits} bits"
            )
        elif first_zero < 0 or last_zero >> grouped.bits:
            problem = (
                f"zero points from {first_zero - middle} to {last_zero - middle}; allowed: "
                f"{-middle} to {middle - 1} in {grouped.bits} bits"
            )
        elif first_group < 0 or last_group >= grouped.steps.shape[1]:
            problem = (
                f"inputs of the groups {first_group} to {last_group}; allowed: 0 to "
                f"{grouped.steps.shape[1] - 1}"
            )
        if problem is not None:
            raise DamagedModelError(f"{name} in {self._folder} has {problem}")
        return grouped
