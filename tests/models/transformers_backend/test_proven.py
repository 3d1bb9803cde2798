"""A model that passed the checks does not run through them again while its files stay equal."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import UnsupportedModelError
from headstart.models.loader import load_model
from headstart.models.transformers_backend import probe as proven
from tests.tiny_models import save_tiny


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtypes of models that run through the checks from now on."""
    seen: list[torch.dtype] = []
    probe_model = proven.probe_model

    def noting(model: torch.nn.Module) -> proven.ProbedLayers:
        seen.append(model.dtype)
        return probe_model(model)

    monkeypatch.setattr(proven, "probe_model", noting)
    return seen


def write_weight(folder: Path, value: float) -> None:
    """Change one weight so that the file has the same size and the same time."""
    file = folder / "model.safetensors"
    before = file.stat()
    weights = load_file(file)
    weights["model.norm.weight"][0] = value
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def test_a_model_loaded_again_is_not_run_again(probes: list[torch.dtype], tmp_path: Path) -> None:
    folder = save_tiny("starcoder2", tmp_path)
    first, second = load_model(folder), load_model(folder)
    assert len(probes) == 1
    assert first.layouts == second.layouts


def test_another_dtype_or_other_modules_are_another_model(
    probes: list[torch.dtype], tmp_path: Path
) -> None:
    folder = save_tiny("starcoder2", tmp_path)
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        load_model(folder, dtype)
    assert probes == [torch.float32, torch.bfloat16]
    save_tiny("glm4", tmp_path)
    load_model(folder, "float32")
    assert probes == [torch.float32, torch.bfloat16, torch.float32]


def test_files_that_changed_are_tested_again(probes: list[torch.dtype], tmp_path: Path) -> None:
    """Size and time may be unchanged, and the model was good before."""
    folder = save_tiny("starcoder2", tmp_path)
    load_model(folder)
    write_weight(folder, float("inf"))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="not finite"):
            load_model(folder)
    write_weight(folder, 1.5)
    load_model(folder)
    assert len(probes) == 4
