"""The `quantization_config` of a checkpoint."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args


class UnsupportedLayerError(Exception):
    """Raised for layers or weights that headstart's own modules do not support."""


Method = Literal["awq", "gptq", "compressed-tensors", "torchao"]
_METHODS: tuple[Method, ...] = get_args(Method)
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
# torchao's supported configurations. File headers describe each weight.
_TORCHAO = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "FqnToConfig",
    "ModuleFqnToConfig",
)


class Scheme(NamedTuple):
    """The storage of quantized weights.

    bits, groups: the possible numbers of bits of a value, and of inputs that share a step (-1: all
    inputs of an output). For torchao, file headers have the actual ones. has_zeros: True if there
    are zero points; None if the method determines this. is_ordered: the inputs of a group are
    adjacent. zero_offset: the number to add to each zero point in the file.
    """

    method: Method
    bits: frozenset[int]
    groups: frozenset[int]
    has_zeros: bool | None = None
    is_ordered: bool = True
    zero_offset: int = 0


def read_scheme(content: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a model's config.json, None if its weights are floats.

    Raises `UnsupportedLayerError` for an unsupported scheme.
    """
    config = content.get("quantization_config")
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    _require(
        method in _METHODS, f"weights are quantized by {method!r}: {', '.join(_METHODS)} are read"
    )
    if method == "torchao":
        kinds = config.get("quant_type")
        classes = re.findall(r'"_type": "(\w*Config)"', json.dumps(kinds))
        is_old = kinds in ("int8_weight_only", "int8_dynamic_activation_int8_weight")
        _require(
            is_old or (classes and set(classes) <= {*_TORCHAO}),
            f"weights are torchao's of {kinds!r}: {', '.join(_TORCHAO)} are read",
        )
        return Scheme("torchao", frozenset({4, 8}), frozenset())
    if method == "compressed-tensors":
        return _read_compressed(config)
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        _require(version == "gemm", f"weights are AWQ's of version {version!r}, and not gemm")
        return Scheme("awq", _read_bits(config, 4), _read_group(config))
    _refuse(config, "dynamic", "rotation", "activation", "adapter")
    layout, pack_dtype = config.get("checkpoint_format", "gptq"), config.get("pack_dtype", "int32")
    _require(layout in ("gptq", "gptq_v2"), f"weights are GPTQ's of the format {layout!r}")
    _require(pack_dtype == "int32", f"weights are packed in {pack_dtype!r}, and not int32")
    return Scheme(
        "gptq",
        _read_bits(config, 4, 8),
        _read_group(config),
        is_ordered=not config.get("desc_act"),
        zero_offset=int(layout == "gptq"),
    )


def is_read(content: Mapping[str, Any]) -> bool:
    """Return True if weights are floats according to config.json, or have a supported scheme."""
    try:
        read_scheme(content)
    except UnsupportedLayerError:
        return False
    return True


def _require(is_right: object, problem: str) -> None:
    if not is_right:
        raise UnsupportedLayerError(f"its {problem}")


def _refuse(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        _require(not config.get(name), f"weights are {config['quant_method']}'s with {name}")


def _read_bits(config: Mapping[str, Any], *allowed: int) -> frozenset[int]:
    bits: Any = config.get("bits")
    is_right = type(bits) is int and bits in allowed
    _require(is_right, f"bits is {bits!r}; allowed: {' or '.join(map(str, allowed))}")
    return frozenset({bits})


def _read_group(config: Mapping[str, Any]) -> frozenset[int]:
    size = config.get("group_size", 128)
    is_right = type(size) is int and (size == -1 or size > 0)
    _require(is_right, f"group_size is {size!r}; allowed: -1 or above 0")
    return frozenset({size})


def _read_compressed(config: Mapping[str, Any]) -> Scheme:
    layout, groups = config.get("format"), config.get("config_groups")
    _require(layout in _FORMATS, f"weights are compressed-tensors' of the format {layout!r}")
    _refuse(config, "sparsity_config", "transform_config", "kv_cache_scheme")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedLayerError("its quantization_config has no config_groups")
    bits: set[int] = set()
    sizes: set[int] = set()
    symmetric, ordered = set(), set()
    for group in groups.values():
        weights = _check_config_group(group)
        bits.add(weights["num_bits"])
        symmetric.add(weights.get("symmetric", True) is not False)
        ordered.add(weights.get("actorder") in (None, False, "weight", "static"))
        strategy = weights.get("strategy", "group" if weights.get("group_size") else "channel")
        _require(
            strategy in ("channel", "group"),
            f"weights have steps by {strategy!r}, and not by group or channel",
        )
        sizes |= {-1} if strategy == "channel" else _read_group(weights)
    _require(len(symmetric) == 1, "weights have zero points in some layers only")
    return Scheme(
        "compressed-tensors",
        frozenset(bits),
        frozenset(sizes),
        has_zeros=not symmetric.pop(),
        is_ordered=all(ordered),
    )


def _check_config_group(group: Any) -> Mapping[str, Any]:
    """Return the "weights" of a config group; raises UnsupportedLayerError if unsupported."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UnsupportedLayerError("its config_groups have no weights")
    kind = weights.get("type"), weights.get("num_bits")
    _require(
        kind in (("int", 4), ("int", 8)),
        f"weights are compressed-tensors' of {kind}, and not int of 4 or 8",
    )
    inputs = group.get("input_activations")
    if inputs:  # rounding of inputs to 8 bits is ignored: headstart uses finer steps
        _require(isinstance(inputs, Mapping), "config_groups have unknown input_activations")
        _require(
            (inputs.get("type"), inputs.get("num_bits")) == ("int", 8),
            "layers' inputs are rounded to something other than int of 8 bits",
        )
        _require(inputs.get("dynamic"), "layers' inputs are rounded by scales of the file")
    _require(not group.get("output_activations"), "layers' outputs are quantized")
    return weights
