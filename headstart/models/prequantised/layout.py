"""Which tensors of a checkpoint stand for a weight, and whether they fit together."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.models.dense.shape import OtherKind
from headstart.models.dense.weights import Entry
from headstart.models.prequantised.scheme import Method, Scheme

__all__ = ["SCALES", "Module", "find_modules"]

_WORDS: dict[Method, str] = {
    "awq": "qweight",
    "gptq": "qweight",
    "compressed-tensors": "weight_packed",
}
SCALES: dict[Method, str] = {
    "awq": "scales",
    "gptq": "scales",
    "compressed-tensors": "weight_scale",
}
"""The name of a weight's scales."""
_OTHERS: dict[Method, tuple[str, ...]] = {
    "awq": ("qzeros",),
    "gptq": ("qzeros", "g_idx"),
    "compressed-tensors": ("weight_shape", "weight_zero_point", "weight_g_idx"),
}

_Shape = tuple[int, ...]


class Module(NamedTuple):
    """A quantised weight `[outputs, inputs]`: the bits of its values, the tensors it is kept in."""

    shape: tuple[int, int]
    bits: int
    parts: tuple[str, ...]


def find_modules(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], read: Callable[[str], Tensor]
) -> dict[str, Module]:
    """The quantised weights by name.

    Raises `DamagedModelError` for tensors of shapes that do not fit together, and `OtherKind` for
    scales of other kinds.
    """
    suffix = f".{_WORDS[scheme.method]}"
    found = {name.removesuffix(suffix): suffix[1:] for name in entries if name.endswith(suffix)}
    if scheme.method == "compressed-tensors":  # values of 8 bits need no packing
        found |= {
            name.removesuffix(".weight"): "weight"
            for name, entry in entries.items()
            if name.endswith(".weight") and entry.dtype == "I8"
        }
    modules = {}
    for module, words in found.items():
        names = (words, SCALES[scheme.method], *_OTHERS[scheme.method])
        held = {name: entries[full] for name in names if (full := f"{module}.{name}") in entries}
        shapes = {name: entry.shape for name, entry in held.items()}
        if "weight_shape" in held:
            shapes["weight_shape"] = tuple(map(int, read(f"{module}.weight_shape")))
        shape, bits = _find_shape(scheme, words, shapes)
        if shape is None or not _fit(scheme, shape, bits, shapes):
            listed = ", ".join(f"{name} {list(entry.shape)}" for name, entry in held.items())
            raise DamagedModelError(f"{module} in {folder}: {listed} do not fit together")
        modules[f"{module}.weight"] = Module(shape, bits, tuple(f"{module}.{n}" for n in held))
    return modules


def _find_shape(
    scheme: Scheme, words: str, shapes: Mapping[str, _Shape]
) -> tuple[tuple[int, int] | None, int]:
    """The weight's shape and bits; None if the tensors do not tell."""
    size = shapes[words]
    if len(size) != 2:
        return None, scheme.bits
    fields = 32 // (scheme.bits or 8)
    if scheme.method == "awq":
        return (size[1] * fields, size[0]), scheme.bits
    if scheme.method == "gptq":
        return (size[1], size[0] * fields), scheme.bits
    if words == "weight":
        return (size[0], size[1]), 8
    wanted = shapes.get("weight_shape", ())
    if len(wanted) != 2:
        return None, 0
    bits = 4 if size[1] == -(-wanted[1] // 8) else 8
    return (wanted[0], wanted[1]), bits


def _fit(scheme: Scheme, shape: tuple[int, int], bits: int, shapes: Mapping[str, _Shape]) -> bool:
    """Whether scales, zero points and groups are of a weight of this shape."""
    outputs, inputs = shape
    scales = shapes.get(SCALES[scheme.method], ())
    if len(scales) != 2:
        raise OtherKind(f"its weights have scales of the shape {list(scales)}")
    fields = 32 // bits
    order = "g_idx" if scheme.method == "gptq" else "weight_g_idx"
    if scheme.method == "compressed-tensors":
        groups, along = scales[1], scales[0]
        zeros = (outputs, groups) if "weight" in shapes else (-(-outputs // fields), groups)
        found = shapes.get("weight_zero_point", zeros)
        words = shapes.get("weight_packed", (outputs, -(-inputs // fields)))
        fits = words == (outputs, -(-inputs // fields)) and found == zeros
    else:
        groups, along = scales
        fits = shapes.get("qzeros") == (groups, -(-outputs // fields))
    ordered = shapes.get(order)
    if ordered is None and groups and inputs % groups:
        raise OtherKind(f"its weights have {groups} groups of {inputs} inputs")
    return fits and along == outputs and groups > 0 and ordered in (None, (inputs,))
