"""Errors for models that transformers cannot load, or loads differently from their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, OutOfMemoryError
from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.transformers_backend import loader
from tests.tiny_models import save_tiny


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("raised by Python")


def no_memory_on_a_gpu(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("raised by torch")


def no_memory_for_a_tensor(*_: Any, **__: Any) -> None:
    torch.empty(1 << 50)  # a PiB


def no_memory_for_a_mapping(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("gpt_neox"))


@pytest.mark.parametrize(
    "fail",
    [no_memory, no_memory_on_a_gpu, no_memory_for_a_tensor, no_memory_for_a_mapping],
)
@pytest.mark.parametrize(
    "where", [loader.AutoConfig, loader.AutoModelForCausalLM], ids=["config", "weights"]
)
def test_a_lack_of_memory_is_reported_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: Any, fail: Any
) -> None:
    monkeypatch.setattr(where, "from_pretrained", fail)
    with pytest.raises(OutOfMemoryError, match=r"memory") as raised:
        LLM(folder, num_blocks=8)
    assert str(folder) in str(raised.value)
    assert isinstance(raised.value.__cause__, (MemoryError, RuntimeError))


@pytest.mark.parametrize("error", [RuntimeError("a shape differs"), KeyError("rope"), OSError()])
def test_any_other_error_is_a_damaged_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(DamagedModelError, match=type(error).__name__):
        LLM(folder, num_blocks=8)


@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_method_of_the_text_part_is_checked_too(part: str, tmp_path: Path) -> None:
    """transformers takes it from there, and loads integers without their scales."""
    about = {"quantization_config": {"quant_method": "modelopt"}}
    text = {"model_type": "llama"}
    config: dict[str, Any] = {"model_type": "llava", "text_config": text}
    config = config | ({part: text | about} if part else about)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="are quantized by 'modelopt', which neither"):
        loader.load_config(tmp_path)
