"""transformers' models from files, for decoders and pipelines alike: one way to load weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from headstart.errors import (
    ConfigError,
    DamagedModelError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from headstart.models.checkpoint import check_report
from headstart.models.files import read_json

__all__ = ["find_device", "find_dtype", "load_config", "load_weights"]

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def find_dtype(name: str) -> str | torch.dtype:
    """A dtype as transformers takes it, "auto" for the checkpoint's own; raises `ConfigError`."""
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; it may be auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name, name)


def find_device(name: str) -> torch.device:
    """The device of this name, if torch can use it here; raises `ConfigError`."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device is {name!r}, which torch cannot use here: {error}") from error
    return device


def load_config(folder: Path) -> PreTrainedConfig:
    """transformers' configuration of the model in `folder`.

    Raises `DamagedModelError`, `UnsupportedModelError` for what transformers does not know, and
    `OutOfMemoryError`.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise DamagedModelError(f"{folder / 'config.json'} names no model_type")
    if kind not in CONFIG_MAPPING:
        reason = "it brings code of its own, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModelError(
            f"model_type {kind!r} is not one of transformers' architectures ({reason})"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # What a wrong value raises depends on the architecture's own checks.
    except Exception as error:
        if _is_out_of_memory(error):
            raise OutOfMemoryError(f"no memory to read {folder / 'config.json'}") from error
        raise DamagedModelError(
            f"{folder / 'config.json'} does not describe a {kind} model: {error}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def load_weights(
    from_pretrained: Callable[..., Any], folder: Path, **options: Any
) -> PreTrainedModel:
    """A model of one of transformers' classes, from its `from_pretrained`; nothing is at random.

    Raises `DamagedModelError` where weights and configuration differ, `UnsupportedModelError`
    where a package is missing, and `OutOfMemoryError`.
    """
    try:
        loaded: Any = from_pretrained(
            folder,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # told by name and shape below
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise UnsupportedModelError(f"{folder} needs a package that is missing: {error}") from error
    # transformers raises OSError, RuntimeError, ValueError, KeyError, and safetensors its own.
    except Exception as error:
        if _is_out_of_memory(error):
            raise OutOfMemoryError(
                f"memory does not hold the model in {folder}: {type(error).__name__}: {error}"
            ) from error
        raise DamagedModelError(
            f"the model in {folder} cannot be built: {type(error).__name__}: {error}"
        ) from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    check_report(folder, model, report)
    return model


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On a CPU torch tells that by the text of a RuntimeError alone."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate" in str(error)
