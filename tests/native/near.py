"""Numbers in float64 with a running limit on the error of a computation in bfloat16.

Every step of a kernel adds the error of its rounding, and passes on, at most, the error of its
inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Near", "exactly"]

BF16_ROUNDING = 2**-8  # relative, at most: to the nearest of 8 binary digits
FLOAT32_ROUNDING = 1e-5  # of a sum's terms, and of functions in float32


@dataclass(frozen=True)
class Near:
    """`value` float64, and the largest distance `off` that a kernel's number may have from it."""

    value: Tensor
    off: Tensor

    def rounded(self) -> "Near":
        """Round to bfloat16."""
        return Near(self.value, self.off + BF16_ROUNDING * (self.value.abs() + self.off))

    def __add__(self, other: "Near") -> "Near":
        size = self.value.abs() + other.value.abs()
        return Near(self.value + other.value, self.off + other.off + FLOAT32_ROUNDING * size)

    def __mul__(self, other: "Near") -> "Near":
        value = self.value * other.value
        off = self.value.abs() * other.off + self.off * (other.value.abs() + other.off)
        return Near(value, off + FLOAT32_ROUNDING * value.abs())

    def __getitem__(self, at: object) -> "Near":
        return Near(self.value[at], self.off[at])  # type: ignore[index]

    def view(self, *shape: int) -> "Near":
        return Near(self.value.reshape(shape), self.off.reshape(shape))

    def linear(self, weight: Tensor, bias: Tensor | None) -> "Near":
        """Multiply by a weight `[outputs, inputs]`, and add a bias if there is one."""
        weight = weight.double()
        value, size = self.value @ weight.T, self.value.abs() @ weight.abs().T
        off = self.off @ weight.abs().T
        if bias is not None:
            value, size = value + bias.double(), size + bias.double().abs()
        return Near(value, off + FLOAT32_ROUNDING * (size + off)).rounded()

    def silu(self) -> "Near":
        """Apply x / (1 + e^-x), whose slope is 1.1 at most."""
        value = self.value * torch.sigmoid(self.value)
        return Near(value, 1.1 * self.off + 2 * FLOAT32_ROUNDING * value.abs()).rounded()

    def gelu(self) -> "Near":
        """Apply GELU approximated by tanh, whose slope is less than 1.2."""
        value = functional.gelu(self.value, approximate="tanh")
        return Near(value, 1.2 * self.off + 2 * FLOAT32_ROUNDING * value.abs()).rounded()

    def norm(self, weight: Tensor | None, epsilon: float, is_gemma: bool = False) -> "Near":
        """Divide by the root of the mean square and multiply by a weight, if there is one.

        is_gemma: multiply by 1 + weight instead, before rounding.
        """
        if weight is None:
            return self
        size = (self.value.square().mean(-1, keepdim=True) + epsilon).sqrt()
        change = self.off.square().mean(-1, keepdim=True).sqrt()  # of the root, at most
        value = self.value / size
        off = (self.off + value.abs() * change) / (size - change).clamp_min(epsilon**0.5)
        scaled = Near(value, off + FLOAT32_ROUNDING * value.abs())
        if is_gemma:
            return (scaled * exactly(1 + weight.double())).rounded()
        return (scaled.rounded() * exactly(weight)).rounded()

    def rotated(self, cos: Tensor, sin: Tensor) -> "Near":
        """Rotate pairs of halves of `[rows, heads, dim]` by angles `[rows, dim]`."""
        half = self.value.shape[-1] // 2
        first, second = self[..., :half], self[..., half:]
        turned = Near(
            torch.cat([-second.value, first.value], -1), torch.cat([second.off, first.off], -1)
        )
        a, b = (exactly(part.unsqueeze(1)) for part in (cos, sin))
        return ((self * a).rounded() + (turned * b).rounded()).rounded()

    def check(self, actual: Tensor) -> None:
        """Raise `AssertionError` if a number is further away."""
        apart = (actual.double() - self.value).abs()
        assert bool((apart <= self.off + 1e-30).all()), (apart - self.off).max()


def exactly(numbers: Tensor) -> Near:
    """Wrap a kernel's input, which has no error."""
    return Near(numbers.double(), torch.zeros(numbers.shape, dtype=torch.float64))
