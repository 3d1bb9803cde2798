"""The figures in the docs are what the pool looks like today."""

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from tests.house.source import ROOT

FIGURES = ROOT / "docs" / "figures"


def test_the_figures_are_what_the_command_draws(tmp_path: Path) -> None:
    command = [sys.executable, "docs/figures_src/figures.py", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.iterdir()}
    assert len(drawn) == 13
    assert drawn.keys() == kept.keys()
    for name, text in drawn.items():
        assert kept[name] == text, f"{name} is out of date: run make figures"
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


def test_every_figure_is_shown_in_the_docs() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    for path in FIGURES.iterdir():
        assert any(f"(figures/{path.name})" in page for page in pages)
