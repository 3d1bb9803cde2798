"""Preparation of a model's files and memory during the import of torch. Must not import torch.

Importing torch occupies one core for seconds. Meanwhile a thread lets the system read the weight
files ahead, and touches the memory for packed weights. The system clears each page when it is first
touched, which takes time, so pages of 2 MiB are requested.
"""

import os
from pathlib import Path

from headstart.machine import multiplies_bfloat16
from headstart.models.families import MODEL_TYPES
from headstart.models.files import check_files, find_folder, read_json, weight_files
from headstart.native import is_usable, level
from headstart.native.pages import ReadyMemory

__all__ = ["ReadyMemory", "read_ahead"]

# Nothing is prepared for files larger than 1 / 4 of the machine's memory, since the disk limits the
# loading of large models.
_SHARE = 4


def read_ahead(
    model: str | Path, dtype: str, device: str, weights: str = "auto"
) -> ReadyMemory | None:
    """Start to prepare memory for a model, and return it; None for a large model.

    model: a local path or hub name. Checks the files as `load_model` does. Raises
    `ModelNotFoundError`, `DamagedModelError`.
    """
    folder = find_folder(model)
    check_files(folder)
    config = read_json(folder / "config.json")
    stored = config.get("dtype", config.get("torch_dtype"))
    # Weights are packed for bfloat16 products, or copied in bfloat16 for float32 arithmetic.
    packed = is_usable() and dtype in ("auto", stored)
    widened = dtype == "auto" and multiplies_bfloat16() is False and level() > 0
    copied = packed or (widened and config.get("model_type") in MODEL_TYPES)
    files = weight_files(folder)
    floats = "quantization_config" not in config and files[0].suffix != ".gguf"
    # Quantized weights are not stored in the memory that is prepared here.
    copied = copied and (device, stored, weights) == ("cpu", "bfloat16", "auto") and floats
    size = sum(file.stat().st_size for file in files)
    if not hasattr(os, "posix_fadvise"):
        return None
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE:
        return None
    return ReadyMemory(size if copied else 0, files)
