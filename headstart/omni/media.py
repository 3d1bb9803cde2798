"""Features and placeholders of audio and images in prompts of the Qwen-Omni family.

The checkpoint's processors turn audio and images into features. The model's encoder turns these
into embeddings. In the prompt each item has consecutive placeholders, one for each embedding.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor

from headstart.errors import DamagedModelError, RequestError, UnsupportedModelError
from headstart.frontend.images.decoding import decode_image
from headstart.models.transformers_tools import silence_transformers
from headstart.validation import describe

_AXES = {
    "input_features": ("sounds", "mels", "frames"),
    "feature_attention_mask": ("sounds", "frames"),
    "pixel_values": ("patches", "width"),
    "image_grid_thw": ("images", "3"),
}
"""The axes of each feature tensor, by its name in transformers' processors."""

_FLOATS = ("input_features", "pixel_values")


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A sound or an image in a prompt.

    offset, length: position and number of its placeholders, in tokens. content: its features.
    """

    kind: str
    offset: int
    length: int
    content: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Media:
    """Reads sounds and images of one model's prompts.

    placeholders: the token ids of the placeholders for "audio" and "image". sound_lengths: takes
    each sound's number of frames, int64 `[sounds]`, and returns each sound's number of embeddings.
    merge_size: the side, in patches, of the square that becomes one embedding. padding: the feature
    extractor's padding mode; padding beyond the longest sound is removed afterwards.
    """

    folder: Path
    placeholders: Mapping[str, int]
    sound_lengths: Callable[[Tensor], Tensor]
    merge_size: int
    padding: str | bool

    @cached_property
    def _extractor(self) -> Any:
        return _load(AutoFeatureExtractor, self.folder)

    @cached_property
    def _image_processor(self) -> Any:
        return _load(AutoImageProcessor, self.folder, backend="pil")

    @property
    def sound_rate(self) -> int:
        """Samples per second of sounds. Raises ModelError if the model has no feature extractor."""
        return int(self._extractor.sampling_rate)

    def extract_audio(self, sounds: Sequence[Any]) -> dict[str, Tensor]:
        """Return features of sounds, arrays `[samples]` at the extractor's rate.

        Raises RequestError for an invalid sound, ModelError if the model has no feature extractor.
        """
        waves = [_wave(sound) for sound in sounds]
        if not waves:
            return {}
        extractor = self._extractor
        try:
            features = extractor(
                waves,
                sampling_rate=extractor.sampling_rate,
                padding=self.padding,
                return_attention_mask=True,
                return_tensors="pt",
            )
        except (RuntimeError, ValueError) as error:  # a sound shorter than the reflection padding
            raise RequestError(f"sounds cannot be read: {type(error).__name__}: {error}") from error
        if not features["input_features"].isfinite().all():
            peak = max(float(np.abs(wave).max()) for wave in waves)
            raise RequestError(f"a sound has samples of up to {peak:.3g}; allowed: -1 to 1")
        mask = features["attention_mask"]
        longest = int(mask.sum(-1).max())
        return {
            "input_features": features["input_features"][..., :longest],
            "feature_attention_mask": mask[:, :longest],
        }

    def extract_images(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """Return features of Pillow images or arrays.

        Raises RequestError for an invalid image, ModelError if the model has no image processor.
        """
        for image in images:
            if isinstance(image, (str, bytes, os.PathLike)):  # transformers would read files
                raise RequestError(
                    f"an image is a {type(image).__name__}; allowed: a Pillow image or an array"
                )
        if not images:
            return {}
        try:
            features = self._image_processor(images=list(images), return_tensors="pt")
        # Pillow and numpy raise ValueError, TypeError, OSError and more for unreadable images.
        except Exception as error:
            raise RequestError(f"images cannot be read: {type(error).__name__}: {error}") from error
        return {name: features[name] for name in ("pixel_values", "image_grid_thw")}

    def place(
        self, token_ids: Sequence[int], features: Mapping[str, Tensor]
    ) -> tuple[list[int], list[PlacedItem]]:
        """Expand a prompt to one placeholder per embedding; return its token ids and its items.

        `token_ids` may have one placeholder per item, or one per embedding. Raises RequestError for
        any other number of placeholders.
        """
        expanded, placed_items = list(token_ids), []
        contents = {"audio": self._audios(features), "image": self._images(features)}
        for kind, (lengths, _) in contents.items():
            placeholder = self.placeholders[kind]
            if expanded.count(placeholder) == len(lengths):
                counts = iter(lengths)
                expanded = [
                    token
                    for old in expanded
                    for token in [old] * (next(counts) if old == placeholder else 1)
                ]
        for kind, (lengths, items) in contents.items():
            positions = [i for i, token in enumerate(expanded) if token == self.placeholders[kind]]
            if len(positions) != sum(lengths):
                raise RequestError(
                    f"the prompt has {len(positions)} {kind} placeholders; allowed: {sum(lengths)}"
                )
            start = 0
            for length, content in zip(lengths, items, strict=True):
                run = positions[start : start + length]
                if run and run[-1] - run[0] >= length:
                    raise RequestError(f"{kind} placeholders from token {run[0]} on have a gap")
                placed_items.append(PlacedItem(kind, run[0], length, content))
                start += length
        return expanded, sorted(placed_items, key=lambda item: item.offset)

    def _audios(self, features: Mapping[str, Tensor]) -> tuple[list[int], list[dict[str, Tensor]]]:
        if "input_features" not in features:
            return [], []
        names = ("input_features", "feature_attention_mask")
        sounds, _, frames = features[names[0]].shape
        mask = features.get(names[1])
        if mask is None or mask.shape != (sounds, frames) or not ((mask == 0) | (mask == 1)).all():
            raise RequestError(
                "input_features [sounds, mels, frames] need a feature_attention_mask "
                "[sounds, frames] of zeros and ones"
            )
        counts = mask.sum(-1)
        lengths = self.sound_lengths(counts).tolist()
        if min(lengths, default=1) < 1:
            raise RequestError(f"a sound of {int(counts.min())} frames is too short")
        return lengths, [{name: features[name][i : i + 1] for name in names} for i in range(sounds)]

    def _images(self, features: Mapping[str, Tensor]) -> tuple[list[int], list[dict[str, Tensor]]]:
        if "pixel_values" not in features:
            return [], []
        if "image_grid_thw" not in features:
            raise RequestError("pixel_values need an image_grid_thw")
        grids = features["image_grid_thw"]
        side = self.merge_size
        if grids.shape[-1] != 3 or (grids < 1).any() or (grids[:, 1:] % side).any():
            raise RequestError(
                f"image_grid_thw is {describe(grids.tolist())}; allowed: a row (frames, height, "
                f"width) for each image, in patches, with multiples of {side} as height and width"
            )
        patches = grids.prod(-1).tolist()
        if sum(patches) != len(features["pixel_values"]):
            raise RequestError(
                f"the image grids have {sum(patches)} patches; "
                f"pixel_values have {len(features['pixel_values'])}"
            )
        patch_groups = torch.split(features["pixel_values"], patches)
        contents = [
            {"pixel_values": group, "image_grid_thw": grids[i : i + 1]}
            for i, group in enumerate(patch_groups)
        ]
        return [count // side**2 for count in patches], contents


def as_items(value: object) -> list[Any]:
    """Return an item or a sequence of items as a list; an array is one item."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    return [value]


def read_features(values: object) -> dict[str, Tensor]:
    """Return features of transformers' processor as tensors. Raises RequestError.

    Checks names, dtypes and numbers of axes, but not that the tensors fit together.
    """
    if not isinstance(values, Mapping):
        raise RequestError(
            f"features are {describe(values)}, a {type(values).__name__}; allowed: a mapping of "
            f"tensors, which may have the keys {', '.join(_AXES)}"
        )
    features = {}
    for name, value in values.items():
        if name not in _AXES:
            raise RequestError(
                f"features have the key {describe(name)}; allowed: {', '.join(_AXES)}"
            )
        axes, floats = ", ".join(_AXES[name]), name in _FLOATS
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            value = torch.as_tensor(value)
        if not isinstance(value, Tensor):
            raise RequestError(f"{name} is {describe(value)}; allowed: a tensor [{axes}]")
        is_wrong = value.is_floating_point() != floats or value.is_complex()
        if value.ndim != len(_AXES[name]) or is_wrong:
            raise RequestError(
                f"{name} has the shape {list(value.shape)} and the type {value.dtype}; allowed: "
                f"[{axes}] of {'floats' if floats else 'integers'}"
            )
        if not value.isfinite().all():
            raise RequestError(f"{name} has values that are not finite")
        features[name] = value
    return features


def _wave(sound: Any) -> NDArray[np.float32]:
    """Return a sound as floats; integers are scaled to -1 .. 1. Raises RequestError."""
    try:
        if isinstance(sound, Tensor):
            sound = sound.detach().cpu()
            sound = (sound.float() if sound.is_floating_point() else sound).numpy()
        samples = np.asarray(sound)
    except (TypeError, ValueError, RuntimeError):
        samples = np.asarray(None)
    kind, size = samples.dtype.kind, samples.dtype.itemsize
    if kind == "i" and size in (2, 4):
        wave = samples.astype(np.float32) / np.float32(2 ** (8 * size - 1))
    elif kind == "f":
        with np.errstate(over="ignore"):  # overflow gives inf, which is refused below
            wave = samples.astype(np.float32)
    else:
        raise RequestError(
            f"a sound is {describe(sound)}, a {type(sound).__name__}; allowed: an array [samples] "
            "of floats from -1 to 1, int16 or int32"
        )
    if wave.ndim != 1 or not len(wave):
        raise RequestError(f"a sound has the shape {list(wave.shape)}; allowed: [samples]")
    if not np.isfinite(wave).all():
        raise RequestError("a sound has samples that are not finite")
    return wave


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    try:
        with silence_transformers():
            return kind.from_pretrained(folder, local_files_only=True, **options)
    except ImportError as error:
        raise UnsupportedModelError(f"{folder}: a package is missing: {error}") from error
    # A damaged settings file raises OSError, ValueError, KeyError and more.
    except Exception as error:
        raise DamagedModelError(
            f"{folder} has no {kind.__name__.removeprefix('Auto')} that can be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def as_rgb(image: Any) -> Any:
    """Convert a Pillow image to RGB; return any other object unchanged. Raises RequestError."""
    try:
        from PIL import Image
    except ImportError:
        return image
    return decode_image(image, sys.maxsize) if isinstance(image, Image.Image) else image
