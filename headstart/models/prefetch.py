"""Prefaults memory for a model while torch is imported; needs neither torch nor transformers.

Importing them occupies a core for seconds. Meanwhile a thread requests that the system reads the
weights' files ahead, and touches the memory for their copy. The system clears each page at its
first touch, which takes time, most in a virtual machine whose host had reclaimed the page. Pages of
2 MiB are requested, which are fewer.
"""

import os
from pathlib import Path

from headstart.machine import multiplies_bfloat16
from headstart.models.families import MODEL_TYPES
from headstart.models.files import check_files, find_folder, read_json, weight_files
from headstart.native import is_usable, level
from headstart.native.pages import ReadyMemory

__all__ = ["ReadyMemory", "read_ahead"]

# Mixtures of experts leave most weights in the file, and larger models wait for the disk.
_MOST = 4  # at most this fraction (1 / 4) of the machine's memory is prefaulted


def read_ahead(
    model: str | Path, dtype: str, device: str, weights: str = "auto"
) -> ReadyMemory | None:
    """Memory for the model of this path or hub name, sized by its config; None for a large one.

    Checks the model's files as `load_model` does, before anything is imported. Raises
    `ModelNotFoundError`, `DamagedModelError`.
    """
    folder = find_folder(model)
    check_files(folder)
    config = read_json(folder / "config.json")
    stored = config.get("dtype", config.get("torch_dtype"))
    # Packed for products of bfloat16, or copied to stay bfloat16 under float32.
    packed = is_usable() and dtype in ("auto", stored)
    halves = dtype == "auto" and multiplies_bfloat16() is False and level() > 0
    copied = packed or (halves and config.get("model_type") in MODEL_TYPES)
    files = weight_files(folder)
    floats = "quantization_config" not in config and files[0].suffix != ".gguf"
    # Quantized weights have separate memory.
    copied = copied and (device, stored, weights) == ("cpu", "bfloat16", "auto") and floats
    size = sum(file.stat().st_size for file in files)
    if not hasattr(os, "posix_fadvise") or size > _memory() // _MOST:
        return None
    return ReadyMemory(size if copied else 0, files)


def _memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
