"""GPTQ: rounding of a weight input by input. Later inputs compensate for earlier errors.

The method is by Frantar et al. 2022, https://arxiv.org/abs/2210.17323. An output is a sum over
inputs, so the error of one element can be compensated by elements whose inputs correlate with its
input. `products` has these correlations: the mean of x x^T over the rows x of the text. Inputs are
rounded in order. The error of an input is distributed over all later inputs, by the Cholesky factor
of the inverse of `products`. The grid of a group (its step and zero point) is chosen when its first
input is reached. At the end, the steps of each output are fitted by least squares to the rounded
values.

Rows x of the quantized model differ from rows y of the float model. As in GPTAQ (Li et al. 2025,
https://arxiv.org/abs/2504.02692), the weight is corrected by `shifts`, the mean of (y - x) x^T. The
product of x and the corrected weight then approximates the product of y and the original weight.

The cost is about 3 * inputs^2 * outputs multiplications.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.weights.grouped import GROUP
from headstart.weights.prequantized import Grouped

BITS = 4
_MAX = (1 << BITS) - 1
_BLOCK = 4 * GROUP  # inputs whose errors are distributed to later blocks in one product
_DAMPING = 0.05  # share of the mean diagonal that is added to the diagonal, against overfitting
_SHIFT = 0.5  # share of the correction by `shifts` that is applied; a larger share overfits
_OUTPUTS = 256  # outputs whose steps are fitted at once
_EPSILON = 1e-12  # added to avoid a division by zero
_SPANS = (1.0, 1.1, 0.9)  # widths of grids to try, relative to the range of the elements


class _Grid(NamedTuple):
    """The steps and zero points of a group, each `[outputs]`.

    It converts between elements of a weight (floats) and their values in the file (integers).
    """

    steps: Tensor
    zeros: Tensor

    def values(self, elements: Tensor) -> Tensor:
        """Return the integers nearest to elements `[..., outputs]`."""
        return (elements / self.steps).add_(self.zeros).round_().clamp_(0, _MAX)

    def elements(self, values: Tensor) -> Tensor:
        """Return the floats that integers `[..., outputs]` stand for."""
        return (values - self.zeros).mul_(self.steps)


class InputStatistics(NamedTuple):
    """Statistics of a layer's inputs, each float32 `[inputs, inputs]`."""

    products: Tensor
    shifts: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, float_rows: Tensor) -> "InputStatistics":
        """Return the statistics of rows `[rows, inputs]` of the quantized and the float model."""
        return cls(rows.T @ rows / len(rows), (float_rows - rows).T @ rows / len(rows))


def round_weight(weight: Tensor, statistics: InputStatistics, stored_dtype: torch.dtype) -> Grouped:
    """Round a weight float32 `[outputs, inputs]` to 4 bits, with steps in `stored_dtype`."""
    inputs = weight.shape[1]
    assert inputs % GROUP == 0
    products = statistics.products.clone()
    mean = float(products.diagonal().mean())
    products.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    root = torch.linalg.cholesky(products)
    target = weight.T.clone(memory_format=torch.contiguous_format)  # [inputs, outputs]
    if statistics.shifts is not None:
        target += _SHIFT * torch.cholesky_solve(statistics.shifts.T @ target, root)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(root), upper=True)
    values, grids = _spread_errors(
        target.clone(), factor, statistics.products.diagonal(), stored_dtype
    )
    steps, zeros = (torch.stack(parts) for parts in zip(*grids, strict=True))  # [groups, outputs]
    parts = (torch.split(part, _OUTPUTS, dim=1) for part in (target, values, steps, zeros))
    fitted = [_fit_steps(products, *part) for part in zip(*parts, strict=True)]
    steps = torch.cat(fitted, dim=1).clamp_(*_limits(stored_dtype)).to(stored_dtype).float()
    return Grouped(
        values=values.T.contiguous(),
        steps=steps.T.contiguous(),
        zeros=zeros.T.contiguous(),
        groups=torch.arange(inputs) // GROUP,
        bits=BITS,
    )


def _spread_errors(
    remaining: Tensor, factor: Tensor, sizes: Tensor, stored_dtype: torch.dtype
) -> tuple[Tensor, list[_Grid]]:
    """Return the rounded weight as integers uint8 `[inputs, outputs]`, and a grid for each group.

    remaining: the weight `[inputs, outputs]`; it is overwritten. factor: the upper Cholesky factor
    of the inverse of the products. sizes: the diagonal of the products.
    """
    inputs = len(remaining)
    values = torch.empty_like(remaining, dtype=torch.uint8)
    grids: list[_Grid] = []
    for first in range(0, inputs, _BLOCK):
        last = min(inputs, first + _BLOCK)
        block, errors = remaining[first:last], torch.empty_like(remaining[first:last])
        for index in range(first, last):
            row = block[index - first]
            if index % GROUP == 0:
                group = slice(index - first, index - first + GROUP)
                grids.append(_choose_grid(block[group], sizes[index : index + GROUP], stored_dtype))
            values[index] = rounded = grids[-1].values(row)
            error = row.sub_(grids[-1].elements(rounded)).div_(factor[index, index])
            errors[index - first] = error
            block[index - first + 1 :].addr_(factor[index, index + 1 : last], error, alpha=-1)
        remaining[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return values, grids


def _fit_steps(
    products: Tensor, target: Tensor, values: Tensor, steps: Tensor, zeros: Tensor
) -> Tensor:
    """Return the steps `[groups, outputs]` that best reproduce the target's outputs.

    The steps of an output solve a system with one equation per group. A solution below half or
    above twice the old step is noise, and is not used.
    """
    count, outputs = steps.shape
    units = values.reshape(count, GROUP, outputs) - zeros.unsqueeze(1)
    system = units.new_empty(outputs, count, count)
    for group in range(count):
        columns = products[:, group * GROUP : (group + 1) * GROUP]
        projected = (columns @ units[group]).view_as(units).mul_(units)
        system[:, :, group] = projected.sum(dim=1).T
    sizes = system.diagonal(dim1=1, dim2=2)
    sizes += 1e-6 * sizes.mean(dim=1, keepdim=True) + _EPSILON
    sides = (products @ target).view_as(units).mul_(units).sum(dim=1).T
    fitted = torch.linalg.solve(system, sides).T
    return torch.where((fitted > steps / 2) & (fitted < steps * 2), fitted, steps)


def _limits(stored_dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest step."""
    limits = torch.finfo(stored_dtype)
    return limits.smallest_normal, limits.max


def _choose_grid(elements: Tensor, sizes: Tensor, stored_dtype: torch.dtype) -> _Grid:
    """Return the grid with the smallest error for elements `[group, outputs]`.

    A grid contains zero. Grids that are wider or narrower than the range of the elements are tried
    too, since the errors of earlier inputs will change the elements.
    """
    low, high = elements.amin(dim=0).clamp_max_(0), elements.amax(dim=0).clamp_min_(0)
    best_loss, best = None, None
    for span in _SPANS:
        steps = ((high - low) * (span / _MAX)).clamp_(*_limits(stored_dtype))
        steps = steps.to(stored_dtype).float()
        begin = low - (high - low) * ((span - 1) / 2)
        grid = _Grid(steps, (-begin / steps).round_().clamp_(0, _MAX))
        errors = grid.elements(grid.values(elements)).sub_(elements).square_()
        loss = errors.mul_(sizes.unsqueeze(1)).sum(dim=0)
        if best_loss is None or best is None:
            best_loss, best = loss, grid
            continue
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best = _Grid(*(torch.where(better, *pair) for pair in zip(grid, best, strict=True)))
    assert best is not None
    return best
