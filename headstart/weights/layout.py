"""The tensors that store each quantized weight of a checkpoint, and checks that they fit together.

A torchao weight `a.weight` has these tensors:

    a._weight_qdata        int8 `[outputs, inputs]`; a 4-bit value also takes a byte
    a._weight_scale        `[outputs / rows, inputs / group]`
    a._weight_zero_point   int8 of the same shape; missing if all are 0

The metadata of the file's header has a JSON object for each weight, with three fields. `_type` is
the class of the tensor, and `_tensor_data_names` lists the tensors that store it. `_data` has
`block_size`, the numbers of outputs and of inputs that share one scale. For some classes it also
has `target_dtype` (torchao/prototype/safetensors/safetensors_support.py).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headstart.errors import DamagedModelError
from headstart.weights.checkpoint import Entry
from headstart.weights.scheme import Method, Scheme, UnsupportedLayerError


class TensorNames(NamedTuple):
    """The last parts of the names of a weight's tensors.

    group_index: the tensor with the group of each input; "" if the method has none.
    """

    values: str
    scales: str
    zeros: str
    group_index: str = ""


NAMES: dict[Method, TensorNames] = {
    "awq": TensorNames("qweight", "scales", "qzeros"),
    "gptq": TensorNames("qweight", "scales", "qzeros", "g_idx"),
    "compressed-tensors": TensorNames(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
    ),
    "torchao": TensorNames("_weight_qdata", "_weight_scale", "_weight_zero_point"),
}
_SHAPE = "weight_shape"
# Supported types, with safetensors' names.
_SCALE_TYPES = frozenset({"F16", "BF16", "F32"})
_INDEX_TYPES = frozenset({"I32", "I64"})


class QuantizedWeight(NamedTuple):
    """A quantized weight `[outputs, inputs]`.

    bits: bits of a value. group: inputs that share a step. parts: the names of its tensors, by the
    last part of each name.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    parts: Mapping[str, str]


def find_weights(
    folder: Path, scheme: Scheme, entries: Mapping[str, Entry], read: Callable[[str], Tensor]
) -> dict[str, QuantizedWeight]:
    """Return the quantized weights by name, for methods other than torchao.

    Raises `DamagedModelError` if types or shapes of tensors do not fit together, and
    `UnsupportedLayerError` for unsupported groups.
    """
    names, weights = NAMES[scheme.method], {}
    for tensor, entry in entries.items():
        module, _, values = tensor.rpartition(".")
        is_unpacked = values == "weight" and scheme.method == "compressed-tensors"
        is_unpacked = is_unpacked and entry.dtype == "I8"
        if values != names.values and not is_unpacked:
            continue
        parts = {
            name: entries[f"{module}.{name}"]
            for name in (values, *names[1:], _SHAPE)
            if f"{module}.{name}" in entries
        }
        text = _describe_parts(module, folder, parts)
        if not is_unpacked and f"{module}.weight" in entries:
            raise DamagedModelError(f"{text}: there is also a float weight")
        _check_parts(parts, values, scheme, text)
        shapes = {name: part.shape for name, part in parts.items()}
        if _SHAPE in parts:
            shapes[_SHAPE] = tuple(map(int, read(f"{module}.{_SHAPE}")))
            text += f" of {list(shapes[_SHAPE])}"
        shape, bits, groups = _find_shape(scheme, values, shapes, text)
        sizes = {shape[1] if size == -1 else min(size, shape[1]) for size in scheme.groups}
        fitting = [size for size in sizes if -(-shape[1] // size) == groups]
        if not fitting:
            raise DamagedModelError(
                f"{text}: there are {groups} groups; config.json has groups of "
                f"{' or '.join(map(str, sorted(sizes)))} inputs"
            )
        if len(fitting) > 1:
            raise UnsupportedLayerError(f"its group size may be {fitting[0]} or {fitting[1]}")
        stored = {name: f"{module}.{name}" for name in parts}
        weights[f"{module}.weight"] = QuantizedWeight(shape, bits, fitting[0], stored)
    return weights


def _describe_parts(module: str, folder: Path, parts: Mapping[str, Entry]) -> str:
    listed = ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in parts.items())
    return f"{module} in {folder}: {listed or 'no tensors'}"


def _check_types(
    parts: Mapping[str, Entry], types: Mapping[str, Set[str]], needed: Set[str], text: str
) -> None:
    """Raise `DamagedModelError` for a missing tensor or an unsupported type."""
    if missing := sorted(needed - parts.keys()):
        raise DamagedModelError(f"{text}: there is no {missing[0]}")
    if wrong := [name for name, part in parts.items() if part.dtype not in types[name]]:
        raise DamagedModelError(f"{text}: the type of {wrong[0]} is not supported")


def _check_parts(parts: Mapping[str, Entry], values: str, scheme: Scheme, text: str) -> None:
    """Raise an error for missing, unexpected or unsupported tensors of a weight."""
    is_packed = values == "weight_packed"
    packed = frozenset({"I8" if values == "weight" else "I32"})
    _, scales, zeros, group_index = NAMES[scheme.method]
    types = {values: packed, scales: _SCALE_TYPES, zeros: packed}
    types |= {group_index: _INDEX_TYPES, _SHAPE: _INDEX_TYPES}
    needed = {
        scales: True,
        zeros: scheme.has_zeros is not False,
        group_index: not scheme.is_ordered,
        _SHAPE: is_packed,
    }
    _check_types(parts, types, {name for name in needed if needed[name]}, text)
    # Zero points of unpacked values are used even if config.json says that there are none.
    if is_packed and scheme.has_zeros is False and zeros in parts:
        raise DamagedModelError(f"{text}: there is {zeros}, but config.json has no zero points")
    if _SHAPE in parts and parts[_SHAPE].shape != (2,):
        raise DamagedModelError(f"{text}: {_SHAPE} is not two numbers")
    if len(shape := parts[scales].shape) != 2:
        raise UnsupportedLayerError(f"its weights have scales of the shape {list(shape)}")


def _find_shape(
    scheme: Scheme, values: str, shapes: Mapping[str, tuple[int, ...]], text: str
) -> tuple[tuple[int, int], int, int]:
    """Return a weight's shape, its bits and its number of groups.

    Raises `DamagedModelError` unless the shapes of all tensors agree.
    """
    misfit = DamagedModelError(f"{text} do not fit together, or do not fit config.json")
    names = NAMES[scheme.method]
    size, scales = shapes[values], shapes[names.scales]
    is_compressed = scheme.method == "compressed-tensors"
    if len(size) != 2:
        raise misfit
    bits = min(scheme.bits)
    if values == "weight":
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
    packed_outputs = -(-outputs // fields)
    expected: dict[str, tuple[int, ...]] = {names.group_index: (inputs,)}
    if is_compressed:
        groups = scales[1]
        expected |= {
            names.values: (outputs, -(-inputs // fields)),
            names.scales: (outputs, groups),
            names.zeros: (outputs if values == "weight" else packed_outputs, groups),
        }
    else:
        groups = scales[0]
        expected |= {names.scales: (groups, outputs), names.zeros: (groups, packed_outputs)}
    if any(shapes.get(name, shape) != shape for name, shape in expected.items()):
        raise misfit
    return (outputs, inputs), bits, groups


_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_VALUES, _SCALES, _ZEROS, _ = NAMES["torchao"]
_TORCHAO_TYPES = {_VALUES: {"I8"}, _SCALES: _SCALE_TYPES, _ZEROS: {"I8"}}
_PREFIX = "_weight_"


def find_torchao_weights(
    folder: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> dict[str, QuantizedWeight]:
    """Return torchao's quantized weights by name.

    Raises `DamagedModelError` for tensors that do not fit together or do not fit the header, and
    `UnsupportedLayerError` for unsupported classes.
    """
    stored: dict[str, dict[str, Entry]] = defaultdict(dict)
    for name, entry in entries.items():
        module, prefix, part = name.rpartition(f".{_PREFIX}")
        if prefix:
            stored[module][_PREFIX + part] = entry
    descriptions = {
        name.removesuffix(".weight"): _read_description(name, text)
        for name, text in metadata.items()
        if name.endswith(".weight")
    }
    quantized = {name for name, fields in descriptions.items() if fields.get("_type") != "Tensor"}
    if not quantized | stored.keys():
        raise DamagedModelError(
            f"{folder} has no quantized weights, but config.json names torchao's quantization"
        )
    weights = {}
    for module in sorted(quantized | stored.keys()):
        parts = stored.get(module, {})
        text = _describe_parts(module, folder, parts)
        if module not in quantized:
            raise DamagedModelError(f"{text}: no header describes how values are stored")
        if f"{module}.weight" in entries:
            raise DamagedModelError(f"{text}: there is also a float weight")
        shape, bits, group = _read_layout(module, parts, descriptions[module], text)
        names = {name: f"{module}.{name}" for name in parts}
        weights[f"{module}.weight"] = QuantizedWeight(shape, bits, group, names)
    return weights


def _read_description(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object that describes a tensor in a header."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DamagedModelError(
            f"the description of {name} in a header is {text[:80]!r}; allowed: a JSON object"
        )
    return fields


def _read_layout(
    module: str, parts: Mapping[str, Entry], fields: Mapping[str, Any], text: str
) -> tuple[tuple[int, int], int, int]:
    """Return a weight's shape, its bits, and the number of inputs in a group."""
    kind, data, listed = (fields.get(k) for k in ("_type", "_data", "_tensor_data_names"))
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
        raise UnsupportedLayerError(f"its target_dtype is {dtype!r}; allowed: int8, int4")
    names = {f"{_PREFIX}{name}" for name in listed} if isinstance(listed, list) else set()
    if unsupported := sorted(names - _TORCHAO_TYPES.keys()):
        raise UnsupportedLayerError(f"{text}: {unsupported[0]} is not supported")
    listed_parts = {name: part for name, part in parts.items() if name in names}
    _check_types(listed_parts, _TORCHAO_TYPES, names | {_VALUES, _SCALES}, text)
    if unlisted := sorted(parts.keys() - names):
        raise DamagedModelError(f"{text}: its header does not name {unlisted[0]}")
    shape, group = _fit_blocks(parts, data.get("block_size"), text)
    return shape, 8 if dtype == "int8" else 4, group


def _fit_blocks(
    parts: Mapping[str, Entry], block: object, text: str
) -> tuple[tuple[int, int], int]:
    """Return a weight's shape and the number of inputs in a group. block: `[rows, group]`.

    Raises `DamagedModelError` unless the shapes of all tensors agree.
    """
    misfit = DamagedModelError(f"{text} do not fit together, or do not fit blocks of {block}")
    if not (isinstance(block, list) and [type(size) for size in block] == [int, int]):
        raise misfit
    rows, group = block
    shape = parts[_VALUES].shape
    if len(shape) != 2 or min(*shape, rows, group) < 1:
        raise misfit
    outputs, inputs = shape
    steps = outputs // rows, inputs // group
    is_divided = outputs % rows == inputs % group == 0
    if not is_divided or any(parts[name].shape != steps for name in parts.keys() - {_VALUES}):
        raise misfit
    return (outputs, inputs), group
