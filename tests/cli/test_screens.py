"""Output in narrow terminals, and on dark and light backgrounds."""

import io
import os
import re
import termios
from pathlib import Path

import pytest
from rich.color import Color
from rich.console import Console

from headstart import SamplingParams
from headstart.cli.markdown import MarkdownWriter
from headstart.cli.pool_picture import COLORS
from headstart.cli.terminal import note
from tests.cli.test_main import call
from tests.cli.test_streams import shown_in_terminal
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.forked import start_headstart


def luminance(name: str) -> float:
    """Return the relative luminance of WCAG 2."""
    shares = [value / 255 for value in Color.parse(name).get_truecolor()]
    red, green, blue = (
        value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("name", COLORS)
def test_colors_are_readable_on_black_and_on_white(name: str) -> None:
    assert (luminance(name) + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance(name) + 0.05) >= 3


def test_a_reply_is_readable_on_black_and_on_white() -> None:
    """Regression: bullets were yellow, and code was on black, on any background."""
    reply = (
        "- a `word`\n\n1. [x](http://y)\n\n> quote\n\n```python\nclass A:  # b\n    c = 'd', 1\n```"
    )
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with MarkdownWriter(console) as writer:
        writer.write(reply)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    codes = set(re.findall(r"\x1b\[([\d;]+)m", shown))
    colors = set(re.findall(r"38;5;(\d+)", ";".join(sorted(codes))))
    assert {f"color({color})" for color in colors} <= {*COLORS} and len(colors) == 3
    plain = [re.sub(r"38;5;\d+", "0", code) for code in codes]
    assert not any(int(part) >= 30 for code in plain for part in code.split(";"))


@pytest.mark.parametrize("columns", [60, 80])
def test_metrics_are_broken_between_numbers(columns: int) -> None:
    text = (
        "[prompt 12,345 tokens, cached 12,000 (97%) · first token 417 ms, then 26.6 ms each · stop]"
    )
    output = shown_in_terminal(lambda: note(text, " ", in_parts=True), columns)
    first, second = output.splitlines()
    assert first.endswith(("·", ",")) and second.startswith(" ") and len(first) <= columns
    assert f"{first}{second}" == text


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"], ["cache", "--help"]])
def test_summaries_of_commands_are_not_truncated(arguments: list[str]) -> None:
    output = call(*arguments, env={"COLUMNS": "60"}).stdout
    assert "..." not in output.partition("Commands:")[2]


def shown_in_a_terminal(columns: int, *arguments: str) -> list[str]:
    """Return the first few kB of lines that a command writes to a terminal."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    terminal = Path(os.ttyname(theirs))
    process = start_headstart(list(arguments), (terminal, terminal, terminal), TERM="xterm")
    process.join(60)
    assert process.exitcode == 0
    os.set_blocking(ours, False)
    output = os.read(ours, 2**16).decode()
    os.close(ours)
    os.close(theirs)
    return output.splitlines()


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_of_the_doctor_are_broken_between_words(columns: int) -> None:
    free = re.compile(r"[\d.]+ [A-Z]+ free")  # which changes meanwhile
    lines, whole = shown_in_a_terminal(columns, "doctor"), call("doctor").stdout
    assert max(map(len, lines)) <= columns
    words = [free.sub("", " ".join(text.split())) for text in (" ".join(lines), whole)]
    assert words[0] == words[1]
    too_long = any(len(line) > columns for line in whole.splitlines())  # a CPU's name, mostly
    assert any(line.startswith(" " * 10) for line in lines) == too_long


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lists_of_stored_prefixes_fit(columns: int, tmp_path: Path) -> None:
    """Regression: lines of 90 columns were broken inside a number."""
    model = save_smallest(tmp_path / "a-model-with-a-rather-long-name")
    cache_dir = tmp_path / "kept"
    llm = make_llm(model, cache_dir=str(cache_dir))
    greedy = SamplingParams(temperature=0, max_tokens=1)
    for end in range(2):
        llm.generate([list(range(3, 83)) + [90 + end] * 20], greedy, use_tqdm=False)
    llm.close()
    for names in ([], [model.name]):
        lines = shown_in_a_terminal(
            columns, "cache", "ls", *names, "--cache-dir", str(tmp_path / "kept")
        )
        assert max(map(len, lines)) <= columns
        text = "\n".join(lines)
        assert text.count("0 tokens") >= 1 and "last used" in text
        assert "112" in text if not names else "0 to 80" in text
