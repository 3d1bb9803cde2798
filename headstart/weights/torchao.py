"""Which tensors of a torchao checkpoint stand for a weight: its headers describe each of them.

    _weight_qdata        int8 `[outputs, inputs]`, a byte for a value of 4 bits, too
    _weight_scale        `[outputs / rows, inputs / group]`
    _weight_zero_point   int8 of the same shape; missing where all are 0

A header's metadata has, under the name of a weight, a JSON object of three fields: `_type` is the
class of the tensor, `_tensor_data_names` lists the parts that are kept of it, and `_data` holds
`block_size`, the rows and inputs that share a step, and for some classes the `target_dtype`
(torchao/prototype/safetensors/safetensors_support.py).
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.weights.prequantized_layout import NAMES, SCALE_TYPES, Module
from headstart.weights.reader import Entry
from headstart.weights.scheme import Scheme, UnsupportedLayerError, torchao_bits

__all__ = ["check_pickle", "find_described"]

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
    """The quantised weights by name.

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
    quantised = {module for module, one in about.items() if one.get("_type") != "Tensor"}
    if not quantised | held.keys():
        raise DamagedModelError(f"{folder}: by config.json torchao quantised weights, and none is")
    modules = {}
    for module in sorted(quantised | held.keys()):
        parts = held.get(module, {})
        listed = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in parts.items())
        told = f"{module} in {folder}: {listed or 'no tensors'}"
        if module not in quantised:
            raise DamagedModelError(f"{told}, of which no header says how values are kept")
        if f"{module}.weight" in entries:
            raise DamagedModelError(f"{told} stand beside a weight in float")
        modules[f"{module}.weight"] = _find_module(module, scheme, parts, about[module], told)
    return modules


def _describe(name: str, text: str) -> dict[str, Any]:
    """What a header says of a tensor."""
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
    group = _find_group(block, held)
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
    types = {_WORDS: {"I8"}, _SCALES: SCALE_TYPES, _ZEROS: {"I8"}}
    if wrong := [name for name, entry in held.items() if entry.dtype not in types[name]]:
        raise DamagedModelError(f"{told}: the type of {wrong[0]} is not read")


def _find_group(block: object, held: Mapping[str, Entry]) -> int | None:
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
