"""The tensors that store each quantized weight of a checkpoint; checks that they fit together.

torchao's headers describe each weight:

    _weight_qdata        int8 `[outputs, inputs]`; a 4-bit value takes a byte too
    _weight_scale        `[outputs / rows, inputs / group]`
    _weight_zero_point   int8 of the same shape; missing if all are 0

A header's metadata has a JSON object with three fields for each weight: `_type` is the class of the
tensor, `_tensor_data_names` lists its stored parts, and `_data` has `block_size` (the numbers of
outputs and inputs that share a step) and, for some classes, `target_dtype`
(torchao/prototype/safetensors/safetensors_support.py).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.weights.checkpoint import Entry
from headstart.weights.scheme import Method, Scheme, UnsupportedLayerError


class _Names(NamedTuple):
    """Names of a weight's tensors. order: the tensor with the group of each input."""

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
"""The supported types of scales, with safetensors' names."""
_PLACES = frozenset({"I32", "I64"})


class Module(NamedTuple):
    """A quantized weight `[outputs, inputs]`.

    bits: bits of a value. group: inputs that share a step. parts: the tensors that store it.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    parts: tuple[str, ...]


def find_modules(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], read: Callable[[str], Tensor]
) -> dict[str, Module]:
    """Return the quantized weights by name, for methods other than torchao.

    Raises `DamagedModelError` if types or shapes of tensors do not fit together, and
    `UnsupportedLayerError` for unsupported groups.
    """
    names, modules = NAMES[scheme.method], {}
    for full, entry in entries.items():
        module, _, words = full.rpartition(".")
        # compressed-tensors does not pack 8-bit values.
        is_plain = words == "weight" and entry.dtype == "I8"
        is_plain = is_plain and scheme.method == "compressed-tensors"
        if words != names.words and not is_plain:
            continue
        parts = {
            name: entries[part]
            for name in (words, names.scales, names.zeros, names.order, _SHAPE)
            if name is not None and (part := f"{module}.{name}") in entries
        }
        text = _list_parts(module, folder, parts)
        if not is_plain and f"{module}.weight" in entries:
            raise DamagedModelError(f"{text} stand next to a weight in float")
        _check_types(parts, words, scheme, text)
        shapes = {name: part.shape for name, part in parts.items()}
        if _SHAPE in parts:
            shapes[_SHAPE] = tuple(map(int, read(f"{module}.{_SHAPE}")))
            text += f" of {list(shapes[_SHAPE])}"
        shape, bits, groups = _find_shape(scheme, words, shapes, text)
        sizes = {shape[1] if size == -1 else min(size, shape[1]) for size in scheme.groups}
        fitting = [size for size in sizes if -(-shape[1] // size) == groups]
        if not fitting:
            raise DamagedModelError(f"{text}: there are {groups} groups, by config.json of {sizes}")
        if len(fitting) > 1:
            raise UnsupportedLayerError(f"its groups may have {fitting[0]} or {fitting[1]} inputs")
        stored = tuple(f"{module}.{name}" for name in parts)
        modules[f"{module}.weight"] = Module(shape, bits, fitting[0], stored)
    return modules


def _list_parts(module: str, folder: Path, parts: Mapping[str, Entry]) -> str:
    listed = ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in parts.items())
    return f"{module} in {folder}: {listed or 'no tensors'}"


def _check_types(parts: Mapping[str, Entry], words: str, scheme: Scheme, text: str) -> None:
    """Raise `DamagedModelError` for a missing tensor or an unsupported type."""
    packed = frozenset({"I8" if words == "weight" else "I32"})
    _, scales, zeros, order = NAMES[scheme.method]
    types = {words: packed, scales: _SCALE_TYPES, zeros: packed, order: _PLACES, _SHAPE: _PLACES}
    for name, part in parts.items():
        if part.dtype not in types[name]:
            raise DamagedModelError(f"{text}: the type of {name} is not read")
    needed = [words, scales]
    needed += [zeros] * (scheme.has_zeros is not False)
    needed += [order] if order is not None and not scheme.is_ordered else []
    needed += [_SHAPE] * (words == "weight_packed")
    if missing := [name for name in needed if name not in parts]:
        raise DamagedModelError(f"{text}: there is no {missing[0]}")
    # Values that are not packed use their zero points, whatever config.json says.
    if words == "weight_packed" and scheme.has_zeros is False and zeros in parts:
        raise DamagedModelError(f"{text}: by config.json weights are symmetric, without {zeros}")
    if _SHAPE in parts and parts[_SHAPE].shape != (2,):
        raise DamagedModelError(f"{text}: {_SHAPE} is not two numbers")
    if len(parts[scales].shape) != 2:
        raise UnsupportedLayerError(
            f"its weights have scales of the shape {list(parts[scales].shape)}"
        )


def _find_shape(
    scheme: Scheme, words: str, shapes: Mapping[str, tuple[int, ...]], text: str
) -> tuple[tuple[int, int], int, int]:
    """Return a weight's shape, its bits and its number of groups.

    Raises `DamagedModelError` unless the shapes of all tensors agree.
    """
    misfit = DamagedModelError(f"{text} do not fit together, or not to config.json")
    size, scales, names = shapes[words], shapes[NAMES[scheme.method].scales], NAMES[scheme.method]
    is_compressed = scheme.method == "compressed-tensors"
    if len(size) != 2:
        raise misfit
    bits = min(scheme.bits)
    if words == "weight":
        (outputs, inputs), bits = size, 8
    elif is_compressed:
        outputs, inputs = shapes[_SHAPE]
        fitting = [bits for bits in scheme.bits if size[1] == -(-inputs * bits // 32)]
        bits = fitting[0] if len(fitting) == 1 else 0
    elif scheme.method == "awq":
        outputs, inputs = size[1] * (32 // bits), size[0]
    else:
        outputs, inputs = size[1], size[0] * (32 // bits)
    if bits not in scheme.bits or min(outputs, inputs, *scales) < 1:
        raise misfit
    fields = 32 // bits  # values in a word
    if is_compressed:
        groups = scales[1]
        expected = {
            names.words: (outputs, -(-inputs // fields)),
            names.scales: (outputs, groups),
            names.zeros: (outputs if words == "weight" else -(-outputs // fields), groups),
        }
    else:
        groups = scales[0]
        expected = {
            names.scales: (groups, outputs),
            names.zeros: (groups, -(-outputs // fields)),
        }
    order = shapes.get(names.order or "", (inputs,))
    if order != (inputs,) or any(shapes.get(name, fit) != fit for name, fit in expected.items()):
        raise misfit
    return (outputs, inputs), bits, groups


_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_WORDS, _SCALES, _ZEROS, _ = NAMES["torchao"]
_PREFIX = "_weight_"


def find_described(
    folder: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> dict[str, Module]:
    """Return torchao's quantized weights by name.

    Raises `DamagedModelError` for tensors that do not fit together or to their description, and
    `UnsupportedLayerError` for unsupported classes.
    """
    stored: dict[str, dict[str, Entry]] = defaultdict(dict)
    for name, entry in entries.items():
        module, mark, part = name.rpartition(f".{_PREFIX}")
        if mark:
            stored[module][_PREFIX + part] = entry
    descriptions = {
        name.removesuffix(".weight"): _describe(name, text)
        for name, text in metadata.items()
        if name.endswith(".weight")
    }
    quantized = {name for name, fields in descriptions.items() if fields.get("_type") != "Tensor"}
    if not quantized | stored.keys():
        raise DamagedModelError(f"{folder}: by config.json torchao quantized weights, and none is")
    modules = {}
    for module in sorted(quantized | stored.keys()):
        parts = stored.get(module, {})
        text = _list_parts(module, folder, parts)
        if module not in quantized:
            raise DamagedModelError(f"{text}, and no header describes how values are stored")
        if f"{module}.weight" in entries:
            raise DamagedModelError(f"{text} stand next to a weight in float")
        shape, bits, group = _read_description(module, parts, descriptions[module], text)
        names = tuple(f"{module}.{name}" for name in parts)
        modules[f"{module}.weight"] = Module(shape, bits, group, names)
    return modules


def _describe(name: str, text: str) -> dict[str, Any]:
    """Return the description of a tensor in a header."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DamagedModelError(f"a header describes {name} by {text[:80]!r}, and not in JSON")
    return fields


def _read_description(
    module: str, parts: Mapping[str, Entry], fields: Mapping[str, Any], text: str
) -> tuple[tuple[int, int], int, int]:
    """Return a weight's shape, its bits, and the number of inputs in a group."""
    kind, data = fields.get("_type"), fields.get("_data")
    if kind not in _CLASSES:
        raise UnsupportedLayerError(
            f"{module} is stored as torchao's {kind}; allowed: {', '.join(_CLASSES)}"
        )
    if not isinstance(data, Mapping):
        raise DamagedModelError(f"{text}: its header has no _data")
    dtype = data.get("target_dtype")  # a name, or an object with a name
    dtype = dtype.get("_data") if isinstance(dtype, Mapping) else dtype
    dtype = "int8" if kind == "Int8Tensor" else dtype
    if dtype not in ("int8", "int4"):
        raise UnsupportedLayerError(
            f"its weights have torchao's dtype {dtype!r}; allowed: int8, int4"
        )
    _check_named_parts(parts, fields.get("_tensor_data_names"), text)
    shape, group = _fit_blocks(parts, data.get("block_size"), text)
    return shape, 8 if dtype == "int8" else 4, group


def _check_named_parts(parts: Mapping[str, Entry], named: object, text: str) -> None:
    """Raise an error unless the header names exactly these tensors, with supported types."""
    names = {f"{_PREFIX}{name}" for name in named} if isinstance(named, list) else set()
    types = {_WORDS: {"I8"}, _SCALES: _SCALE_TYPES, _ZEROS: {"I8"}}
    if unread := sorted(names - types.keys()):
        raise UnsupportedLayerError(f"{text}: {unread[0]} is not read")
    if missing := sorted({_WORDS, _SCALES} - names or names - parts.keys()):
        raise DamagedModelError(f"{text}: there is no {missing[0]}")
    if surplus := sorted(parts.keys() - names):
        raise DamagedModelError(f"{text}: its header does not name {surplus[0]}")
    if wrong := [name for name, part in parts.items() if part.dtype not in types[name]]:
        raise DamagedModelError(f"{text}: the type of {wrong[0]} is not read")


def _fit_blocks(
    parts: Mapping[str, Entry], block: object, text: str
) -> tuple[tuple[int, int], int]:
    """Return a weight's shape and the number of inputs in a group. block: `[rows, group]`.

    Raises `DamagedModelError` unless the shapes of all tensors agree.
    """
    misfit = DamagedModelError(f"{text} do not fit together, or not to blocks of {block}")
    if not (isinstance(block, list) and [type(size) for size in block] == [int, int]):
        raise misfit
    rows, group = block
    shape = parts[_WORDS].shape
    if len(shape) != 2 or min(*shape, rows, group) < 1:
        raise misfit
    outputs, inputs = shape
    steps = outputs // rows, inputs // group
    is_divided = outputs % rows == inputs % group == 0
    if not is_divided or any(parts[name].shape != steps for name in parts.keys() - {_WORDS}):
        raise misfit
    return (outputs, inputs), group
