"""Which tensors of a checkpoint stand for a weight, and whether they fit together."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.weights.reader import Entry
from headstart.weights.scheme import Method, Scheme, UnsupportedLayerError

__all__ = ["NAMES", "SCALE_TYPES", "Module", "find_modules"]


class _Names(NamedTuple):
    """What the tensors of a weight are called; order: the group of each input."""

    words: str
    scales: str
    zeros: str
    order: str | None = None


NAMES: dict[Method, _Names] = {
    "awq": _Names("qweight", "scales", "qzeros"),
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "compressed-tensors": _Names(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
    ),
    "torchao": _Names("_weight_qdata", "_weight_scale", "_weight_zero_point"),
}
_SHAPE = "weight_shape"
SCALE_TYPES = frozenset({"F16", "BF16", "F32"})
"""The types of scales that are read, as safetensors names them."""
_PLACES = frozenset({"I32", "I64"})

_Shape = tuple[int, ...]


class Module(NamedTuple):
    """A quantised weight `[outputs, inputs]`.

    bits: of its values. group: inputs that share a step. parts: the tensors that it is kept in.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    parts: tuple[str, ...]


def find_modules(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], read: Callable[[str], Tensor]
) -> dict[str, Module]:
    """The quantised weights by name, of a method that has no description of each.

    Raises `DamagedModelError` for tensors of types or shapes that do not fit together, and
    `UnsupportedLayerError` for groups that are kept in another way.
    """
    called = NAMES[scheme.method]
    suffix = f".{called.words}"
    found = {name.removesuffix(suffix): suffix[1:] for name in entries if name.endswith(suffix)}
    if scheme.method == "compressed-tensors":  # values of 8 bits need no packing
        found |= {
            name.removesuffix(".weight"): "weight"
            for name, entry in entries.items()
            if name.endswith(".weight") and entry.dtype == "I8"
        }
    modules = {}
    for module, words in found.items():
        names = (words, called.scales, called.zeros, called.order, _SHAPE)
        held = {
            name: entries[full]
            for name in names
            if name is not None and (full := f"{module}.{name}") in entries
        }
        listed = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in held.items())
        told = f"{module} in {folder}: {listed}"
        if words != "weight" and f"{module}.weight" in entries:
            raise DamagedModelError(f"{told} stand beside a weight in float")
        _check_types(held, words, scheme, told)
        shapes = {name: entry.shape for name, entry in held.items()}
        if _SHAPE in held:
            shapes[_SHAPE] = tuple(map(int, read(f"{module}.{_SHAPE}")))
            told += f" of {list(shapes[_SHAPE])}"
        shape, bits = _find_shape(scheme, words, shapes)
        if shape is None or bits not in scheme.bits or not _fit(scheme, shape, bits, shapes):
            raise DamagedModelError(f"{told} do not fit together, or not to config.json")
        group = _find_group(scheme, shape[1], _count_groups(scheme, shapes), told)
        parts = tuple(f"{module}.{name}" for name in held)
        modules[f"{module}.weight"] = Module(shape, bits, group, parts)
    return modules


def _check_types(held: Mapping[str, Entry], words: str, scheme: Scheme, told: str) -> None:
    """Raise `DamagedModelError` for a missing tensor, or one of a type that is not read."""
    packed = frozenset({"I8" if words == "weight" else "I32"})
    _, scales, zeros, order = NAMES[scheme.method]
    types = {words: packed, scales: SCALE_TYPES, zeros: packed, order: _PLACES, _SHAPE: _PLACES}
    wrong = [name for name, entry in held.items() if entry.dtype not in types[name]]
    if wrong:
        raise DamagedModelError(f"{told}: the type of {wrong[0]} is not read")
    needed = [words, scales]
    needed += [zeros] * (scheme.has_zeros is not False)
    needed += [order] if order is not None and not scheme.is_ordered else []
    needed += [_SHAPE] * (words == "weight_packed")
    if missing := [name for name in needed if name not in held]:
        raise DamagedModelError(f"{told}: there is no {missing[0]}")
    # Values that are not packed are less their zero points whatever config.json says.
    if words == "weight_packed" and scheme.has_zeros is False and zeros in held:
        raise DamagedModelError(f"{told}: by config.json weights are symmetric, without {zeros}")
    if _SHAPE in held and held[_SHAPE].shape != (2,):
        raise DamagedModelError(f"{told}: {_SHAPE} is not two numbers")


def _find_shape(
    scheme: Scheme, words: str, shapes: Mapping[str, _Shape]
) -> tuple[tuple[int, int] | None, int]:
    """The weight's shape and bits; None if the tensors do not tell."""
    size = shapes[words]
    if len(size) != 2:
        return None, 0
    if scheme.method == "compressed-tensors":
        if words == "weight":
            return (size[0], size[1]), 8
        wanted = shapes[_SHAPE]
        fitting = [bits for bits in sorted(scheme.bits) if size[1] == -(-wanted[-1] * bits // 32)]
        if min(wanted) < 1 or len(fitting) != 1:
            return None, 0
        return (wanted[0], wanted[1]), fitting[0]
    [bits] = scheme.bits
    fields = 32 // bits
    if scheme.method == "awq":
        return (size[1] * fields, size[0]), bits
    return (size[1], size[0] * fields), bits


def _count_groups(scheme: Scheme, shapes: Mapping[str, _Shape]) -> int:
    return shapes[NAMES[scheme.method].scales][scheme.method == "compressed-tensors"]


def _fit(scheme: Scheme, shape: tuple[int, int], bits: int, shapes: Mapping[str, _Shape]) -> bool:
    """Whether scales, zero points and groups are of a weight of this shape."""
    outputs, inputs = shape
    scales = shapes[NAMES[scheme.method].scales]
    if len(scales) != 2:
        raise UnsupportedLayerError(f"its weights have scales of the shape {list(scales)}")
    fields, groups = 32 // bits, _count_groups(scheme, shapes)
    words = -(-outputs // fields)
    called = NAMES[scheme.method]
    order = shapes.get(called.order) if called.order is not None else None
    if scheme.method == "compressed-tensors":
        zeros = (outputs if "weight" in shapes else words, groups)
        packed = (outputs, -(-inputs // fields))
        fits = shapes.get("weight_packed", packed) == packed and scales[0] == outputs
    else:
        zeros, fits = (groups, words), scales[1] == outputs
    fits = fits and shapes.get(called.zeros, zeros) == zeros
    return fits and min(outputs, inputs, groups) > 0 and order in (None, (inputs,))


def _find_group(scheme: Scheme, inputs: int, count: int, told: str) -> int:
    """The inputs of a group, of which there are so many."""
    sizes = {inputs if size == -1 else min(size, inputs) for size in scheme.groups}
    fitting = [size for size in sizes if -(-inputs // size) == count]
    if not fitting:
        raise DamagedModelError(f"{told}: there are {count} groups, by config.json of {sizes}")
    if len(fitting) > 1:
        raise UnsupportedLayerError(f"its groups may be of {fitting[0]} and of {fitting[1]} inputs")
    return fitting[0]
