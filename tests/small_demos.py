"""The demo models with small layers: the same tokens, chats and images for little arithmetic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["make_small_demo"]

_LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 2
}


def make_small_demo(kind: str, folder: Path) -> Path:
    """Write "llama" or "vision" below a folder that knows no demo of that kind yet."""
    from headstart.models.demo import llama, vision

    module, path = {
        "llama": (llama, llama.demo_model_path),
        "vision": (vision, vision.demo_vision_path),
    }[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_DEMO_DIR", str(folder))
        for name, sizes in (("LlamaConfig", _LLAMA), ("CLIPVisionConfig", _VISION)):
            if hasattr(module, name):
                patch.setattr(module, name, _with(getattr(module, name), sizes))
        return path()


def _with(config: Callable[..., Any], sizes: dict[str, int]) -> Callable[..., Any]:
    return lambda **given: config(**{**given, **sizes})
