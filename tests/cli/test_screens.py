"""What is shown in narrow terminals, and on dark and on light backgrounds."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.color import Color
from rich.console import Console

from headstart.cli.demo.adapters import EVERYBODY, JOHN, Act, ActTable
from headstart.cli.markdown import _code_theme
from headstart.cli.pool_picture import COLOURS
from tests.cli.test_main import call


def luminance(name: str) -> float:
    """WCAG 2's relative luminance."""
    shares = [value / 255 for value in Color.parse(name).get_truecolor()]
    red, green, blue = (
        value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("name", COLOURS)
def test_colours_stand_out_on_black_and_on_white(name: str) -> None:
    assert (luminance(name) + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance(name) + 0.05) >= 3


@pytest.mark.parametrize(
    ("told", "theme"),
    [
        ("0;15", "ansi_light"),
        ("15;0", "ansi_dark"),
        ("0;default;7", "ansi_light"),
        ("", "ansi_dark"),
    ],
)
def test_code_is_coloured_for_the_background(
    told: str, theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", told)
    assert _code_theme() == theme


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"]])
def test_commands_are_told_whole(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = call(*arguments).stdout
    assert "..." not in said.partition("Commands:")[2]


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_answers_of_adapters_stay_whole(width: int) -> None:
    answer = "The age of John Doe is 29!"
    output: Any = SimpleNamespace(
        outputs=[SimpleNamespace(text=answer)],
        prompt_token_ids=[0] * 1425,
        num_cached_tokens=0,
        why_missed="from token 0 on: cached without an adapter",
        metrics=SimpleNamespace(time_to_first_token=12.34),
    )
    act = Act("An act", tuple((name, JOHN) for name in EVERYBODY))
    console = Console(file=io.StringIO(), width=width)
    console.print(ActTable(act, [output] * 3))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.count(answer) == text.count("12.34 s") == text.count("0 (0%)") == 3
