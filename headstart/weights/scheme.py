"""The `quantization_config` of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

__all__ = [
    "Method",
    "Scheme",
    "UnsupportedLayerError",
    "is_read",
    "read_scheme",
    "torchao_bits",
]


class UnsupportedLayerError(Exception):
    """Raised for layers or weights that headstart's own modules do not run; says what they are."""


Method = Literal["awq", "gptq", "compressed-tensors", "torchao"]
_METHODS: tuple[Method, ...] = get_args(Method)
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
# torchao's configurations of weights that are read, and the part that names what shares a step.
_TORCHAO = {
    "Int8WeightOnlyConfig": "granularity",
    "Int8DynamicActivationInt8WeightConfig": "granularity",
    "IntxWeightOnlyConfig": "granularity",
    "Int8DynamicActivationIntxWeightConfig": "weight_granularity",
}


class Scheme(NamedTuple):
    """The storage of quantized weights; each fact may differ from weight to weight.

    bits: of a value. groups: inputs that share a step; -1 for all of an output's. has_zeros: zero
    points, None where the method says. is_ordered: inputs of a group lie side by side. zeros_less:
    what each zero point in the file lacks.
    """

    method: Method
    bits: frozenset[int]
    groups: frozenset[int]
    has_zeros: bool | None = None
    is_ordered: bool = True
    zeros_less: int = 0


def read_scheme(content: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model's config.json, None if its weights are floats.

    Raises `UnsupportedLayerError` for one that is not read here.
    """
    given = content.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method not in _METHODS:
        raise UnsupportedLayerError(
            f"its weights are quantized by {method!r}: {', '.join(_METHODS)} are read"
        )
    return _READ[method](given)


def is_read(content: Mapping[str, Any]) -> bool:
    """True if weights are floats by config.json, or are read here."""
    try:
        read_scheme(content)
    except UnsupportedLayerError:
        return False
    return True


def _read_awq(given: Mapping[str, Any]) -> Scheme:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedLayerError(f"its weights are AWQ's of version {version!r}, and not gemm")
    return Scheme("awq", _one_of(given, "bits", 4), _group(given))


def _read_gptq(given: Mapping[str, Any]) -> Scheme:
    _refuse(given, "dynamic", "rotation", "activation", "adapter")
    layout = given.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedLayerError(f"its weights are GPTQ's of the format {layout!r}")
    if given.get("pack_dtype", "int32") != "int32":
        raise UnsupportedLayerError(
            f"its weights are packed in {given['pack_dtype']!r}, and not int32"
        )
    return Scheme(
        "gptq",
        _one_of(given, "bits", 4, 8),
        _group(given),
        is_ordered=not given.get("desc_act"),
        zeros_less=int(layout == "gptq"),
    )


def _refuse(given: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if given.get(name):
            raise UnsupportedLayerError(f"its weights are {given['quant_method']}'s with {name}")


def _one_of(given: Mapping[str, Any], name: str, *read: int) -> frozenset[int]:
    found = given.get(name)
    if type(found) is not int or found not in read:
        raise UnsupportedLayerError(
            f"its {name} is {found!r}, and not {' or '.join(map(str, read))}"
        )
    return frozenset({found})


def _group(given: Mapping[str, Any]) -> frozenset[int]:
    found = given.get("group_size", 128)
    if type(found) is not int or not (found == -1 or found > 0):
        raise UnsupportedLayerError(f"its group_size is {found!r}, and not -1 or above 0")
    return frozenset({found})


def _read_compressed(given: Mapping[str, Any]) -> Scheme:
    layout = given.get("format")
    if layout not in _FORMATS:
        raise UnsupportedLayerError(f"its weights are compressed-tensors' of the format {layout!r}")
    _refuse(given, "sparsity_config", "transform_config", "kv_cache_scheme")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedLayerError("its quantization_config has no config_groups")
    weights = [_weights_of(group) for group in groups.values()]
    symmetric = {one.get("symmetric", True) is not False for one in weights}
    ordered = {one.get("actorder") in (None, False, "weight", "static") for one in weights}
    if len(symmetric) > 1:
        raise UnsupportedLayerError("its weights have zero points in some layers alone")
    return Scheme(
        "compressed-tensors",
        frozenset(one["num_bits"] for one in weights),
        frozenset().union(*(_group_of(one) for one in weights)),
        has_zeros=not symmetric.pop(),
        is_ordered=all(ordered),
    )


def _group_of(weights: Mapping[str, Any]) -> Iterable[int]:
    strategy = weights.get("strategy", "group" if weights.get("group_size") else "channel")
    if strategy == "channel":
        return {-1}
    if strategy != "group":
        raise UnsupportedLayerError(
            f"its weights have steps by {strategy!r}, and not by group or channel"
        )
    return _group(weights)


def _weights_of(group: object) -> Mapping[str, Any]:
    """Return the weights of a config group; raises for those that are not read."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise UnsupportedLayerError("its config_groups say nothing of weights")
    kind = weights.get("type"), weights.get("num_bits")
    if kind not in (("int", 4), ("int", 8)):
        raise UnsupportedLayerError(
            f"its weights are compressed-tensors' of {kind}, and not int of 4 or 8"
        )
    inputs = group.get("input_activations")
    if inputs and not isinstance(inputs, Mapping):
        raise UnsupportedLayerError("its config_groups say of inputs what is not read")
    # Inputs in 8 bits are read: here they have more.
    if inputs and (inputs.get("type"), inputs.get("num_bits")) != ("int", 8):
        raise UnsupportedLayerError(
            "its layers' inputs are rounded to something other than int of 8 bits"
        )
    if inputs and not inputs.get("dynamic"):
        raise UnsupportedLayerError("its layers' inputs are rounded by scales of the file")
    if group.get("output_activations"):
        raise UnsupportedLayerError("its layers' outputs are quantized")
    return weights


def _read_torchao(given: Mapping[str, Any]) -> Scheme:
    kinds = given.get("quant_type")
    if kinds in ("int8_weight_only", "int8_dynamic_activation_int8_weight"):  # transformers 4
        return Scheme("torchao", frozenset({8}), frozenset({-1}), has_zeros=False)
    if not isinstance(kinds, Mapping) or kinds.keys() != {"default"}:
        raise UnsupportedLayerError(f"its weights are torchao's of {kinds!r}")
    kind, about = _torchao_config(kinds["default"])
    configs = [(kind, about)]
    if kind in ("FqnToConfig", "ModuleFqnToConfig"):  # a configuration for each module
        named = about.get("fqn_to_config", about.get("module_fqn_to_config"))
        each = named.values() if isinstance(named, Mapping) else ()
        configs = [_torchao_config(one) for one in each if one is not None]
    if not configs:
        raise UnsupportedLayerError("its quant_type names no configuration of weights")
    read = [_torchao_weights(*config) for config in configs]
    return Scheme(
        "torchao",
        frozenset(bits for bits, _ in read),
        frozenset().union(*(groups for _, groups in read)),
        has_zeros=False,
    )


def _torchao_config(given: object) -> tuple[str, Mapping[str, Any]]:
    """The class and the fields of an object that torchao wrote as JSON."""
    kind = given.get("_type") if isinstance(given, Mapping) else None
    about = given.get("_data") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or not isinstance(about, Mapping):
        raise UnsupportedLayerError(
            f"its quant_type holds {given!r}, which is no configuration of torchao's"
        )
    return kind, about


def _torchao_weights(kind: str, about: Mapping[str, Any]) -> tuple[int, Iterable[int]]:
    """The bits and the groups of weights of one configuration."""
    if kind not in _TORCHAO:
        raise UnsupportedLayerError(
            f"its weights are torchao's of {kind}: {', '.join(_TORCHAO)} are read"
        )
    bits = torchao_bits(about.get("weight_dtype", {"_data": "int8"}))
    given = about.get(_TORCHAO[kind])
    if isinstance(given, list) and len(given) == 2:  # of inputs and of weights
        given = given[1]
    shared, sizes = ("PerRow", {}) if given is None else _torchao_config(given)
    if shared == "PerGroup":
        return bits, _group(sizes)
    if shared not in ("PerRow", "PerAxis", "PerTensor"):
        raise UnsupportedLayerError(f"its weights have steps by {shared}")
    return bits, {-1}


def torchao_bits(dtype: object) -> int:
    """The bits of a value of this dtype, which is an object that torchao wrote as JSON."""
    name = dtype.get("_data") if isinstance(dtype, Mapping) else dtype
    if name not in ("int8", "int4"):
        raise UnsupportedLayerError(f"its weights are torchao's of {name!r}, and not int8 or int4")
    return 8 if name == "int8" else 4


_READ = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "torchao": _read_torchao,
}
