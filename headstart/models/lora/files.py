"""Reads a LoRA adapter from PEFT's files; refuses an adapter that it could apply only in part.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from headstart.errors import AdapterNotFoundError, DamagedAdapterError, UnsupportedAdapterError

__all__ = [
    "AdaptableModel",
    "CONFIG_NAME",
    "LoraPair",
    "LoraSettings",
    "LoraWeights",
    "WEIGHTS_NAME",
    "read_settings",
    "read_weights",
]


CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"

# The options that are read below.
_READ = {
    *("peft_type", "task_type", "bias", "init_lora_weights"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
# Options of training, merging and provenance; they have no effect on a forward pass.
_SKIPPED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("lora_dropout", "eva_config", "corda_config", "loftq_config", "runtime_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
# These initialisations change the base weights, and the adapter needs the changed ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


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
        """True if the adapter changes the linear layer of this dotted name."""
        if self.excluded and _names(self.excluded, name):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _names(self.targets, name):
            return False
        if isinstance(self.targets, str) or name in self.targets or not self.layers:
            return True
        for layer_list in self.layer_lists or (r"[^.]*",):
            if found := re.match(rf".*\.{layer_list}\.(\d+)\.", name):
                return int(found[1]) in self.layers
        return False

    def rank_of(self, name: str) -> int:
        """Rows of A, columns of B."""
        return int(_by_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        """The factor of `B @ A`: alpha over the rank, or over its root (rsLoRA)."""
        rank = self.rank_of(name)
        alpha = _by_pattern(self.alphas, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _names(wanted: str | tuple[str, ...], name: str) -> bool:
    """True if `wanted` matches: an expression the whole name, a list of names its end too."""
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
    _refuse_other_kinds(file, content)
    reader = _Reader(file, content)
    settings = LoraSettings(
        rank=reader.rank("r", content.get("r"), max_rank),
        alpha=reader.number("lora_alpha", content.get("lora_alpha")),
        rank_stabilized=reader.flag("use_rslora"),
        ranks={k: reader.rank(k, v, max_rank) for k, v in reader.patterns("rank_pattern")},
        alphas={k: reader.number(k, v) for k, v in reader.patterns("alpha_pattern")},
        targets=reader.layer_names("target_modules"),
        excluded=reader.layer_names("exclude_modules"),
        layers=reader.numbers("layers_to_transform"),
        layer_lists=reader.layer_lists(),
    )
    if not settings.targets:
        raise UnsupportedAdapterError(f"{file} names no target_modules")
    return settings


def _refuse_other_kinds(file: Path, content: dict[str, Any]) -> None:
    kind, task = content.get("peft_type"), content.get("task_type")
    if kind != "LORA":
        raise UnsupportedAdapterError(f"{file}: peft_type is {kind!r}; only 'LORA' is supported")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedAdapterError(f"{file}: task_type is {task!r}; supported: 'CAUSAL_LM'")
    if content.get("bias", "none") != "none":
        raise UnsupportedAdapterError(
            f"{file}: bias is {content['bias']!r}: biases that were trained are not supported"
        )
    first = str(content.get("init_lora_weights", True)).lower()
    if first.startswith(_CHANGES_BASE):
        raise UnsupportedAdapterError(
            f"{file}: init_lora_weights is {first!r}, which also changes the model's own weights; "
            "save the adapter with path_initial_model_for_weight_conversion to make it plain LoRA"
        )
    for name, value in content.items():
        if name not in _READ and name not in _SKIPPED and value not in (None, False, [], {}, ""):
            raise UnsupportedAdapterError(f"{file}: {name} is {value!r}, which is not supported")


class _Reader:
    """Reads fields of the JSON object; raises DamagedAdapterError for a wrong type."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        self._file = file
        self._content = content

    def _wrong(self, name: str, value: object, wanted: str) -> DamagedAdapterError:
        return DamagedAdapterError(f"{self._file}: {name} is {value!r}; it must be {wanted}")

    def rank(self, name: str, value: object, limit: int) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a rank: an integer of at least 1")
        if value > limit:
            raise UnsupportedAdapterError(
                f"{self._file}: rank {value} ({name}) is above max_lora_rank, which is {limit}"
            )
        return value

    def number(self, name: str, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer too large for a float
                if math.isfinite(value):
                    return float(value)
        raise self._wrong(name, value, "a number that a float can hold")

    def flag(self, name: str) -> bool:
        value = self._content.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def patterns(self, name: str) -> list[tuple[str, object]]:
        found = self._content.get(name) or {}
        if not isinstance(found, dict):
            raise self._wrong(name, found, "an object")
        for pattern in found:
            self._check_pattern(name, pattern)
        return list(found.items())

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._wrong(name, pattern, f"a regular expression ({error})") from error

    def layer_names(self, name: str) -> str | tuple[str, ...]:
        found = self._content.get(name)
        if isinstance(found, str):
            if found.lower() == ALL_LINEAR:
                return ALL_LINEAR
            self._check_pattern(name, found)
            return found
        return self._texts(name, found)

    def layer_lists(self) -> tuple[str, ...]:
        found = self._content.get("layers_pattern")
        names = self._texts("layers_pattern", [found] if isinstance(found, str) else found)
        for pattern in names:
            self._check_pattern("layers_pattern", pattern)
        return tuple(filter(None, names))

    def _texts(self, name: str, found: object) -> tuple[str, ...]:
        entries = [] if found is None else found
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise self._wrong(name, found, "a list of names or a regular expression")
        return tuple(entries)

    def numbers(self, name: str) -> tuple[int, ...]:
        found = self._content.get(name)
        entries = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(entry) is int for entry in entries):
            raise self._wrong(name, found, "an integer or a list of them")
        return tuple(entries)


WEIGHTS_NAME = "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT saves the base weights of a targeted output layer, too.
_BASE = re.compile(r"base_model\.model\.(?P<layer>.+?)(\.base_layer)?\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Widths(NamedTuple):
    """The input and output width of a linear layer."""

    inputs: int
    outputs: int


class AdaptableModel(Protocol):
    """The part of a model's interface that reading an adapter needs."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def output_layer(self) -> str | None: ...

    def linear_widths(self) -> Mapping[str, Widths]:
        """The linear layers that every row of a batch passes, by dotted name."""
        ...

    def holds(self, name: str, weight: Tensor) -> bool:
        """True if the layer of this dotted name was made of this weight."""
        ...


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


def read_weights(folder: Path, model: AdaptableModel, max_rank: int) -> LoraWeights:
    """Read the adapter in `folder` and check it against its configuration and the model.

    The files are read once and completely; later changes to them have no effect. Raises
    AdapterNotFoundError, DamagedAdapterError or UnsupportedAdapterError.
    """
    settings = read_settings(folder, max_rank)
    file = folder / WEIGHTS_NAME
    matrices = _sort_tensors(file, _load(file), model)
    linear = model.linear_widths()
    _check_layers(file, set(matrices), linear)
    targets = {name for name in linear if settings.is_target(name)}
    if settings.targets == ALL_LINEAR:
        targets.discard(model.output_layer or "")
    _check_targets(file, set(matrices), targets)
    digest = hashlib.sha256(b"headstart/lora/1")
    pairs = {}
    for layer in sorted(matrices):
        down, up = _check_sides(file, layer, matrices[layer])
        _check_shapes(f"{file}: A and B of {layer}", down, up, settings.rank_of(layer))
        _check_widths(f"{file}: A and B of {layer}", down, up, linear[layer])
        scale = settings.scale_of(layer)
        _frame(digest, layer.encode())
        _frame(digest, struct.pack("<d", scale))
        _frame_tensor(digest, down)
        _frame_tensor(digest, up)
        pair = LoraPair(_ready(down, 1.0, model), _ready(up, scale, model))
        if not all(bool(torch.isfinite(side).all()) for side in pair):
            raise DamagedAdapterError(
                f"{file}: the matrices of {layer} are not finite in {model.dtype}"
            )
        pairs[layer] = pair
    return LoraWeights(digest.hexdigest(), pairs)


def _load(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        others = sorted(path.name for path in file.parent.glob("adapter_model*"))
        found = f"; {', '.join(others)} is not read" if others else ""
        raise DamagedAdapterError(f"{file.parent} has no {WEIGHTS_NAME}{found}")
    try:
        return safetensors.torch.load(file.read_bytes())
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedAdapterError(
            f"{file} is truncated or not a safetensors file: {error}"
        ) from error


def _sort_tensors(
    file: Path, tensors: dict[str, Tensor], model: AdaptableModel
) -> dict[str, dict[str, Tensor]]:
    """The matrices "A" and "B" of each layer; refuses any other tensor."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if found := _MATRIX.fullmatch(name):
            matrices.setdefault(found["layer"], {})[found["side"]] = tensor
        elif not _is_of_base(name, tensor, model):
            raise UnsupportedAdapterError(
                f"{file} holds {name}, which is neither A nor B of a linear layer, nor a copy of "
                "one of this model's weights"
            )
    if not matrices:
        raise DamagedAdapterError(f"{file} holds no matrices")
    return matrices


def _is_of_base(name: str, tensor: Tensor, model: AdaptableModel) -> bool:
    """True if this is a copy of one of the model's own weights."""
    found = _BASE.fullmatch(name)
    return found is not None and model.holds(found["layer"], tensor)


def _check_layers(file: Path, layers: set[str], linear: Mapping[str, Widths]) -> None:
    if unknown := sorted(layers - linear.keys()):
        raise UnsupportedAdapterError(
            f"{file} is for another model, or for layers that are not linear: "
            f"{_some(unknown)} is no linear layer of this one"
        )


def _check_targets(file: Path, layers: set[str], targets: set[str]) -> None:
    """Check that the file's layers are those that the configuration names in this model."""
    if missing := sorted(targets - layers):
        raise DamagedAdapterError(
            f"{file} lacks the matrices of {_some(missing)}, which target_modules names"
        )
    if beyond := sorted(layers - targets):
        raise DamagedAdapterError(
            f"{file} holds matrices of {_some(beyond)}, which target_modules does not name"
        )


def _check_sides(file: Path, layer: str, sides: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if len(sides) < 2:
        raise DamagedAdapterError(f"{file} has one of the two matrices of {layer}, not both")
    return sides["A"], sides["B"]


def _check_shapes(what: str, down: Tensor, up: Tensor, rank: int) -> None:
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


def _check_widths(what: str, down: Tensor, up: Tensor, widths: Widths) -> None:
    if (down.shape[1], up.shape[0]) != widths:
        raise UnsupportedAdapterError(
            f"{what} are for another model: they take {down.shape[1]} inputs to {up.shape[0]} "
            f"outputs, here the layer has {widths.inputs} and {widths.outputs}"
        )


def _ready(matrix: Tensor, scale: float, model: AdaptableModel) -> Tensor:
    """The scaled matrix on the model's device and in its dtype, rounded once."""
    scaled = matrix if scale == 1.0 else matrix.double() * scale
    return scaled.to(model.device, model.dtype).contiguous()


def _frame(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _frame_tensor(digest: "hashlib._Hash", tensor: Tensor) -> None:
    _frame(digest, f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    _frame(digest, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
