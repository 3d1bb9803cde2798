"""Loading a model with vision: its processor must exist, and fit its tower."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor

from headstart.engine.engine import load_engine
from headstart.errors import DamagedModelError, UnsupportedModelError
from tests.tiny_vision import save_tiny_vision


def test_without_pillow_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("no PIL here")

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", refuse)
    with pytest.raises(
        UnsupportedModelError, match=r'pip install "\.\[vision\]" in the folder of the clone'
    ):
        load_engine(save_tiny_vision("llava", tmp_path), num_blocks=4)


def test_without_a_processor(tmp_path: Path) -> None:
    folder = save_tiny_vision("llava", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DamagedModelError, match="image processor"):
        load_engine(folder, num_blocks=4)


def test_a_processor_that_does_not_fit_the_tower(tmp_path: Path) -> None:
    """Its pixels give two more rows and columns of patches than config.json has placeholders."""
    folder = save_tiny_vision("idefics3", tmp_path)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["max_image_size"] = {"longest_edge": 48}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises((DamagedModelError, UnsupportedModelError), match=r"blank image|not fit"):
        load_engine(folder, num_blocks=4)


def test_tiles_need_a_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_vision("idefics3", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UnsupportedModelError, match="has no tokenizer"):
        load_engine(folder, num_blocks=4)
