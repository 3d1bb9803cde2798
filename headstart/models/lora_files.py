"""LoRA adapters in PEFT's files; an adapter that could be applied only in part is refused.

`adapter_config.json` names the layers that an adapter changes, their ranks and scales. Training
options are skipped. Options that change the model other than by adding `B @ A` to linear layers are
refused by name, and so are unknown options of a later PEFT, unless they are switched off. Source:
PEFT 0.18, `LoraConfig`, `check_target_module_exists`, `get_pattern_key`.

An adapter's identity is a digest of its effect: names, shapes, scales and bytes of its matrices,
each field with its length in front. The adapter's name, path and training settings are not part of
it. So the same weights under two names are one adapter, and new weights under an old name are a
new adapter.
"""

import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from headstart.errors import AdapterNotFoundError, DamagedAdapterError, UnsupportedAdapterError
from headstart.models.decoder import DecoderModel, Widths

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # false for NaN


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_list(value: object, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_object(value: object, check: Callable[[Any], bool]) -> bool:
    return (
        isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(check, value.values()))
    )


def _are_layers(value: object) -> bool:
    return _is_pattern(value) or _is_list(value, lambda name: isinstance(name, str))


# The options that are read, and their values besides null.
_READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a rank: an integer of at least 1"),
    "lora_alpha": (_is_number, "a number that a float can hold"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "rank_pattern": (
        lambda value: _is_object(value, _is_rank),
        "an object of ranks by regular expression",
    ),
    "alpha_pattern": (
        lambda value: _is_object(value, _is_number),
        "an object of numbers by regular expression",
    ),
    "target_modules": (_are_layers, "a list of names or a regular expression"),
    "exclude_modules": (_are_layers, "a list of names or a regular expression"),
    "layers_to_transform": (
        lambda value: type(value) is int or _is_list(value, lambda layer: type(layer) is int),
        "an integer or a list of them",
    ),
    "layers_pattern": (
        lambda value: _is_pattern(value) or _is_list(value, _is_pattern),
        "a regular expression or a list of them",
    ),
}
_REQUIRED = ("r", "lora_alpha")
# The options that may have these values only; the first is the default.
_FIXED = {"peft_type": (None, "LORA"), "task_type": (None, "CAUSAL_LM"), "bias": ("none",)}
# Options of training, merging and provenance; they have no effect on a forward pass.
_SKIPPED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("lora_dropout", "eva_config", "corda_config", "loftq_config", "runtime_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    "init_lora_weights",
}
# These initialisations change the base weights, and the adapter needs the changed ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")

_MATRIX = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT saves the base weights of a targeted output layer, too.
_BASE = re.compile(r"base_model\.model\.(?P<layer>.+?)(\.base_layer)?\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The linear layers that an adapter changes, with their ranks and scales."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layer_lists: tuple[str, ...]

    def is_target(self, name: str) -> bool:
        """Return True if the adapter changes the linear layer of this dotted name."""
        if self.excluded and _names(self.excluded, name):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _names(self.targets, name):
            return False
        if isinstance(self.targets, str) or name in self.targets or not self.layers:
            return True
        for layer_list in self.layer_lists or (r"[^.]*",):
            if match := re.match(rf".*\.{layer_list}\.(\d+)\.", name):
                return int(match[1]) in self.layers
        return False

    def rank_of(self, name: str) -> int:
        """Return the rows of A, which are the columns of B."""
        return int(_by_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return the factor of `B @ A`: alpha over the rank, or over its root (rsLoRA)."""
        rank = self.rank_of(name)
        alpha = _by_pattern(self.alphas, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _names(wanted: str | tuple[str, ...], name: str) -> bool:
    """Return True if an expression matches the whole name, or a list has the name or its end."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return name in wanted or any(name.endswith(f".{end}") for end in wanted)


def _by_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def read_settings(folder: Path, max_rank: int) -> LoraSettings:
    """Read the configuration of the adapter in `folder`.

    Raises AdapterNotFoundError, DamagedAdapterError, and UnsupportedAdapterError for an adapter
    that is not LoRA on linear layers or has a rank above `max_rank`.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        what = "is not a folder" if not folder.is_dir() else f"has no {CONFIG_NAME}"
        raise AdapterNotFoundError(f"{folder} is not an adapter: it {what}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedAdapterError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedAdapterError(f"{file} holds a {type(content).__name__}, not a JSON object")
    _check_options(file, content)
    options = {name: content[name] for name in _READ if content.get(name) is not None}
    ranks: dict[str, int] = options.get("rank_pattern", {})
    for name, rank in {"r": options["r"], **ranks}.items():
        if rank > max_rank:
            raise UnsupportedAdapterError(
                f"{file}: rank {rank} ({name}) is above max_lora_rank, which is {max_rank}"
            )
    targets, excluded = (
        value if isinstance(value, str) else tuple(value)
        for value in (options.get(f"{name}_modules", ()) for name in ("target", "exclude"))
    )
    if not targets:
        raise UnsupportedAdapterError(f"{file} names no target_modules")
    layers, lists = options.get("layers_to_transform", []), options.get("layers_pattern", [])
    return LoraSettings(
        rank=options["r"],
        alpha=float(options["lora_alpha"]),
        rank_stabilized=options.get("use_rslora", False),
        ranks=ranks,
        alphas={name: float(alpha) for name, alpha in options.get("alpha_pattern", {}).items()},
        targets=ALL_LINEAR if str(targets).lower() == ALL_LINEAR else targets,
        excluded=excluded,
        layers=tuple(layers if isinstance(layers, list) else [layers]),
        layer_lists=tuple(filter(None, [lists] if isinstance(lists, str) else lists)),
    )


def _check_options(file: Path, content: Mapping[str, Any]) -> None:
    """Raise an error for the first option that is not supported or has a wrong value."""
    for name, allowed in _FIXED.items():
        value = content.get(name, allowed[0])
        if value not in allowed or (name == "peft_type" and value is None):
            raise UnsupportedAdapterError(
                f"{file}: {name} is {value!r}; supported: {allowed[-1]!r}"
            )
    start = str(content.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise UnsupportedAdapterError(
            f"{file}: init_lora_weights is {start!r}, which also changes the model's own weights; "
            "save the adapter with path_initial_model_for_weight_conversion to make it plain LoRA"
        )
    known = _READ.keys() | _FIXED.keys() | _SKIPPED
    for name, value in content.items():
        if name not in known and value not in (None, False, [], {}, ""):
            raise UnsupportedAdapterError(f"{file}: {name} is {value!r}, which is not supported")
    for name, (is_valid, allowed_text) in _READ.items():
        value = content.get(name)
        if (value is not None or name in _REQUIRED) and not is_valid(value):
            raise DamagedAdapterError(f"{file}: {name} is {value!r}; it must be {allowed_text}")


class LoraPair(NamedTuple):
    """One layer's update `x @ down.T @ up.T`; `[rank, inputs]` and `[outputs, rank]`.

    The adapter's scale is multiplied into `up`.
    """

    down: Tensor
    up: Tensor


class LoraWeights(NamedTuple):
    """An adapter's matrices by layer, in the model's dtype, and the digest that names them."""

    digest: str
    pairs: Mapping[str, LoraPair]


def read_weights(folder: Path, model: DecoderModel, max_rank: int) -> LoraWeights:
    """Read the adapter in `folder` and check it against its configuration and the model.

    The files are read once and completely; later changes to them have no effect. Raises
    AdapterNotFoundError, DamagedAdapterError or UnsupportedAdapterError.
    """
    settings = read_settings(folder, max_rank)
    file = folder / WEIGHTS_NAME
    matrices, linear = _read_matrices(file, model), model.linear_widths()
    _check_layers(file, matrices.keys(), linear, settings, model.output_layer)
    digest = hashlib.sha256(b"headstart/lora/1")
    pairs = {}
    for layer in sorted(matrices):
        down, up = matrices[layer].get("A"), matrices[layer].get("B")
        if down is None or up is None:
            raise DamagedAdapterError(f"{file} has one of the two matrices of {layer}, not both")
        _check_pair(f"{file}: A and B of {layer}", down, up, settings.rank_of(layer), linear[layer])
        scale = settings.scale_of(layer)
        parts = [layer.encode(), struct.pack("<d", scale)]
        for tensor in (down, up):
            parts.append(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        scaled = up if scale == 1.0 else up.double() * scale  # rounded once, below
        pair = LoraPair(*(m.to(model.device, model.dtype).contiguous() for m in (down, scaled)))
        if not all(bool(torch.isfinite(side).all()) for side in pair):
            raise DamagedAdapterError(
                f"{file}: the matrices of {layer} are not finite in {model.dtype}"
            )
        pairs[layer] = pair
    return LoraWeights(digest.hexdigest(), pairs)


def _read_matrices(file: Path, model: DecoderModel) -> dict[str, dict[str, Tensor]]:
    """Return the matrices "A" and "B" of each layer; raises an error for any other tensor."""
    if not file.is_file():
        others = sorted(path.name for path in file.parent.glob("adapter_model*"))
        hint = f"; {', '.join(others)} is not read" if others else ""
        raise DamagedAdapterError(f"{file.parent} has no {WEIGHTS_NAME}{hint}")
    try:
        tensors = safetensors.torch.load(file.read_bytes())
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedAdapterError(
            f"{file} is truncated or not a safetensors file: {error}"
        ) from error
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _MATRIX.fullmatch(name):
            matrices.setdefault(match["layer"], {})[match["side"]] = tensor
        elif not ((match := _BASE.fullmatch(name)) and model.holds(match["layer"], tensor)):
            raise UnsupportedAdapterError(
                f"{file} holds {name}, which is neither A nor B of a linear layer, nor a copy of "
                "one of this model's weights"
            )
    if not matrices:
        raise DamagedAdapterError(f"{file} holds no matrices")
    return matrices


def _check_layers(
    file: Path,
    layers: Set[str],
    linear: Mapping[str, Widths],
    settings: LoraSettings,
    output_layer: str | None,
) -> None:
    """Check that the file's layers are those that the configuration names in this model."""
    if unknown := layers - linear.keys():
        raise UnsupportedAdapterError(
            f"{file} is for another model, or for layers that are not linear: "
            f"{_some(unknown)} is no linear layer of this one"
        )
    targets = {name for name in linear if settings.is_target(name)}
    if settings.targets == ALL_LINEAR:
        targets.discard(output_layer or "")
    if missing := targets - layers:
        raise DamagedAdapterError(
            f"{file} lacks the matrices of {_some(missing)}, which target_modules names"
        )
    if beyond := layers - targets:
        raise DamagedAdapterError(
            f"{file} holds matrices of {_some(beyond)}, which target_modules does not name"
        )


def _check_pair(what: str, down: Tensor, up: Tensor, rank: int, widths: Widths) -> None:
    if {down.dtype, up.dtype} - {*_DTYPES}:
        raise UnsupportedAdapterError(
            f"{what} are {down.dtype} and {up.dtype}; supported: {', '.join(map(str, _DTYPES))}"
        )
    ranks = {down.shape[0], up.shape[1]} if down.dim() == up.dim() == 2 else set()
    if ranks != {rank}:
        raise DamagedAdapterError(
            f"{what} are {list(down.shape)} and {list(up.shape)}, which is not of rank {rank}, "
            "as the configuration says"
        )
    if (down.shape[1], up.shape[0]) != widths:
        raise UnsupportedAdapterError(
            f"{what} are for another model: they take {down.shape[1]} inputs to {up.shape[0]} "
            f"outputs, here the layer has {widths.inputs} and {widths.outputs}"
        )


def _some(names: Set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more
