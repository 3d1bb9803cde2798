"""Remembers which models passed the checks in this process: loaded again, they are not run again.

A notebook that makes one engine after another, with other options, loads one model many times.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from headstart.attention.backend import LayerLayout
from headstart.models.compatibility.paged_kv import probe_model
from headstart.models.files import FileStamp

__all__ = ["probe_once"]


class _Loaded(NamedTuple):
    """All that decides how a model computes: files, dtype, device, and what its modules are."""

    files: tuple[FileStamp, ...]
    dtype: torch.dtype
    device: torch.device
    modules: tuple[type[torch.nn.Module], ...]


_passed: dict[_Loaded, tuple[LayerLayout, ...]] = {}


def probe_once(model: PreTrainedModel, files: tuple[FileStamp, ...]) -> tuple[LayerLayout, ...]:
    """`probe_model` of a model from these files, or its result if it has passed before."""
    loaded = _Loaded(files, model.dtype, model.device, tuple(map(type, model.modules())))
    layouts = _passed.get(loaded)
    if layouts is None:
        layouts = _passed[loaded] = probe_model(model)
    return layouts
