"""The products of rows and a weight, and the choice of a product for this machine.

The choice depends on the CPU's instructions, and is based on measurements. The compiled library
itself chooses VNNI and AMX instructions within a product (`headstart.native`).

FBGEMM, which torch includes for x86, multiplies inputs of 7 bits. With 8 bits, the 16-bit sum of
two products could saturate on CPUs without VNNI. So one product multiplies two rows of integers,
the digits of a row in base 126:

    x  ~  top / 63 * (high + low / 126)      top: the row's largest |x|; high, low: -63 .. 63

Together, the digits have 14 bits. The second row costs nothing if memory limits the product. The
result of a row has the same bits in any batch.
"""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.native import AMX, avx2_library, level, library, required
from headstart.native.bindings import Weight

WeightForm = Literal["bfloat16", "int8", "int8 in groups", "fewer bits"]
"""The form of a stored weight. int8: with a scale for each output. int8 in groups: with a step for
each group of inputs. fewer bits: 5 or 4 bits, also in groups."""

Product = Literal["bfloat16", "float32", "integers", "fbgemm", "torch"]
"""bfloat16: compiled; weights of fewer bits are converted to bfloat16 as they are read. float32:
compiled for few rows; for many rows, the weight becomes float32 tile by tile. integers: compiled;
rows are rounded to 8 bits in groups of 32 inputs. fbgemm: rows have 14 bits. torch: the weight in
torch's layout, or dequantized tile by tile."""


class CompiledProduct:
    """The product of rows and a weight, plus the weight's bias if it has one.

    dtype: the dtype of rows, float32 or bfloat16. values: on the CPU, in the layout that
    `native/weight.h` describes for `kind`. scales: a factor for each output, float32 `[outputs]`;
    None for weights of 16 bits. columns: a factor for each input, float32 `[inputs]`, or None;
    padded to whole groups if rows are bfloat16.

    The result of a row has the same bits in any batch and on any number of threads. A copy, or an
    unpickled product, has separate memory. Raises `ModelError` without the kernels.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kind: int,
        shape: Sequence[int],
        values: Tensor,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> None:
        is_bfloat16 = dtype == torch.bfloat16
        kernels = required(library() if is_bfloat16 else avx2_library())
        self._function: ctypes._NamedFuncPointer = (
            kernels.headstart_linear if is_bfloat16 else kernels.headstart_float_linear
        )
        bias = None if bias is None else bias.detach().to(dtype, copy=True)
        self.dtype, self.values, self.bias = dtype, values, bias
        self._outputs, self._inputs = shape
        self._arguments = (dtype, kind, tuple(shape), values, bias, scales, columns)
        parts = (values, bias, scales, columns)
        assert all(part is None or part.is_contiguous() for part in parts)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        self.struct = Weight(*addresses, inputs=shape[1], outputs=shape[0], kind=kind)
        """The kernels' struct, with pointers into memory that this object owns."""
        self._struct_address = ctypes.addressof(self.struct)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the struct when copied, with the addresses of the copy's tensors."""
        return CompiledProduct, self._arguments

    def check_rows(self, x: Tensor) -> None:
        """Raise `ValueError` unless `x` is `[..., inputs]` in the product's dtype on the CPU."""
        if x.dtype != self.dtype or not x.is_cpu or x.shape[-1:] != (self._inputs,):
            width = x.shape[-1] if x.dim() else 0
            raise ValueError(
                f"rows have {width} elements in {x.dtype} on {x.device.type}; allowed: "
                f"{self._inputs} in {self.dtype} on cpu"
            )

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` (`[..., inputs]` in `dtype`) times the weight plus the bias."""
        self.check_rows(x)
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self._outputs), dtype=self.dtype)
        rows = x.numel() // self._inputs
        self._function(
            self._struct_address, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads()
        )
        return out


_DIGIT = 63  # the largest digit
_ZERO_POINT = 64
_TINY = 1e-30  # minimum scale, for rows of zeros


def fbgemm_pack(values: Tensor, scales: Tensor) -> Any:
    """Return a copy in FBGEMM's layout. values: int8 `[outputs, inputs]`. scales: `[outputs]`."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    try:
        with warnings.catch_warnings():
            # The function is deprecated. If a later torch lacks it, `has_fbgemm` returns False.
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*")
            weight = torch._make_per_channel_quantized_tensor(
                values, scales.double() / _DIGIT, zeros, 0
            )
            return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine


def fbgemm_unpack(packed: Any) -> Tensor:
    """Return the values int8 `[outputs, inputs]`."""
    values: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return values


def fbgemm_multiply(rows: Tensor, packed: Any) -> Tensor:
    """Multiply rows float32 `[rows, inputs]` by a packed weight, as integers."""
    count = len(rows)
    # NaN and infinity reach the result through `top`.
    top = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True).clamp_min_(_TINY)
    digits = torch.empty((2 * count, rows.shape[1]))
    high, low = digits[:count], digits[count:]
    torch.mul(rows, _DIGIT / top, out=low)
    torch.round(low, out=high)
    low.sub_(high).mul_(2 * _DIGIT)
    products = _multiply_digits(digits, packed)
    return torch.add(products[:count], products[count:], alpha=0.5 / _DIGIT).mul_(top)


def _multiply_digits(digits: Tensor, packed: Any) -> Tensor:
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    products: Tensor = multiply(digits, 1.0, _ZERO_POINT, packed)
    return products


@cache
def has_fbgemm() -> bool:
    """Return True if FBGEMM multiplies and unpacks a weight correctly here."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    values = torch.arange(-96, 96, dtype=torch.int8).view(4, 48)
    digits = torch.arange(96.0).view(2, 48).remainder(127).sub(_DIGIT)
    try:
        packed = fbgemm_pack(values, torch.ones(4))
        products = _multiply_digits(digits, packed)
        is_equal = torch.equal(fbgemm_unpack(packed), values)
    except (RuntimeError, AttributeError):  # torch was built without FBGEMM, or renamed it
        return False
    return is_equal and torch.allclose(products, digits @ values.float().T / _DIGIT)


def choose_product(form: WeightForm, rows: torch.dtype, device: torch.device) -> Product:
    """Return the fastest product for a stored weight and input rows of a dtype."""
    if device.type != "cpu":
        return "torch"
    if form == "bfloat16":
        if rows == torch.bfloat16:
            return "torch" if library() is None else "bfloat16"
        return "float32" if rows == torch.float32 and avx2_library() is not None else "torch"
    if form != "int8 in groups" and rows == torch.bfloat16 and level() >= AMX:
        return "bfloat16"
    if avx2_library() is not None:
        return "integers"
    return "fbgemm" if form == "int8" and has_fbgemm() else "torch"
