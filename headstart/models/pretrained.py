"""Loads transformers' models from files, for decoders and pipelines alike."""

import logging
import platform
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
from headstart.machine import X86, available_memory, multiplies_bfloat16
from headstart.models.checkpoint import check_report
from headstart.models.config_values import find_values
from headstart.models.files import read_json, weight_files

__all__ = ["fast_dtype", "find_device", "find_dtype", "load_config", "load_weights"]

_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def find_dtype(name: str) -> str | torch.dtype:
    """The dtype of this name, or "auto" for the checkpoint's own; raises `ConfigError`."""
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; it may be auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name, name)


def fast_dtype(dtype: str | torch.dtype, folder: Path, device: torch.device) -> str | torch.dtype:
    """`dtype`, but float32 for "auto" on an x86 CPU without instructions for the 16-bit dtype.

    On such a CPU a prefill in bfloat16 takes 9 times as long as in float32. The checkpoint's dtype
    is kept if its weights in float32 would take more than half of the free memory.
    """
    if dtype != "auto" or device.type != "cpu" or platform.machine() not in X86:
        return dtype
    if multiplies_bfloat16() is not False:
        return dtype
    content = read_json(folder / "config.json")
    kept = {value for _, value in find_values(content, {"dtype", "torch_dtype"})}
    if not kept or not kept <= {"bfloat16", "float16"} or "quantization_config" in content:
        return dtype
    size = 2 * sum(file.stat().st_size for file in weight_files(folder))
    free = available_memory()
    slow = f"this CPU is slow in {' and '.join(sorted(kept))} (no AVX512-BF16, no AMX-BF16)"
    if size > free // 2:
        _log.warning("%s, and %s free bytes are too few for float32", slow, f"{free:,}")
        return dtype
    _log.warning("%s: computing in float32, as dtype=auto means here", slow)
    return torch.float32


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

    Raises `DamagedModelError`, `UnsupportedModelError` for an architecture that transformers does
    not have, and `OutOfMemoryError`.
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
    # The exception for a wrong value depends on the architecture's own checks.
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
    """Load a model of a transformers class with `from_pretrained`; no parameter stays random.

    Raises `DamagedModelError` if weights and configuration differ, `UnsupportedModelError` if a
    package is missing, and `OutOfMemoryError`.
    """
    try:
        loaded: Any = from_pretrained(
            folder,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported by name and shape below
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
    """True if memory ran out; on a CPU torch raises a RuntimeError with this text only."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate" in str(error)
