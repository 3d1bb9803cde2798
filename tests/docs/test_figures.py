"""The figures in the docs are up to date."""

import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from tests.house.source import ROOT

FIGURES = ROOT / "docs" / "figures"
DARK_STYLE = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*\}\s*</style>", re.DOTALL)


def test_the_figures_match_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "docs/figures_src/figures.py", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    stored = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.iterdir()}
    assert len(drawn) == 13
    assert drawn.keys() == stored.keys()
    for name, text in drawn.items():
        assert stored[name] == text, f"{name} is out of date: run make figures"
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


def test_every_figure_is_shown_in_the_docs() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    for path in FIGURES.iterdir():
        assert any(f"(figures/{path.name})" in page for page in pages)


def test_every_color_of_a_figure_has_a_dark_variant() -> None:
    for path in FIGURES.iterdir():
        text = path.read_text(encoding="utf-8")
        [style] = DARK_STYLE.findall(text)
        used = set(re.findall(r'(?:fill|stroke)="#[0-9a-f]{6}"', DARK_STYLE.sub("", text)))
        assert used and {rule for rule in used if f"[{rule}]{{" not in style} == set(), path.name


def test_every_color_of_a_drawing_has_a_dark_variant() -> None:
    """Colors are only in the style sheet, and each class with a color has one for dark pages."""
    text = (ROOT / "docs" / "omni.svg").read_text(encoding="utf-8")
    [dark] = DARK_STYLE.findall(text)
    light = DARK_STYLE.sub("", text)
    colored = {
        kind
        for kinds, rule in re.findall(r"^    ([.\w, ]+) \{ (.*) \}$", light, re.MULTILINE)
        for kind in kinds.split(", ")
        if "#" in rule.replace("url(#head)", "")
    }
    assert "#" not in re.sub(r"url\(#head\)", "", light.split("<defs>")[1])
    assert {kind for kind in colored if not re.search(rf"{re.escape(kind)}\b", dark)} == set()
    assert len(colored) > 5


def test_the_demo_keeps_its_spaces_outside_browsers() -> None:
    text = (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8")
    assert text.startswith('<svg xml:space="preserve" ')
