"""Docs are tests: the examples in README, docs and docstrings run.

Python blocks of a page run from top to bottom in one namespace, as a reader would type them.
An HTML comment on the line above a block names its requirements:

    <!-- demo model: Qwen/Qwen2.5-0.5B-Instruct -->    the demo model replaces this name
    <!-- server: http://127.0.0.1:8000 -->             a server of headstart-tiny replaces this URL
    <!-- output -->                                    (above a text block) the output of the Python
                                                       block before it; `...` matches anything

Shell blocks are parsed, not run: `headstart` commands by the real parser, `make` targets must be in
the Makefile, and scripts must exist.
"""

import doctest
import re
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click
import pytest

from headstart.cli.main import main
from tests.house.source import PACKAGE, ROOT, read_modules
from tests.server.running import running

BLOCK = re.compile(
    r"^(?:<!-- (?P<note>.*?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)
LANGUAGES = {"python", "sh", "text", "json"}
STAND_IN, SERVER = "demo model: ", "server: "


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `line` is the number of its first line."""

    language: str
    note: str
    body: str
    line: int


def read_blocks(text: str) -> list[Block]:
    return [
        Block(
            match["language"],
            match["note"] or "",
            match["body"],
            text.count("\n", 0, match.start("body")) + 1,
        )
        for match in BLOCK.finditer(text)
    ]


PAGES = {
    str(path.relative_to(ROOT)): read_blocks(path.read_text(encoding="utf-8"))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}


def pages_with(language: str) -> list[str]:
    return [name for name, blocks in PAGES.items() if any(b.language == language for b in blocks)]


def run_python(
    blocks: list[Block], page: str, stand_in: Callable[[str], str], read: Callable[[], str]
) -> list[str]:
    """Run a page's blocks, and return the differences between printed and documented output.

    stand_in: returns the replacement for the name in a note.
    """
    namespace: dict[str, object] = {"__name__": "__page__"}
    wrong, printed = [], ""
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in blocks:
        if block.language == "python":
            code = block.body
            if block.note.startswith((STAND_IN, SERVER)):
                name = block.note.partition(": ")[2]
                assert name in code, f"{page}:{block.line}: {name} is not in the block"
                code = code.replace(name, stand_in(block.note))
            lines = "\n" * (block.line - 1)  # so that a traceback names the page's line
            exec(compile(lines + code, page, "exec"), namespace)
            printed = read()
        elif block.note == "output" and not checker.check_output(block.body, printed, options):
            wrong.append(f"{page}:{block.line} says\n{block.body}but it printed\n{printed}")
    return wrong


def parse_command(line: str) -> None:
    """Check a command. Raises click.UsageError or AssertionError if it is wrong."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    program, arguments = words[0], words[1:]
    if program == "headstart":
        parse_arguments(main, arguments)
        assert "0.0.0.0" not in arguments or "--api-key" in arguments, "refused without a key"
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in arguments:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"no target {target}"
    elif program in ("python", ".venv/bin/python"):
        assert arguments[0] == "-m" or (ROOT / arguments[0]).is_file(), f"no {arguments[0]}"
    else:
        assert program in ("git", "cd", "pip", "echo", "cat", "curl", "ray"), f"what is {program}?"


def parse_arguments(command: click.Command, arguments: list[str]) -> None:
    with command.make_context(command.name, list(arguments)) as context:
        if isinstance(command, click.Group):
            rest = [*context._protected_args, *context.args]
            if command.invoke_without_command and not rest:
                return
            _, chosen, rest = command.resolve_command(context, rest)
            assert chosen is not None
            parse_arguments(chosen, rest)


def shell_lines(block: Block) -> list[str]:
    joined = block.body.replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    parts = [part for line in lines for part in re.split(r"\s(?:\||&&)\s", line)]
    return [part for part in parts if part and not part.startswith("#")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_checked_language(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(PAGES[page]), "a fence was not understood"
    assert {block.language for block in PAGES[page]} <= LANGUAGES


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page: str, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as open_things:

        def stand_in(note: str) -> str:
            if note.startswith(STAND_IN):
                return demo_model.as_posix()
            return open_things.enter_context(running(name="headstart-tiny")).url

        assert run_python(PAGES[page], page, stand_in, lambda: capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (page, line)
        for page in pages_with("sh")
        for block in PAGES[page]
        if block.language == "sh"
        for line in shell_lines(block)
    ],
)
def test_shell_commands_are_valid(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse_command(line)


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text) + re.findall(
        r'src="([^":]+)"', text
    )
    assert [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()] == []


@pytest.mark.parametrize("name", [n for n, m in read_modules(PACKAGE).items() if ">>> " in m.text])
def test_examples_in_docstrings_run(name: str, demo_model: Path) -> None:
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "line",
    [
        "headstart demo --warp 9",
        "headstart fly",
        "headstart serve --host 0.0.0.0",
        "make love",
        "rm -r",
    ],
)
def test_an_unknown_command_is_found(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        parse_command(line)


def test_output_that_differs_from_the_page_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    page = "```python\nprint(41)\n```\n\n<!-- output -->\n```text\n42\n```\n"
    wrong = run_python(read_blocks(page), "p", Path(), lambda: capsys.readouterr().out)
    assert wrong == ["p:7 says\n42\nbut it printed\n41\n"]


def test_make_reports_what_it_installs() -> None:
    """Regression: the first `make demo` was silent for minutes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.split(r"\n(?=[^\s#]+:(?!=))", makefile)
    recipes = [target for target in targets if "\n\t$(PIP)" in target]
    assert len(recipes) == 3
    for recipe in recipes:
        assert 0 < recipe.find('\n\t@echo "Installing ') < recipe.index("\n\t$(PIP)")
