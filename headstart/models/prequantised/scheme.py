"""What a `quantization_config` says of a checkpoint's weights."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from headstart.models.dense.shape import OtherKind

__all__ = ["Method", "Scheme", "is_read", "read_scheme"]

Method = Literal["awq", "gptq", "compressed-tensors"]
_METHODS: tuple[Method, ...] = get_args(Method)
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


class Scheme(NamedTuple):
    """How weights are kept, as far as their tensors do not show it.

    bits: of a value; 0 where the tensors show it. zeros_less: what the file's zero points lack.
    """

    method: Method
    bits: int = 0
    zeros_less: int = 0


def read_scheme(content: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model's config.json, None if its weights are floats.

    Raises `OtherKind` for one that is not read here.
    """
    given = content.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method not in _METHODS:
        raise OtherKind(f"its weights are quantised by {method!r}: {', '.join(_METHODS)} are read")
    return _READ[method](given)


def is_read(content: Mapping[str, Any]) -> bool:
    """Whether weights that config.json says of are floats, or read here."""
    try:
        read_scheme(content)
    except OtherKind:
        return False
    return True


def _read_awq(given: Mapping[str, Any]) -> Scheme:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise OtherKind(f"its weights are AWQ's of version {version!r}, and not gemm")
    return Scheme("awq", _bits(given, 4))


def _read_gptq(given: Mapping[str, Any]) -> Scheme:
    if given.get("dynamic"):
        raise OtherKind("its layers are GPTQ's of several kinds (dynamic)")
    layout = given.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise OtherKind(f"its weights are GPTQ's of the format {layout!r}")
    return Scheme("gptq", _bits(given, 4, 8), zeros_less=int(layout == "gptq"))


def _bits(given: Mapping[str, Any], *read: int) -> int:
    bits = given.get("bits")
    if bits not in read:
        raise OtherKind(f"its weights have {bits!r} bits, and not {' or '.join(map(str, read))}")
    return int(bits)


def _read_compressed(given: Mapping[str, Any]) -> Scheme:
    layout = given.get("format")
    if layout not in _FORMATS:
        raise OtherKind(f"its weights are compressed-tensors' of the format {layout!r}")
    for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if given.get(name):
            raise OtherKind(f"its weights are compressed-tensors' with a {name}")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise OtherKind("its quantization_config has no config_groups")
    for group in groups.values():
        _check_weights(group.get("weights"))
        _check_inputs(group.get("input_activations"))
        if group.get("output_activations"):
            raise OtherKind("its layers' outputs are quantised")
    return Scheme("compressed-tensors")


def _check_weights(given: Any) -> None:
    kind = (given.get("type"), given.get("num_bits")) if isinstance(given, Mapping) else None
    if kind not in (("int", 4), ("int", 8)):
        raise OtherKind(f"its weights are compressed-tensors' of {kind}, and not int of 4 or 8")


def _check_inputs(given: Any) -> None:
    """Inputs in 8 bits are read: here they have more."""
    if given and (given.get("type"), given.get("num_bits")) != ("int", 8):
        raise OtherKind("its layers' inputs are rounded to something other than int of 8 bits")
    if given and not given.get("dynamic"):
        raise OtherKind("its layers' inputs are rounded by scales of the file")


_READ = {"awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed}
