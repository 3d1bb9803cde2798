"""Reads a LoRA adapter from PEFT's files; refuses an adapter with any tensor it cannot apply.

An adapter's identity is a digest of its effect: names, shapes, scales and bytes of its matrices,
each field with its length in front. The adapter's name, path and training settings are not part of
it. So the same weights under two names are one adapter, and new weights under an old name are a
new adapter.
"""

import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from headstart.errors import DamagedAdapterError, UnsupportedAdapterError
from headstart.models.lora.settings import ALL_LINEAR, read_settings

__all__ = ["WEIGHTS_NAME", "AdaptableModel", "LoraPair", "LoraWeights", "read_weights"]

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
