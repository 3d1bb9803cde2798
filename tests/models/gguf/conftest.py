"""A separate cache folder for each test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_GGUF_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
