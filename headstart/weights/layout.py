"""The tensors of a checkpoint that stand for a quantized weight, checked to fit together.

torchao's headers describe each weight:

    _weight_qdata        int8 `[outputs, inputs]`, a byte for a value of 4 bits, too
    _weight_scale        `[outputs / rows, inputs / group]`
    _weight_zero_point   int8 of the same shape; missing where all are 0

A header's metadata has, under the name of a weight, a JSON object of three fields: `_type` is the
class of the tensor, `_tensor_data_names` lists its stored parts, and `_data` holds `block_size`,
the rows and inputs that share a step, and for some classes the `target_dtype`
(torchao/prototype/safetensors/safetensors_support.py).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.weights.checkpoint import Entry
from headstart.weights.scheme import Method, Scheme, UnsupportedLayerError, torchao_bits

__all__ = ["NAMES", "Module", "check_pickle", "find_described", "find_modules"]


class _Names(NamedTuple):
    """The names of the tensors of a weight; order: the group of each input."""

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
_SCALE_TYPES = frozenset({"F16", "BF16", "F32"})
"""The types of scales that are read, as safetensors names them."""
_PLACES = frozenset({"I32", "I64"})

_Shape = tuple[int, ...]


class Module(NamedTuple):
    """A quantized weight `[outputs, inputs]`.

    bits: of its values. group: inputs that share a step. parts: the tensors that it is kept in.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    parts: tuple[str, ...]


def find_modules(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], read: Callable[[str], Tensor]
) -> dict[str, Module]:
    """The quantized weights by name, of a method that has no description of each.

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
    types = {words: packed, scales: _SCALE_TYPES, zeros: packed, order: _PLACES, _SHAPE: _PLACES}
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
    """True if scales, zero points and groups fit a weight of this shape."""
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


_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_WORDS, _SCALES, _ZEROS, _ = NAMES["torchao"]
_PREFIX = "_weight_"


def check_pickle(files: Sequence[Path]) -> None:
    """Raise `UnsupportedModelError` for a pickle, which holds tensors of torchao's classes."""
    for file in files:
        if file.suffix != ".safetensors":
            raise UnsupportedModelError(
                f"{file} is a pickle of torchao's tensors, which is not read: load the model with "
                "the torchao that wrote it, or quantise it again, and let save_pretrained of "
                "transformers 5 or later write it as safetensors"
            )


def find_described(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> dict[str, Module]:
    """The quantized weights by name.

    Raises `DamagedModelError` for tensors that do not fit together, to their description or to
    config.json, and `UnsupportedLayerError` for those that are kept in another way.
    """
    held: dict[str, dict[str, Entry]] = defaultdict(dict)
    for name, entry in entries.items():
        module, mark, part = name.rpartition(f".{_PREFIX}")
        if mark:
            held[module][_PREFIX + part] = entry
    about = {
        name.removesuffix(".weight"): _describe(name, text)
        for name, text in metadata.items()
        if name.endswith(".weight")
    }
    quantized = {module for module, one in about.items() if one.get("_type") != "Tensor"}
    if not quantized | held.keys():
        raise DamagedModelError(f"{folder}: by config.json torchao quantized weights, and none is")
    modules = {}
    for module in sorted(quantized | held.keys()):
        parts = held.get(module, {})
        listed = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in parts.items())
        told = f"{module} in {folder}: {listed or 'no tensors'}"
        if module not in quantized:
            raise DamagedModelError(f"{told}, of which no header says how values are kept")
        if f"{module}.weight" in entries:
            raise DamagedModelError(f"{told} stand beside a weight in float")
        modules[f"{module}.weight"] = _find_module(module, scheme, parts, about[module], told)
    return modules


def _describe(name: str, text: str) -> dict[str, Any]:
    """Return the description of a tensor in a header."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DamagedModelError(f"a header describes {name} by {text[:80]!r}, and not in JSON")
    return found


def _find_module(
    module: str, scheme: Scheme, held: Mapping[str, Entry], about: Mapping[str, Any], told: str
) -> Module:
    kind, data = about.get("_type"), about.get("_data")
    if kind not in _CLASSES:
        raise UnsupportedLayerError(
            f"{module} is kept as torchao's {kind}: {', '.join(_CLASSES)} are read"
        )
    if not isinstance(data, Mapping):
        raise DamagedModelError(f"{told}: its header has no _data")
    bits = 8 if kind == "Int8Tensor" else torchao_bits(data.get("target_dtype"))
    _check_parts(held, about.get("_tensor_data_names"), told)
    block = data.get("block_size")
    group = _find_block_group(block, held)
    if group is None:
        raise DamagedModelError(f"{told} do not fit together, or not to blocks of {block}")
    outputs, inputs = held[_WORDS].shape
    groups = {inputs if size == -1 else size for size in scheme.groups}
    if bits not in scheme.bits or group not in groups:
        raise DamagedModelError(
            f"{told} are values of {bits} bits in groups of {group}, by config.json of "
            f"{sorted(scheme.bits)} bits in groups of {sorted(groups)}"
        )
    return Module((outputs, inputs), bits, group, tuple(f"{module}.{name}" for name in held))


def _check_parts(held: Mapping[str, Entry], named: object, told: str) -> None:
    """Raise unless the tensors are those that the header names, and of types that are read."""
    names = {f"{_PREFIX}{name}" for name in named} if isinstance(named, list) else set()
    if unread := sorted(names - {_WORDS, _SCALES, _ZEROS}):
        raise UnsupportedLayerError(f"{told}: {unread[0]} is not read")
    if missing := sorted({_WORDS, _SCALES} - names or names - held.keys()):
        raise DamagedModelError(f"{told}: there is no {missing[0]}")
    if surplus := sorted(held.keys() - names):
        raise DamagedModelError(f"{told}: its header does not name {surplus[0]}")
    types = {_WORDS: {"I8"}, _SCALES: _SCALE_TYPES, _ZEROS: {"I8"}}
    if wrong := [name for name, entry in held.items() if entry.dtype not in types[name]]:
        raise DamagedModelError(f"{told}: the type of {wrong[0]} is not read")


def _find_block_group(block: object, held: Mapping[str, Entry]) -> int | None:
    """The inputs of a block; None unless there is a step for each block of the weight."""
    if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
        return None
    shape = held[_WORDS].shape
    if len(shape) != 2 or min(*shape, *block) < 1:
        return None
    steps = shape[0] // block[0], shape[1] // block[1]
    whole = steps[0] * block[0], steps[1] * block[1]
    fits = whole == shape and all(held[name].shape == steps for name in held.keys() - {_WORDS})
    return int(block[1]) if fits else None
