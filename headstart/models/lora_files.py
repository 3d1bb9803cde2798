"""LoRA adapters in PEFT's files. An adapter that is not fully supported is refused.

`adapter_config.json` has the layers that an adapter changes, their ranks and scales. Training
options are ignored. Unknown options, and options that do more than add `B @ A` to linear layers,
are refused unless their value is false or empty. Source: PEFT 0.18, `LoraConfig`,
`check_target_module_exists`, `get_pattern_key`.

An adapter's identity is a digest of the names, shapes, scales and bytes of its matrices, each field
with its length in front. It does not cover the adapter's name, path and training settings. So the
same weights under two names are one adapter, and new weights under an old name are a new adapter.
"""

import hashlib
import math
import re
import struct
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor

from headstart.errors import (
    AdapterNotFoundError,
    DamagedAdapterError,
    DamagedModelError,
    UnsupportedAdapterError,
)
from headstart.models.decoder import DecoderModel, Widths
from headstart.models.files import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"


# The allowed values of options. The first value is the default.
_FIXED = {"peft_type": (None, "LORA"), "task_type": (None, "CAUSAL_LM"), "bias": ("none",)}
# Options of training, merging and provenance, which do not affect a forward pass.
_SKIPPED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("lora_dropout", "eva_config", "corda_config", "loftq_config", "runtime_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    "init_lora_weights",
}
# These initializations change the base weights, and the adapter needs the changed weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")

_MATRIX = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT also saves the base weights of a targeted output layer.
_BASE = re.compile(r"base_model\.model\.(?P<layer>.+?)(\.base_layer)?\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@strict
@dataclass(kw_only=True)
class LoraSettings:
    """The options of an adapter that have an effect, with PEFT's names and checked types."""

    r: int
    lora_alpha: int | float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int | float] = field(default_factory=dict)
    target_modules: list[str] | str = field(default_factory=list)
    exclude_modules: list[str] | str = field(default_factory=list)
    layers_to_transform: list[int] | int = field(default_factory=list)
    layers_pattern: list[str] | str = field(default_factory=list)

    @property
    def is_all_linear(self) -> bool:
        """True if the adapter changes all linear layers except the output layer."""
        return str(self.target_modules).lower() == ALL_LINEAR

    def is_target(self, name: str) -> bool:
        """Return True if the adapter changes the linear layer of this dotted name."""
        targets, layers = self.target_modules, self.layers_to_transform
        if self.exclude_modules and _matches(self.exclude_modules, name):
            return False
        if self.is_all_linear:
            return True
        if not _matches(targets, name):
            return False
        if isinstance(targets, str) or name in targets or layers == []:
            return True
        patterns = self.layers_pattern
        patterns = [patterns] if isinstance(patterns, str) else patterns
        for pattern in list(filter(None, patterns)) or [r"[^.]*"]:
            if match := re.match(rf".*\.{pattern}\.(\d+)\.", name):
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def rank_of(self, name: str) -> int:
        """Return the number of rows of A, which is the number of columns of B."""
        return int(_by_pattern(self.rank_pattern, name, self.r))

    def scale_of(self, name: str) -> float:
        """Return the factor of `B @ A`: alpha over the rank, or over its square root (rsLoRA)."""
        rank = self.rank_of(name)
        alpha = _by_pattern(self.alpha_pattern, name, self.lora_alpha)
        return float(alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(names: str | list[str], name: str) -> bool:
    """Return True if a dotted name matches a regular expression, or one of several names.

    names: complete dotted names, or their last parts.
    """
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return name in names or any(name.endswith(f".{end}") for end in names)


def _by_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def read_settings(folder: Path, max_rank: int) -> LoraSettings:
    """Read the configuration of the adapter in `folder`.

    Raises `AdapterNotFoundError`, `DamagedAdapterError`, or `UnsupportedAdapterError` for an
    adapter that is not LoRA on linear layers or has a rank above `max_rank`.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        problem = "is not a folder" if not folder.is_dir() else f"has no {CONFIG_NAME}"
        raise AdapterNotFoundError(f"{folder} is not an adapter, as it {problem}")
    try:
        content = read_json(file)
    except DamagedModelError as error:
        raise DamagedAdapterError(str(error)) from error
    _check_options(file, content)
    names = {option.name for option in fields(LoraSettings)}
    options = {name: content[name] for name in names if content.get(name) is not None}
    try:
        settings = LoraSettings(**options)
    except (TypeError, StrictDataclassError) as error:  # TypeError: a required option is missing
        raise DamagedAdapterError(f"{file}: {' '.join(str(error).split())}") from error
    for name, rank in {**settings.rank_pattern, "r": settings.r}.items():
        if rank < 1:
            raise DamagedAdapterError(f"{file}: {name} is {rank}; allowed: at least 1")
        if rank > max_rank:
            raise UnsupportedAdapterError(
                f"{file}: rank {rank} ({name}) is above max_lora_rank, which is {max_rank}"
            )
    for name, alpha in {**settings.alpha_pattern, "lora_alpha": settings.lora_alpha}.items():
        if not abs(alpha) <= sys.float_info.max:  # also true for NaN
            raise DamagedAdapterError(f"{file}: {name} is {alpha}; allowed: a finite number")
    selections = [settings.target_modules, settings.exclude_modules]
    patterns = [*settings.rank_pattern, *settings.alpha_pattern]
    patterns += [entry for entry in selections if isinstance(entry, str)]
    layers = settings.layers_pattern
    for pattern in [*patterns, *([layers] if isinstance(layers, str) else layers)]:
        try:
            re.compile(pattern)
        except re.error as error:
            raise DamagedAdapterError(
                f"{file}: {pattern!r} is not a regular expression: {error}"
            ) from error
    if not settings.target_modules:
        raise UnsupportedAdapterError(f"{file} has no target_modules")
    return settings


def _check_options(file: Path, content: Mapping[str, Any]) -> None:
    """Raise UnsupportedAdapterError for the first option that is not supported."""
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
    options = {option.name for option in fields(LoraSettings)} | _FIXED.keys() | _SKIPPED
    for name, value in content.items():
        if name not in options and value not in (None, False, [], {}, ""):
            raise UnsupportedAdapterError(f"{file}: {name} is {value!r}, which is not supported")


class LoraPair(NamedTuple):
    """The matrices of one layer's update `x @ down.T @ up.T`.

    down: `[rank, inputs]`. up: `[outputs, rank]`, multiplied by the adapter's scale.
    """

    down: Tensor
    up: Tensor


class LoraWeights(NamedTuple):
    """An adapter's matrices by layer, in the model's dtype, and the digest of its content."""

    digest: str
    pairs: Mapping[str, LoraPair]


def read_weights(folder: Path, model: DecoderModel, max_rank: int) -> LoraWeights:
    """Read the adapter in `folder` and check it against its configuration and the model.

    The files are read completely, so later changes have no effect. Raises `AdapterNotFoundError`,
    `DamagedAdapterError` or `UnsupportedAdapterError`.
    """
    settings = read_settings(folder, max_rank)
    file = folder / WEIGHTS_NAME
    matrices, linear = _read_matrices(file, model), model.linear_widths()
    stored_names = _match_names(matrices.keys(), linear.keys())
    _check_layers(file, matrices.keys(), settings, stored_names, model)
    digest = hashlib.sha256(b"headstart/lora/1")
    pairs = {}
    for layer in sorted(layer for layer, name in stored_names.items() if name in matrices):
        name = stored_names[layer]
        down, up = matrices[name].get("A"), matrices[name].get("B")
        if down is None or up is None:
            raise DamagedAdapterError(f"{file} has only one of the two matrices of {name}")
        _check_pair(f"{file}: A and B of {name}", down, up, settings.rank_of(name), linear[layer])
        scale = settings.scale_of(name)
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
                f"{file}: the matrices of {name} are not finite in {model.dtype}"
            )
        pairs[layer] = pair
    return LoraWeights(digest.hexdigest(), pairs)


def _read_matrices(file: Path, model: DecoderModel) -> dict[str, dict[str, Tensor]]:
    """Return the matrices "A" and "B" of each layer.

    Ignores copies of the model's weights. Raises an error for any other tensor.
    """
    if not file.is_file():
        files = sorted(path.name for path in file.parent.glob("adapter_model*"))
        hint = f"; headstart does not read {', '.join(files)}" if files else ""
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
                f"{file} has {name}, which is neither A nor B of a linear layer, nor a copy of "
                "one of this model's weights"
            )
    if not matrices:
        raise DamagedAdapterError(f"{file} has no matrices")
    return matrices


# Name prefixes of decoder layers. The first two are those of models with several parts, in new and
# old files; the last is that of text models. The first prefix that occurs is used.
_BODIES = ("model.language_model.", "language_model.model.", "model.")


def _match_names(layers: Set[str], linear: Set[str]) -> dict[str, str]:
    """Map each linear layer's name in the model to its name in the adapter's file.

    The names may differ if the adapter was trained on a model with several parts, since headstart
    runs only the decoder of such a model. layers: the names of layers in the adapter's file.
    linear: the names of linear layers in the model.
    """
    adapter_body, model_body = (
        next((body for body in _BODIES if any(name.startswith(body) for name in names)), "")
        for names in (layers, linear)
    )
    if layers <= linear or not adapter_body or not model_body:
        return {name: name for name in linear}
    return {
        name: adapter_body + name.removeprefix(model_body) if name.startswith(model_body) else name
        for name in linear
    }


def _check_layers(
    file: Path,
    layers: Set[str],
    settings: LoraSettings,
    stored_names: Mapping[str, str],
    model: DecoderModel,
) -> None:
    """Raise an error unless the file has exactly the layers that the configuration selects."""
    linear = set(stored_names.values())
    unknown = layers - linear
    if within := {name for name in unknown if name.startswith(model.without_adapters)}:
        raise UnsupportedAdapterError(
            f"{file} changes {_some(within)}: adapters are not applied to recurrent layers that "
            "transformers computes; allowed: adapters of other layers"
        )
    if unknown:
        raise UnsupportedAdapterError(
            f"{file} is for another model, or for layers that are not linear, as "
            f"{_some(unknown)} is not a linear layer of this model"
        )
    targets = {name for name in linear if settings.is_target(name)}
    if settings.is_all_linear:
        targets.discard(stored_names.get(model.output_layer or "", ""))
    if missing := targets - layers:
        raise DamagedAdapterError(
            f"{file} lacks the matrices of {_some(missing)}, which target_modules names"
        )
    if surplus := layers - targets:
        raise DamagedAdapterError(
            f"{file} has matrices of {_some(surplus)}, which target_modules does not name"
        )


def _check_pair(pair: str, down: Tensor, up: Tensor, rank: int, widths: Widths) -> None:
    if {down.dtype, up.dtype} - {*_DTYPES}:
        raise UnsupportedAdapterError(
            f"{pair} are {down.dtype} and {up.dtype}; supported: {', '.join(map(str, _DTYPES))}"
        )
    ranks = {down.shape[0], up.shape[1]} if down.dim() == up.dim() == 2 else set()
    if ranks != {rank}:
        raise DamagedAdapterError(
            f"{pair} are {list(down.shape)} and {list(up.shape)}; the configuration requires rank "
            f"{rank}"
        )
    if (down.shape[1], up.shape[0]) != widths:
        raise UnsupportedAdapterError(
            f"{pair} are for another model: they have {down.shape[1]} inputs and {up.shape[0]} "
            f"outputs, and this model's layer has {widths.inputs} and {widths.outputs}"
        )


def _some(names: Set[str]) -> str:
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + suffix
