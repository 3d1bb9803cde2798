"""Demo models with small or few layers, which have the same tokens, chats and images."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

__all__ = ["ASSETS", "make_small_demo", "save_unloadable", "shallow_built_in"]

ASSETS = Path(__file__).parents[1] / "headstart" / "assets" / "headstart_tiny"

_LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 2
}


def save_unloadable(folder: Path) -> Path:
    """Write the built-in model with weights of integers, which cannot be loaded."""
    shutil.copytree(ASSETS, folder)
    tensors = load_file(folder / "model.safetensors")
    integers = {name: tensor.int() for name, tensor in tensors.items()}
    save_file(integers, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_small_demo(kind: str, folder: Path) -> Path:
    """Write "llama" or "vision" to a folder that has no such demo."""
    from examples.small_models import vision
    from headstart.models import demo

    module, path = {
        "llama": (demo, demo.demo_model_path),
        "vision": (vision, vision.demo_vision_path),
    }[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_DEMO_DIR", str(folder))
        for name, sizes in (("LlamaConfig", _LLAMA), ("CLIPVisionConfig", _VISION)):
            if hasattr(module, name):
                patch.setattr(module, name, _with(getattr(module, name), sizes))
        return path()


def _with(config: Callable[..., Any], sizes: dict[str, int]) -> Callable[..., Any]:
    return lambda **arguments: config(**{**arguments, **sizes})


@functools.cache
def shallow_built_in() -> Path:
    """Return headstart-tiny with two of its six layers and random answers; cached per process."""
    folder = Path(_KEPT.name)
    for file in ASSETS.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    weights = load_file(folder / "model.safetensors")
    weights_ = {name: w for name, w in weights.items() if not name.startswith(_LEFT_OUT)}
    save_file(weights_, folder / "model.safetensors", {"format": "pt"})
    return folder


_KEPT = tempfile.TemporaryDirectory(prefix="headstart-tests-")
_LEFT_OUT = tuple(f"model.layers.{number}." for number in range(2, 6))
