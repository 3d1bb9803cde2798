"""Writes a checkpoint folder of compressed-tensors: complete under its name, or not there.

Weights `[outputs, inputs]` of 4 bits are "pack-quantized": `weight_packed` int32 `[outputs,
inputs / 8]`, `weight_scale` `[outputs, groups]`, `weight_zero_point` int32 `[outputs / 8, groups]`,
of a word the lowest 4 bits first.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headstart.weights.grouped import GROUP
from headstart.weights.prequantized import Grouped

__all__ = ["SCHEME", "CheckpointFolder", "pack"]

SCHEME: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
}
"""The `quantization_config` of such a checkpoint."""

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
_SHARD = 4_000_000_000  # bytes
_FIELDS = 8  # of a word


def pack(name: str, weight: Grouped, kept: torch.dtype) -> dict[str, Tensor]:
    """The tensors that stand for the weight of the layer `name`."""
    return {
        f"{name}.weight_packed": _words(weight.values),
        f"{name}.weight_scale": weight.steps.to(kept),
        f"{name}.weight_zero_point": _words(weight.zeros.T).T.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.values.shape),
    }


def _words(values: Tensor) -> Tensor:
    """Values below 16 `[rows, columns]` as int32 `[rows, columns / 8]`."""
    padded = nn.functional.pad(values.to(torch.uint8), (0, -values.shape[1] % _FIELDS))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)


class CheckpointFolder:
    """A folder that is filled beside its place, and has its name at the end.

    A context: left with an exception, Ctrl-C included, nothing stays. Raises OSError.
    """

    def __init__(self, target: Path, source: Path) -> None:
        self._target, self._source = target, source
        self._place = target.with_name(f".{target.name}.{os.getpid()}.partial")
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._size = 0

    def __enter__(self) -> "CheckpointFolder":
        self._place.mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._place, ignore_errors=True)  # it is not there if it has its name

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor; written when there is enough for a file."""
        size = tensor.numel() * tensor.element_size()
        held = sum(one.numel() * one.element_size() for one in self._tensors.values())
        if self._tensors and held + size > _SHARD:
            self._write()
        self._tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._size += size

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write what is left, and give the folder its name."""
        self._write()
        self._name_shards()
        for file in sorted({file for one in _COPIED for file in self._source.glob(one)}):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self._place / file.name)
        content = json.dumps({**config, "quantization_config": SCHEME}, indent=2)
        (self._place / "config.json").write_text(content + "\n", encoding="utf-8")
        self._place.rename(self._target)

    def _write(self) -> None:
        path = self._place / f"{len(self._shards)}.safetensors"
        save_file(self._tensors, path, {"format": "pt"})
        path.chmod(self._place.stat().st_mode & 0o666)  # safetensors makes it its owner's alone
        self._shards.append(list(self._tensors))
        self._tensors.clear()

    def _name_shards(self) -> None:
        """Names as transformers gives them: of one file, or of several and an index."""
        count = len(self._shards)
        if count == 1:
            (self._place / "0.safetensors").rename(self._place / "model.safetensors")
            return
        where: dict[str, str] = {}
        for at, names in enumerate(self._shards):
            called = f"model-{at + 1:05}-of-{count:05}.safetensors"
            (self._place / f"{at}.safetensors").rename(self._place / called)
            where |= dict.fromkeys(names, called)
        index = {"metadata": {"total_size": self._size}, "weight_map": where}
        path = self._place / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
