"""Weights of 4, 5 or 8 bits, with a step and a start per group of 32 inputs.

    weight[o, i]  ~  (value[o, i] * step[o, i // 32] + start[o, i // 32]) * scales[o] * columns[i]

Only weights from files have 8 bits. For them, `value - 128` replaces `value`.

Weights that are rounded here take 4.5 or 5.5 bits each. Their steps and starts are 8-bit integers,
multiples of a unit for each output. `scales` includes this unit. Steps and starts from files are
float16, so weights from files take 5, 6 or 9 bits each.

`scales` has a factor for each output, `columns` for each input. A weight is divided by
both before rounding, so that inputs with small weights do not get the step of their neighbors. This
halves the error of 4 bits. SINQ (arXiv 2509.22944) also uses scales in both dimensions.

`native/narrow/integers.h` describes the bytes and the integer product. For this product, each group
of 32 elements of an input row is rounded to 8 bits. On a CPU with AMX, bfloat16 rows are not
rounded: the weight without `scales` is converted to bfloat16 as it is read (`native/linear.h`).
Without compiled kernels, and on other devices, the weight becomes float32 tile by tile.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from headstart.native.bindings import INT8_IN_GROUPS
from headstart.weights.format import (
    WeightFormat,
    WeightKind,
    check_numbers,
    multiply_tiles,
    scratch,
)
from headstart.weights.products import CompiledProduct, choose_product

GROUP = 32
"""Inputs that share a step."""
_TINY = 1e-30
_MIN_COLUMN = 1e-15  # minimum factor of an input, to avoid a division by zero
_PANEL = 16  # outputs
_ROUNDED = 1 << 18  # elements that are rounded at a time, so that copies fit in the caches
_MAX_BYTE = 255  # largest step or start in a byte


class PackedForm(NamedTuple):
    """The layout of a weight. in_bytes: steps and starts are bytes, not float16.

    With 8-bit values they are always float16.
    """

    bits: Literal[4, 5, 8]
    in_bytes: bool

    @property
    def zero(self) -> int:
        """The stored value of a weight that equals its group's start."""
        return 128 if self.bits == 8 else 0

    @property
    def start_unit(self) -> float:
        """The factor by which a stored start is multiplied."""
        return -float(1 << (self.bits - 1)) if self.in_bytes else 1.0

    @property
    def grid_bytes(self) -> int:
        """The number of bytes of steps and starts, at the head of a block."""
        return 2 * _PANEL * (1 if self.in_bytes else 2)

    def grid(self, blocks: Tensor) -> Tensor:
        """Return the stored steps and starts `[..., 2, 16]` of blocks `[..., bytes]`."""
        grid = blocks[..., : self.grid_bytes]
        return torch.unflatten(grid if self.in_bytes else grid.view(torch.float16), -1, (2, _PANEL))

    def values(self, parts: Tensor) -> Tensor:
        """Return the values `[..., 2, 4, n]` that the bytes `[..., parts, n]` store.

        n is 4 times the number of outputs. `native/narrow/integers.h` describes the order,
        `[half][v][output][b]`.
        """
        if self.bits == 8:
            return torch.unflatten(parts.contiguous(), -2, (2, 4))
        nibbles = parts[..., :4, :]
        values = torch.stack((nibbles & 15, nibbles >> 4), -3)
        if self.bits == 5:
            for v in range(4):
                for half in range(2):
                    values[..., half, v, :] |= (parts[..., 4, :] >> (2 * v + half) & 1) << 4
        return values


class GroupedValues(NamedTuple):
    """A weight in panels.

    `panels` uint8 `[panels, groups, bytes]`, `scales` float32 `[outputs]`; `columns` float32
    `[inputs]`, or None for ones.
    """

    panels: Tensor
    scales: Tensor
    columns: Tensor | None
    inputs: int
    form: PackedForm

    def is_finite(self) -> bool:
        """Return True if all steps and starts are finite."""
        return self.form.in_bytes or bool(torch.isfinite(self.form.grid(self.panels)).all())

    def to(self, device: torch.device) -> "GroupedValues":
        """Return the values on a device."""
        columns = None if self.columns is None else self.columns.to(device)
        panels, scales = self.panels.to(device), self.scales.to(device)
        return self._replace(panels=panels, scales=scales, columns=columns)

    def store(
        self, bias: Tensor | None, rows: torch.dtype = torch.float32, table: bool = False
    ) -> "GroupedWeight":
        """Return the matrix. rows: the dtype of input rows. table: it is also an embedding."""
        # Reading one row of the matrix from AMX's panels would copy the whole matrix.
        return GroupedWeight(self, bias, torch.float32 if table else rows)


class QuantizationGrid(NamedTuple):
    """Values uint8 `[outputs, padded inputs]`, and stored steps and starts `[outputs, groups]`."""

    values: Tensor
    steps: Tensor
    starts: Tensor


def quantize_groups(weight: Tensor, bits: Literal[4, 5]) -> GroupedValues:
    """Round a floating-point weight `[outputs, inputs]` to 4 or 5 bits."""
    outputs, inputs = weight.shape
    rows = max(1, _ROUNDED // max(1, inputs))
    scales = weight.new_empty(outputs, dtype=torch.float32)
    squares = weight.new_zeros(inputs, dtype=torch.float32)
    for first in range(0, outputs, rows):  # the largest element of each output
        part = weight[first : first + rows].detach().float()
        scale = part.abs().amax(dim=1).clamp_min_(_TINY)
        scales[first : first + rows] = scale
        squares += part.div(scale.unsqueeze(1)).square_().sum(dim=0)
    # The root mean square of each input, relative to the outputs' scales.
    columns = (squares / max(1, outputs)).sqrt_().clamp_min_(_MIN_COLUMN)
    form, grids = PackedForm(bits, True), []
    for first in range(0, outputs, rows):
        part = weight[first : first + rows].detach().float()
        part = part.div(scales[first : first + rows].unsqueeze(1)).div_(columns)
        groups = nn.functional.pad(part, (0, -inputs % GROUP)).view(len(part), -1, GROUP)
        grid, units = _round(groups, form)
        scales[first : first + rows] *= units
        grids.append(grid)
    grid = QuantizationGrid(*(torch.cat(parts) for parts in zip(*grids, strict=True)))
    return pack_groups(grid, form, scales, columns)


def _round(groups: Tensor, form: PackedForm) -> tuple[QuantizationGrid, Tensor]:
    """Round groups float32 `[outputs, groups, 32]`; return the grid and its units `[outputs]`.

    First, each group is rounded to a grid from its smallest to its largest element. Then a step and
    a start are fitted to the rounded values by least squares, and the group is rounded again, to
    this grid. The grid includes zero.
    """
    levels = (1 << form.bits) - 1
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / levels).clamp_min_(_TINY)
    values = ((groups - low) / step).round_()
    mean_value, mean = values.mean(dim=-1, keepdim=True), groups.mean(dim=-1, keepdim=True)
    values -= mean_value
    squares = values.square().sum(dim=-1, keepdim=True)
    fitted = (values * groups).sum(dim=-1, keepdim=True) / squares
    step = torch.where(squares > 0, fitted, step).squeeze(-1)
    low = (mean - mean_value * step.unsqueeze(-1)).squeeze(-1).clamp_max_(0)
    high = torch.maximum(low + step * levels, groups.new_zeros(()))
    largest = torch.maximum((high - low) / levels, low / form.start_unit)
    units = largest.amax(dim=1, keepdim=True).div_(_MAX_BYTE).clamp_min_(_TINY)
    starts = low.div_(units * form.start_unit).round_()
    begin = starts * form.start_unit
    steps = high.div_(units).sub_(begin).div_(levels).round_().clamp_(1, _MAX_BYTE)
    positions = (groups / units.unsqueeze(-1)).sub_(begin.unsqueeze(-1)).div_(steps.unsqueeze(-1))
    values = positions.round_().clamp_(0, levels).flatten(1)
    grid = QuantizationGrid(values.to(torch.uint8), steps.to(torch.uint8), starts.to(torch.uint8))
    return grid, units.squeeze(1)


def pack_groups(
    grid: QuantizationGrid,
    form: PackedForm,
    scales: Tensor | None = None,
    columns: Tensor | None = None,
    inputs: int | None = None,
) -> GroupedValues:
    """Return a weight with these values. inputs: number of inputs without a group's padding."""
    outputs, groups = grid.steps.shape
    fill = (0, 0, 0, -outputs % _PANEL)
    dtype = torch.uint8 if form.in_bytes else torch.float16
    parts = []
    for numbers in (grid.steps, grid.starts):
        panels = nn.functional.pad(numbers.to(dtype), fill).view(-1, _PANEL, groups)
        parts.append(panels.transpose(1, 2).contiguous().view(torch.uint8))
    values = nn.functional.pad(grid.values, fill).view(-1, _PANEL, groups, 2, 4, 4)
    values = values.permute(0, 2, 3, 4, 1, 5)  # [panel][group][half][v][output][b], see integers.h
    if form.bits == 8:
        parts.append(values.flatten(2))
    else:
        parts.append(((values[:, :, 0] & 15) | (values[:, :, 1] & 15) << 4).flatten(2))
    if form.bits == 5:
        fifths = torch.zeros_like(values[:, :, 0, 0])
        for v in range(4):
            for half in range(2):
                fifths |= (values[:, :, half, v] >> 4) << (2 * v + half)
        parts.append(fifths.flatten(2))
    blocks = torch.cat(parts, dim=-1)
    if scales is None:
        scales = torch.ones(outputs, dtype=torch.float32, device=blocks.device)
    if inputs is None:
        inputs = grid.values.shape[1] if columns is None else len(columns)
    return GroupedValues(blocks, scales, columns, inputs, form)


_KINDS: dict[int, tuple[WeightKind, str]] = {
    4: ("int4", "Int4Linear"),
    5: ("int5", "Int5Linear"),
    8: ("int8", "Int8GroupsLinear"),
}


class GroupedWeight(WeightFormat):
    """A weight in groups, laid out for its product with input rows in a dtype.

    With 8 bits, the integer product is used for bfloat16 rows too, even with AMX.
    """

    rounding = 1 / 127

    def __init__(
        self, weight: GroupedValues, bias: Tensor | None = None, rows: torch.dtype = torch.float32
    ) -> None:
        shape = (len(weight.scales), weight.inputs)
        own_bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        super().__init__(*shape, own_bias)
        self._panels, self.scales, self.columns, _, self.form = weight
        form = self.form
        self.kind, self.name = _KINDS[form.bits]
        product = choose_product(
            "fewer bits" if form.bits < 8 else "int8 in groups", rows, weight.panels.device
        )
        panels, scales, columns = weight.panels.contiguous(), weight.scales, weight.columns
        kind = INT8_IN_GROUPS if form.bits == 8 else 2 * (form.bits == 5) + form.in_bytes
        if product == "bfloat16":
            # Interleave two panels of 16 outputs group by group, and pad columns to whole groups
            # (`native/linear.h`).
            count, groups, size = panels.shape
            panels = nn.functional.pad(panels, (0, 0, 0, 0, 0, count % 2))
            panels = panels.view(-1, 2, groups, size).transpose(1, 2).contiguous()
            columns = torch.ones(self.inputs) if columns is None else columns
            columns = nn.functional.pad(columns.float(), (0, -self.inputs % GROUP))
            scales = scales.float().contiguous()
            self.product = CompiledProduct(
                torch.bfloat16, kind, shape, panels, bias, scales, columns
            )
        elif product == "integers":
            self.product = CompiledProduct(
                torch.float32, kind, shape, panels, own_bias, scales, columns
            )
        self._panels = panels

    @property
    def panels(self) -> Tensor:
        """The blocks uint8 `[panels of 16 outputs, groups, bytes]`."""
        if self.struct(torch.bfloat16) is None:
            return self._panels
        return self._panels.transpose(1, 2).flatten(0, 1)[: -(-self.outputs // _PANEL)]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._panels, self.scales] + ([] if self.columns is None else [self.columns])

    def rows(self, numbers: Tensor) -> Tensor:
        form, panels = self.form, self.panels
        numbers = check_numbers(numbers, self.outputs).to(panels.device)
        index = (numbers // _PANEL, slice(None), slice(None), numbers % _PANEL)
        steps, starts = form.grid(panels)[index].float().unsqueeze(-1).unbind(-2)
        parts = torch.unflatten(panels[..., form.grid_bytes :], -1, (-1, _PANEL, 4))[index]
        groups = form.values(parts).flatten(-3).float().sub_(form.zero).mul_(steps)
        rows = groups.add_(starts * form.start_unit).flatten(-2)[..., : self.inputs]
        rows *= self.scales[numbers].unsqueeze(-1)
        return rows if self.columns is None else rows * self.columns

    def _multiply(self, rows: Tensor) -> Tensor:
        rows = rows if self.columns is None else rows * self.columns
        rows = nn.functional.pad(rows, (0, -self.inputs % GROUP))
        outputs = len(self._panels) * _PANEL
        out = multiply_tiles(rows, outputs, self._make_tile, _PANEL)
        return out[:, : self.outputs] * self.scales

    def _make_tile(self, first: int, last: int) -> Tensor:
        """Return outputs `first` to `last - 1`, in whole groups, without `scales` and `columns`."""
        form, blocks = self.form, self._panels[first // _PANEL : last // _PANEL]
        panels, groups, _ = blocks.shape
        steps, starts = form.grid(blocks).permute(2, 0, 3, 1).float().unsqueeze(-1).unbind(0)
        tile = scratch(panels * _PANEL * groups * GROUP, blocks.device)
        values = form.values(torch.unflatten(blocks[..., form.grid_bytes :], -1, (-1, 4 * _PANEL)))
        # Move four bytes as one number, which is much faster than moving floats.
        packed_bytes = values.view(torch.int32).view(panels, groups, 8, _PANEL).permute(0, 3, 1, 2)
        elements = tile.view(panels, _PANEL, groups, GROUP)
        elements.copy_(packed_bytes.contiguous().view(torch.uint8).view(elements.shape))
        if form.zero:
            elements.sub_(form.zero)
        elements.mul_(steps).add_(starts * form.start_unit)
        return tile.view(panels * _PANEL, groups * GROUP)
