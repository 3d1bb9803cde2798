"""The `quantization_config` of a checkpoint."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from headstart.validation import Allowed, Either, Number, OneOf


class UnsupportedLayerError(Exception):
    """Raised for layers or weights that headstart's own modules do not support."""


Method = Literal["awq", "gptq", "compressed-tensors", "torchao"]
_METHODS = OneOf(get_args(Method))
_GROUP_SIZES = Either(OneOf((-1,)), Number(int, 1))
_LAYOUTS = OneOf(("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"))
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

    bits: the possible numbers of bits of a value. groups: the possible numbers of inputs that share
    a step; -1 stands for all inputs of an output. torchao describes both in file headers instead.
    has_zeros: True if there are zero points; None if config.json does not determine this.
    is_ordered: the inputs of a group are adjacent. zero_offset: the number to add to each zero
    point in the file.
    """

    method: Method
    bits: frozenset[int]
    groups: frozenset[int]
    has_zeros: bool | None = None
    is_ordered: bool = True
    zero_offset: int = 0


def read_scheme(content: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a model's config.json, or None if its weights are floats.

    Raises `UnsupportedLayerError` for an unsupported scheme.
    """
    config = content.get("quantization_config")
    if config is None:
        return None
    config = config if isinstance(config, Mapping) else {}
    method = _read(config, "quant_method", _METHODS)
    if method == "torchao":
        kinds = config.get("quant_type")
        classes = re.findall(r'"_type": "(\w*Config)"', json.dumps(kinds))
        is_old = kinds in ("int8_weight_only", "int8_dynamic_activation_int8_weight")
        _require(
            is_old or (classes and set(classes) <= {*_TORCHAO}),
            f"quant_type is {kinds!r}; allowed: {', '.join(_TORCHAO)}",
        )
        return Scheme("torchao", frozenset({4, 8}), frozenset())
    if method == "compressed-tensors":
        return _read_compressed(config)
    bits = _read(config, "bits", OneOf((4,) if method == "awq" else (4, 8)))
    groups = frozenset({_read(config, "group_size", _GROUP_SIZES, 128)})
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        _require(version == "gemm", f"version is {version!r}; allowed: gemm")
        return Scheme("awq", frozenset({bits}), groups)
    _refuse(config, "dynamic", "rotation", "activation", "adapter")
    layout = _read(config, "checkpoint_format", OneOf(("gptq", "gptq_v2")), "gptq")
    _read(config, "pack_dtype", OneOf(("int32",)), "int32")
    is_ordered = not config.get("desc_act")
    zero_offset = int(layout == "gptq")
    return Scheme("gptq", frozenset({bits}), groups, None, is_ordered, zero_offset)


def is_supported(content: Mapping[str, Any]) -> bool:
    """Return True if weights are floats according to config.json, or have a supported scheme."""
    try:
        read_scheme(content)
    except UnsupportedLayerError:
        return False
    return True


def _require(is_right: object, problem: str) -> None:
    if not is_right:
        raise UnsupportedLayerError(f"its {problem}")


def _read(config: Mapping[str, Any], name: str, allowed: Allowed, default: Any = None) -> Any:
    value = config.get(name, default)
    _require(value in allowed, f"{name} is {value!r}; allowed: {allowed}")
    return value


def _refuse(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        _require(not config.get(name), f"{name} is {config.get(name)!r}, which is not supported")


def _read_compressed(config: Mapping[str, Any]) -> Scheme:
    _read(config, "format", _LAYOUTS)
    _refuse(config, "sparsity_config", "transform_config", "kv_cache_scheme")
    groups = config.get("config_groups")
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
        default = "group" if weights.get("group_size") else "channel"
        strategy = _read(weights, "strategy", OneOf(("channel", "group")), default)
        is_channel = strategy == "channel"
        sizes.add(-1 if is_channel else _read(weights, "group_size", _GROUP_SIZES, 128))
    _require(len(symmetric) == 1, "weights have zero points in some layers only")
    has_zeros = not symmetric.pop()
    return Scheme("compressed-tensors", frozenset(bits), frozenset(sizes), has_zeros, all(ordered))


def _check_config_group(group: Any) -> Mapping[str, Any]:
    """Return the "weights" of a config group; raises `UnsupportedLayerError` if unsupported."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UnsupportedLayerError("its config_groups have no weights")
    _read(weights, "type", OneOf(("int",)))
    _read(weights, "num_bits", OneOf((4, 8)))
    # Rounding of a layer's inputs to 8 bits is ignored, since headstart rounds them in finer steps.
    inputs = group.get("input_activations")
    is_ignored = isinstance(inputs, Mapping) and inputs.get("dynamic")
    is_ignored = is_ignored and (inputs.get("type"), inputs.get("num_bits")) == ("int", 8)
    _require(
        not inputs or is_ignored,
        f"input_activations are {inputs!r}; allowed: dynamic true, type int, num_bits 8",
    )
    _refuse(group, "output_activations")
    return weights
