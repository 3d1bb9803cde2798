"""`headstart chat` in a pseudo-terminal: typing, pasting, interrupts and history.

Each step waits for text instead of sleeping. The prompt is ready when its hint is shown.
"""

import json
import os
import re
import stat
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.forked import start_headstart

pexpect = pytest.importorskip("pexpect")
fdpexpect = pytest.importorskip("pexpect.fdpexpect")

READY = "a message, or /help"
COST = r"prompt ([\d,]+)\s+tokens,\s+cached\s+([\d,]+) \("
PEOPLE = Path(__file__).parents[2] / "headstart" / "assets" / "people.md"
PASTE, END_PASTE = "\x1b[200~", "\x1b[201~"
UP, LEFT = "\x1b[A", "\x1b[D"


class Terminal:
    """A chat in a terminal with `columns`; its data folder is `home`."""

    started: ClassVar[list["Terminal"]] = []

    def __init__(self, home: Path, *arguments: str, columns: int = 100) -> None:
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (40, columns))
        terminal = Path(os.ttyname(theirs))
        self.process = start_headstart(
            ["chat", "--num-blocks", "512", *arguments],
            (terminal, terminal, terminal),
            XDG_DATA_HOME=str(home),
            TERM="xterm-256color",
        )
        self.child = fdpexpect.fdspawn(ours, encoding="utf-8", timeout=120)
        self.started.append(self)
        try:
            self.wait(READY)
        finally:
            os.close(theirs)  # after the process has opened it

    def wait(self, text: str) -> re.Match[str]:
        self.child.expect(text)
        match = self.child.match
        assert isinstance(match, re.Match)
        return match

    def send(self, text: str) -> None:
        self.child.send(text)

    def ask(self, text: str) -> tuple[int, int]:
        """Send a message; return its turn's numbers of prompt tokens and cached tokens."""
        self.send(text + "\r")
        return self.cost()

    def cost(self) -> tuple[int, int]:
        match = self.wait(COST)
        self.wait(READY)
        return number(match[1]), number(match[2])

    def end(self) -> None:
        self.send("\x04")
        self.child.expect(pexpect.EOF)
        self.process.join(60)
        assert self.process.exitcode == 0


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    while Terminal.started:
        terminal = Terminal.started.pop()
        terminal.process.kill()
        terminal.process.join()
        terminal.child.close()


def test_lines_are_edited_pasted_and_remembered(tmp_path: Path) -> None:
    # The model has no answer to the long paste, and would continue for a thousand tokens.
    terminal = Terminal(tmp_path, "--max-tokens", "32", columns=80)
    short, _ = terminal.ask("Hi")
    terminal.send("Hix" + LEFT * 1 + "\x1b[3~" + "\r")  # the delete key takes the x
    edited, cached = terminal.cost()
    assert cached > short and edited - cached < 2 * short
    # Lines beyond a terminal's limit (4,096 bytes) arrive complete, as one message.
    pasted = "word " * 900 + "\nand a second line"
    terminal.send(f"{PASTE}{pasted}{END_PASTE}\r")
    long, _ = terminal.cost()
    assert long > edited + 900
    # Several lines between quotes are one message.
    terminal.send('"""one\r')
    terminal.send("two\r")
    terminal.send('three"""\r')
    quoted, cached = terminal.cost()
    assert cached >= long and quoted - cached < 40
    # Ctrl-C clears the typed text; the next line is a separate message.
    terminal.send("to be cleared")
    terminal.send("\x03")
    terminal.wait("Ctrl-C again")
    terminal.send("//nonsense is a message\r")
    terminal.cost()
    terminal.send("/no")
    terminal.send("\x03")
    terminal.wait("Ctrl-C again")
    terminal.send("\x03")
    terminal.child.expect(pexpect.EOF)
    history = tmp_path / "headstart" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    saved = history.read_text(encoding="utf-8")
    assert "+and a second line" in saved and "cleared" not in saved
    # The next chat has the history of the last one.
    terminal = Terminal(tmp_path)
    terminal.send(UP)
    terminal.wait("//nonsense is a message")
    terminal.send("\r")
    terminal.cost()
    terminal.end()


def test_an_interrupted_reply_stays_in_the_history_and_is_hit(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--ignore-eos", "--max-tokens", "2000", "--max-model-len", "4096")
    terminal.send("Hello\r")
    terminal.wait("The ")
    terminal.send("/set seed")  # appears at the next prompt; regression: it was lost
    terminal.send("\x03")
    first = terminal.wait(COST)
    assert number(first[2]) == 0
    terminal.wait("interrupted: the chat continues with this part of the reply")
    terminal.wait("/set seed")
    terminal.send("\r")
    terminal.wait("seed is None")
    terminal.wait(READY)
    terminal.send("/set max_tokens 4\r")
    terminal.wait(READY)
    prompt, cached = terminal.ask("And now?")
    assert number(first[1]) < cached < prompt
    saved = tmp_path / "chat.json"
    terminal.send(f"/save {saved}\r")
    terminal.wait(r"2 turns in\s")
    terminal.wait(READY)
    messages = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"].startswith("The ")
    terminal.end()


def test_documents_limits_and_saved_chats(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    terminal = Terminal(tmp_path, "--max-model-len", "1600", "--system", "Be brief.", columns=60)
    terminal.send(f"/file {PEOPLE}\r")
    count = number(terminal.wait(r"people.md: ([\d,]+) tokens")[1])
    terminal.wait(READY)
    first, _ = terminal.ask("What is the age of John Doe?")
    assert count < first < count + 40
    terminal.send("/explain\r")
    terminal.wait(r"0 of the last\s+prompt's")
    terminal.wait(READY)
    terminal.send(f"{PASTE}{'Who is it? ' * 40}{END_PASTE}\r")
    terminal.wait("the oldest turn is")
    prompt, cached = terminal.cost()
    assert prompt < 800 and 0 < cached < 20  # the system message stays
    terminal.send(f"/save {saved}\r")
    terminal.wait(r"2 turns in\s")
    terminal.wait(READY)
    terminal.end()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600

    terminal = Terminal(tmp_path, "--resume", str(saved), "--plain")
    terminal.send("/undo\r")
    terminal.wait("1 turn left")
    terminal.wait(READY)
    again, cached = terminal.ask("And what is the age of Zack Blue?")
    assert (again > first, cached) == (True, 0)
    terminal.send("/undo\r")
    terminal.wait(READY)
    terminal.send("/retry\r")
    assert terminal.cost()[0] == first
    terminal.end()


def test_colors_in_a_paste_are_removed(tmp_path: Path) -> None:
    """Regression: prompt_toolkit took a color for a mouse click, and failed."""
    terminal = Terminal(tmp_path, "--max-tokens", "4")
    colored = "\x1b[1;31mHi\x1b[0m \x1b]0;a title\x07the\x1b[Kre\x1b(B \x1b]8;;a:b\x1b\\now"
    terminal.send(f"{PASTE}{colored}\r\nand on{END_PASTE}\r")
    terminal.cost()
    # In a terminal that marks no paste the text arrives as if it were typed.
    terminal.send("\x1b[31mHello\x1b[0m the\x1b[2;3Rre\r")
    terminal.cost()
    terminal.end()
    history = (tmp_path / "headstart" / "chat_history").read_text(encoding="utf-8")
    assert "+Hi there now\n+and on\n" in history and "+Hello there\n" in history


def test_a_document_stays_pending_after_an_interrupt(tmp_path: Path) -> None:
    """Regression: there was no message, and the next turn computed it again."""
    slow = ("--max-num-batched-tokens", "1", "--max-num-seqs", "1", "--max-tokens", "4")
    terminal = Terminal(tmp_path, *slow, "--cache-dir", "off")
    terminal.send(f"/file {PEOPLE}\r")
    tokens = terminal.wait(r"people.md: ([\d,]+) tokens")[1]
    terminal.wait(READY)
    terminal.send("How old is John Doe?\r")
    terminal.wait(r"read [\d,]+ of")
    terminal.send("\x03")
    terminal.wait("interrupted before the reply began")
    terminal.wait(rf"people.md \({tokens} tokens\): still to be sent with your next message")
    terminal.wait(READY)
    terminal.send("/undo\r")
    terminal.wait("are removed")
    terminal.wait(READY)
    prompt, _ = terminal.ask("Hello")
    assert prompt < number(tokens)
    terminal.end()


@pytest.mark.parametrize("keys", ["\x04", "\x03\x03"])
def test_leaving_clears_the_prompt(tmp_path: Path, keys: str) -> None:
    """Regression: the hint stayed as the last line of the screen."""
    terminal = Terminal(tmp_path)
    terminal.send(keys)
    terminal.child.expect(pexpect.EOF)
    shown = terminal.child.before
    after = shown[max(shown.rfind("Ctrl-C again"), 0) :]
    assert "\n" not in after and "\x1b[2D\x1b[J" in after  # back over "> ", and cleared from there


def test_ctrl_c_while_a_model_loads_is_one_line(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    terminal = Path(os.ttyname(theirs))
    process = start_headstart(
        ["chat", "--num-blocks", "512", "--cache-dir", str(tmp_path)],
        (terminal, terminal, terminal),
    )
    child = fdpexpect.fdspawn(ours, encoding="utf-8", timeout=120)
    child.expect("headstart-tiny, 8 million parameters")  # shown before it loads
    child.send("\x03")
    process.join(60)
    os.close(theirs)
    child.expect(pexpect.EOF)
    assert process.exitcode == 130
    assert "headstart: interrupted" in child.before and "Aborted" not in child.before


def test_text_typed_during_a_reply_is_the_next_line(tmp_path: Path) -> None:
    """Regression: it appeared within the reply, whose first lines were then repeated."""
    terminal = Terminal(tmp_path, "--ignore-eos", "--max-tokens", "120", "--temperature", "0")
    terminal.send("Hi\r")
    terminal.wait("is not in")  # the reply has begun
    terminal.send("zyx is next\r")
    terminal.wait(COST)
    assert "zyx" not in terminal.child.before
    terminal.wait("zyx is next")
    terminal.cost()
    terminal.end()
