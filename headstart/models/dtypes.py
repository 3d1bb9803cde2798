"""The dtype and device of a model, and detection of out-of-memory errors."""

import errno
import logging
import os
import platform
from collections.abc import Set
from pathlib import Path

import torch

from headstart.errors import ConfigError, OutOfMemoryError
from headstart.machine import X86, available_memory, multiplies_bfloat16, no_bfloat16_reason
from headstart.models.config_values import find_values
from headstart.models.files import read_json, weight_files
from headstart.validation import describe
from headstart.weights.products import choose_product
from headstart.weights.scheme import is_supported

# If memory runs out on a CPU, torch raises a RuntimeError with one of these texts.
_TEXTS = ("DefaultCPUAllocator: can't allocate", os.strerror(errno.ENOMEM))


def check_memory(error: Exception, purpose: str) -> None:
    """Raise `OutOfMemoryError` if `error` means that memory ran out; otherwise do nothing."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds) or any(text in str(error) for text in _TEXTS):
        raise OutOfMemoryError(
            f"there is not enough memory {purpose}: {type(error).__name__}: {error}"
        ) from error


_log = logging.getLogger(__name__)

_DTYPES = {
    **dict.fromkeys(("float32", "float"), torch.float32),
    "bfloat16": torch.bfloat16,
    **dict.fromkeys(("float16", "half"), torch.float16),
}


def find_dtype(name: str) -> str | torch.dtype:
    """Return the dtype of this name, or "auto" unchanged; raises `ConfigError`."""
    if not isinstance(name, str) or (name != "auto" and name not in _DTYPES):
        raise ConfigError(f"dtype is {describe(name)}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name, name)


def fast_dtype(dtype: str | torch.dtype, folder: Path, device: torch.device) -> str | torch.dtype:
    """Return `dtype`, but float32 for "auto" on an x86 CPU without instructions for 16-bit floats.

    On such a CPU a prefill in bfloat16 is several times slower than in float32. "auto" is returned
    if the weights in float32 would take more than half of the free memory.
    """
    slow_dtypes = _slow_dtypes(folder, device) if dtype == "auto" else set()
    if not slow_dtypes:
        return dtype
    size = 2 * sum(file.stat().st_size for file in weight_files(folder))
    free = available_memory()
    slow = f"this CPU is slow in {' and '.join(sorted(slow_dtypes))} ({no_bfloat16_reason()})"
    if size > free // 2:
        _log.warning("%s, and %s bytes of free memory are too few for float32", slow, f"{free:,}")
        return dtype
    _log.warning("%s, so dtype=auto computes in float32", slow)
    return torch.float32


def computes_wider(dtype: str | torch.dtype, folder: Path, device: torch.device) -> bool:
    """Return True if "auto" means float32 arithmetic with weights that stay in bfloat16.

    This is for CPUs without bfloat16 instructions. The compiled products take the memory of
    bfloat16 and the time of float32.
    """
    has_product = choose_product("bfloat16", torch.float32, device) == "float32"
    return dtype == "auto" and has_product and _slow_dtypes(folder, device) == {"bfloat16"}


def auto_dtype(stored: torch.dtype, held: Set[torch.dtype], device: torch.device) -> torch.dtype:
    """Return the dtype of the rows between layers for "auto".

    stored: the checkpoint's dtype. held: the dtypes of the checkpoint's matrices.
    """
    has_product = choose_product("bfloat16", torch.float32, device) == "float32"
    is_wider = has_product and held == {torch.bfloat16} and multiplies_bfloat16() is False
    return torch.float32 if is_wider else stored


def _slow_dtypes(folder: Path, device: torch.device) -> set[str]:
    """Return the checkpoint's 16-bit dtypes for which this x86 CPU has no instructions."""
    if device.type != "cpu" or platform.machine() not in X86 or multiplies_bfloat16() is not False:
        return set()
    content = read_json(folder / "config.json")
    dtypes = {str(value) for _, value in find_values(content, {"dtype", "torch_dtype"})}
    if not dtypes <= {"bfloat16", "float16"} or not is_supported(content):
        return set()
    return dtypes


def find_device(name: str) -> torch.device:
    """Return the device of this name if torch can use it here; raises `ConfigError`."""
    if not isinstance(name, str | torch.device):
        raise ConfigError(f"device is {describe(name)}; allowed: a string such as cpu or cuda")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"device is {describe(name)}, which torch cannot use here: {reason}"
        raise ConfigError(message) from error
    return device
