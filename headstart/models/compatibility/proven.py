"""Remembers which models passed the checks in this process: loaded again, they are not run again.

A notebook that makes one engine after another, with other options, loads one model many times.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from headstart.attention.layout import LayerLayout
from headstart.models.compatibility.paged_kv import probe_model
from headstart.models.files import weight_files

__all__ = ["FileStamp", "probe_once", "stamp_files"]


class FileStamp(NamedTuple):
    """One version of a file: writing to the file, or replacing it, changes the stamp."""

    name: str
    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int


class _Loaded(NamedTuple):
    """All that decides how a model computes: files, dtype, device, and what its modules are."""

    files: tuple[FileStamp, ...]
    dtype: torch.dtype
    device: torch.device
    modules: tuple[type[torch.nn.Module], ...]


_passed: dict[_Loaded, tuple[LayerLayout, ...]] = {}


def stamp_files(folder: Path) -> tuple[FileStamp, ...]:
    """The versions of a model's configuration and weight files, taken before they are read."""
    stamps = []
    for file in (folder / "config.json", *weight_files(folder)):
        stat = file.stat()
        stamps.append(
            FileStamp(
                file.name,
                stat.st_dev,
                stat.st_ino,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )
        )
    return tuple(stamps)


def probe_once(model: PreTrainedModel, files: tuple[FileStamp, ...]) -> tuple[LayerLayout, ...]:
    """`probe_model` of a model from these files, or its result if it has passed before."""
    loaded = _Loaded(files, model.dtype, model.device, tuple(map(type, model.modules())))
    layouts = _passed.get(loaded)
    if layouts is None:
        layouts = _passed[loaded] = probe_model(model)
    return layouts
