"""Weights packed for the compiled kernels, and the modules that multiply by them.

A `PackedWeight` is the only copy of its weight: the original tensor can be freed, since `unpack`
restores it bit for bit. Each row's result has the same bits alone, in any batch and on any number
of threads. `native/linear.h` describes the layout.
"""

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.native import library, required
from headstart.native.bindings import BF16, INT8, Weight
from headstart.native.pages import POPULATE_READ, ReadyMemory, advise_pages, request_huge_pages

__all__ = [
    "Arena",
    "NarrowPanels",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeight",
    "can_pack",
    "check_numbers",
    "has_memory",
    "map_pages",
]

_PANEL = 32  # outputs
_ALIGNMENT = 4096


def has_memory(tensor: Tensor) -> bool:
    """True if a tensor's memory layout is the one that its dtype and strides describe.

    A subclass of `Tensor` may have another layout: torchao's quantized weights report bfloat16 and
    hold integers and scales. Only its own operations may read such a tensor.
    """
    return type(tensor) in (Tensor, nn.Parameter)


def can_pack(weight: Tensor) -> bool:
    """True if the kernels support this weight: bfloat16 `[outputs, inputs]` on the CPU."""
    return (
        has_memory(weight)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.numel() > 0
    )


def check_numbers(numbers: Tensor, rows: int) -> Tensor:
    """Numbers of rows, on the CPU; raises `IndexError` unless a weight of `rows` has them."""
    numbers = numbers.to("cpu", torch.int64)
    if numbers.numel():
        first, last = int(numbers.min()), int(numbers.max())
        if first < 0 or last >= rows:
            raise IndexError(f"rows {first} to {last} are asked for of a weight that has {rows}")
    return numbers


class Arena:
    """One block of memory for many weights, so that the system can use huge pages.

    Huge pages are requested when it is full: the system then merges small pages in the background.
    Requested earlier, each first write would wait until 2 MiB are cleared: seconds in all.
    """

    def __init__(
        self, shapes: Iterable[torch.Size], ready_memory: ReadyMemory | None = None
    ) -> None:
        total = sum(_packed_bytes(*shape) + _ALIGNMENT for shape in shapes)
        found = ready_memory.take(total) if ready_memory is not None else None
        if found is None:
            self._memory = torch.empty(total, dtype=torch.uint8)
        else:
            self._memory = torch.frombuffer(found, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """The next `size` bytes, aligned to a page."""
        start = self._used + -(self._memory.data_ptr() + self._used) % _ALIGNMENT
        self._used = start + size
        assert self._used <= len(self._memory), "the arena was made for fewer weights"
        return self._memory[start : self._used]

    def close(self) -> None:
        """Request huge pages; call it when all weights are written."""
        request_huge_pages(self._memory.data_ptr(), self._used)


def map_pages(weights: Iterable[Tensor]) -> None:
    """Map the pages of memory-mapped weights at once; a fault for each takes four times as long.

    Does nothing for weights in memory of their own, for subclasses of `Tensor`, or without the
    compiled kernels.
    """
    if library() is not None:
        for weight in filter(has_memory, weights):
            advise_pages(weight.data_ptr(), weight.nbytes, POPULATE_READ)


class NarrowPanels(NamedTuple):
    """A weight in 8 bits or fewer, in the panels of `native/linear.h`, on the CPU.

    `kind` is its number there. `scales` float32 `[outputs]`, `columns` float32 `[inputs]` in whole
    groups: only of 4 and 5 bits.
    """

    panels: Tensor
    kind: int
    inputs: int
    scales: Tensor
    columns: Tensor | None = None


class PackedWeight:
    """A weight `[outputs, inputs]` in panels, and its bias bfloat16 `[outputs]` or None.

    In bfloat16, or `narrow`. Raises `ModelError` without the kernels.
    """

    narrow: NarrowPanels | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, arena: Arena | None = None):
        found = required(library())
        assert can_pack(weight)
        outputs, inputs = weight.shape
        self._library = found
        self.outputs, self.inputs = outputs, inputs
        self.panels = (arena or Arena([weight.shape])).take(_packed_bytes(outputs, inputs))
        source = weight.detach().contiguous()
        found.headstart_pack(
            source.data_ptr(), outputs, inputs, self.panels.data_ptr(), torch.get_num_threads()
        )
        self._set_bias(bias)

    @classmethod
    def of_panels(cls, narrow: NarrowPanels, bias: Tensor | None) -> "PackedWeight":
        """A weight that lies in panels."""
        found = required(library())
        made = cls.__new__(cls)
        made._library, made.panels, made.narrow = found, narrow.panels, narrow
        made.outputs, made.inputs = len(narrow.scales), narrow.inputs
        made._set_bias(None if bias is None else bias.to(torch.bfloat16))
        return made

    def _set_bias(self, bias: Tensor | None) -> None:
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == (self.outputs,))
        self.bias = None if bias is None else bias.detach().clone()
        self.struct = Weight(
            panels=self.panels_address,
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            kind=BF16 if self.narrow is None else self.narrow.kind,
        )
        """The kernels' struct; it points into memory that this object owns."""
        if self.narrow is not None:
            self.struct.scales = self.narrow.scales.data_ptr()
            if self.narrow.columns is not None:
                self.struct.columns = self.narrow.columns.data_ptr()
        self._address = ctypes.addressof(self.struct)

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy.deepcopy` and `pickle`: the struct's addresses are those of this memory."""
        if self.narrow is not None:
            return PackedWeight.of_panels, (self.narrow, self.bias)
        return PackedWeight, (self.unpack(), self.bias)

    @property
    def panels_address(self) -> int:
        """The address of the panels; equal for objects that share them."""
        return self.panels.data_ptr()

    def with_bias(self, bias: Tensor) -> "PackedWeight":
        """The same weight, in the same memory, with a bias `[outputs]`."""
        other = PackedWeight.__new__(PackedWeight)
        other.__dict__.update(self.__dict__)
        other._set_bias(bias)
        return other

    def check_rows(self, x: Tensor) -> None:
        """Raise `ValueError` unless `x` is bfloat16 `[..., inputs]` on the CPU."""
        dtype, device, width = x.dtype, x.device.type, x.shape[-1] if x.dim() else 0
        if (dtype, device, width) != (torch.bfloat16, "cpu", self.inputs):
            raise ValueError(
                f"a packed weight of {self.inputs} inputs in bfloat16 on cpu was given "
                f"{width} in {dtype} on {device}"
            )

    def multiply(self, x: Tensor) -> Tensor:
        """`[..., inputs]` times the weight, plus the bias: `[..., outputs]`, bfloat16."""
        self.check_rows(x)
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=torch.bfloat16)
        self._library.headstart_linear(
            self._address,
            x.data_ptr(),
            x.numel() // self.inputs,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows by number, integers of any shape: `[..., inputs]`, bfloat16, or int8 without scales.

        Raises `IndexError` for one that the weight does not have.
        """
        numbers = check_numbers(numbers, self.outputs)
        at = numbers.reshape(-1)
        panel, output, half = at // _PANEL, at % _PANEL, _PANEL // 2
        if self.narrow is None:
            pairs = self.panels.view(torch.int32).view(-1, self.inputs + 1 >> 1, _PANEL)
            found = pairs[panel, :, output].view(torch.bfloat16)
        else:
            assert self.narrow.kind == INT8
            pairs = self.narrow.panels.view(-1, self.inputs + 1 >> 1, 2, 2, half)
            found = pairs[panel, :, output // half, :, output % half].flatten(1)
        return found[:, : self.inputs].reshape(*numbers.shape, self.inputs)

    def unpack(self) -> Tensor:
        """The weight as a new tensor `[outputs, inputs]`, as `rows` has it."""
        return self.rows(torch.arange(self.outputs))


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear`; it has no parameter `weight`."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        self.in_features = packed.inputs
        self.out_features = packed.outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.packed.multiply(x)


class PackedEmbedding(nn.Module):
    """Replaces an `nn.Embedding` that shares the LM head's weight."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        self.num_embeddings = packed.outputs
        self.embedding_dim = packed.inputs

    def forward(self, numbers: Tensor) -> Tensor:
        return self.packed.rows(numbers)


def _packed_bytes(outputs: int, inputs: int) -> int:
    return -(-outputs // _PANEL) * _PANEL * (inputs + inputs % 2) * 2
