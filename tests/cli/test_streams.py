"""The command line in any locale: unencodable output or input causes no traceback."""

import ast
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import closing, redirect_stderr
from pathlib import Path

import pytest
from click.testing import CliRunner

from headstart.cli.main import main
from headstart.cli.server import Address
from headstart.cli.terminal import decode_argument, note, prepare_streams, show_error
from headstart.errors import RequestError
from headstart.server.options import ServerOptions

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1"}
SMALL = ("--model", "demo", "--num-blocks", "64", "--max-tokens", "4")


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (("--help",), ""),
        (("demo",), ""),
        (("run", *SMALL, "naïve ■"), ""),
        (("chat", *SMALL), "Hello\n/pool\n"),
        (("run", "--model", "/no/such/modèle ■", "x"), ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_succeed_if_a_terminal_cannot_encode_output(
    charset: str, arguments: tuple[str, ...], stdin: str, demo_model: Path
) -> None:
    result = CliRunner(charset=charset).invoke(main, arguments, input=stdin)
    assert result.exit_code == (2 if "/no/such/modèle ■" in arguments else 0), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_stdin_that_is_not_text_is_one_sentence(command: str, demo_model: Path) -> None:
    result = CliRunner().invoke(main, [command, *SMALL], input=b"caf\xe9\n")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("headstart: stdin is not UTF-8 text")


@pytest.mark.parametrize("locale", [C_LOCALE, LATIN, {}], ids=["C", "latin-1", "usual"])
def test_in_a_real_locale(locale: dict[str, str]) -> None:
    """Bytes that are invalid in UTF-8 are refused, except with latin-1, which has all bytes."""
    model = "/no/such/modèle ■"
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "run", "--model", model],
        env=os.environ | locale,
        input=b"caf\xe9",
        capture_output=True,
    )
    error = done.stderr.decode("utf-8", "replace").splitlines()[-1]
    assert done.returncode == 2
    expected = "there is no folder" if locale is LATIN else "stdin is not UTF-8 text"
    assert error.startswith(f"headstart: {expected}")


def test_an_ascii_stdin_is_read_as_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode()), "ascii"))
    prepare_streams()
    assert sys.stdin.read() == "naïve"


def test_arguments_are_decoded_as_typed() -> None:
    typed = "naïve ■"
    assert decode_argument(typed) == typed
    assert decode_argument(typed.encode().decode("ascii", "surrogateescape")) == typed
    with pytest.raises(RequestError, match="not UTF-8"):
        decode_argument(b"\xff".decode("utf-8", "surrogateescape"))
    with pytest.raises(RequestError, match="not text"):
        decode_argument("\ud800")


@pytest.fixture
def other_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set COLUMNS to the width of another terminal, as a shell may export it."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("other_terminal")
@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("write", [note, show_error])
def test_lines_for_a_terminal_are_broken_between_words(
    columns: int, write: Callable[[str], None]
) -> None:
    """Regression: errors were one line, which the terminal broke inside words."""
    text = (
        "the document has 123,456 tokens; the context holds 8,192, which --max-model-len raises; "
        "/a/path/that/is/longer/than/forty/columns/and/is-copied.md stays whole"
    )
    output = shown_in_terminal(lambda: write(text), columns)
    lines = output.rstrip("\r\n").split("\r\n")
    assert " ".join(lines).removeprefix("headstart: ") == text
    assert all(len(line) <= columns or " " not in line for line in lines)
    assert len(lines) > 1


@pytest.mark.usefixtures("other_terminal")
def test_commands_for_a_server_can_be_pasted() -> None:
    """Regression: narrow terminals broke lines within quotes, and the key was undefined."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = Address(listener, ServerOptions(), "a/model", with_key=True)
        output = shown_in_terminal(address.show, 40)
    command, client, *_ = output.strip().replace("\r\n", "\n").split("\n\n")
    *_, header, _, body = shlex.split(command.replace("\\\n", ""))
    assert header == "Authorization: Bearer $HEADSTART_API_KEY"
    assert json.loads(body)["model"] == "a/model"
    ast.parse(client)
    assert 'environ["HEADSTART_API_KEY"]' in client


def test_the_command_for_a_speaking_model_requests_speech() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = Address(listener, ServerOptions(), "a/model", with_key=False, has_audio=True)
        output = shown_in_terminal(address.show, 80)
    *_, body = shlex.split(output.replace("\r\n", "\n").split("\n\n")[0].replace("\\\n", ""))
    assert json.loads(body)["modalities"] == ["text", "audio"]


def shown_in_terminal(write: Callable[[], object], columns: int) -> str:
    """Return the output on stderr in a terminal, without colors."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    with os.fdopen(theirs, "w") as terminal:
        with redirect_stderr(terminal):
            write()
        terminal.flush()
        output = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 10_000).decode())
    os.close(ours)
    return output
