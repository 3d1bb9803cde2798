'''The user's messages: from a terminal, with history and editing, or from a pipe.

> one line                 > """
                           several lines
                           """
'''

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from headstart.cli.streams import reading_stdin
from headstart.machine import data_folder

PROMPT = "> "
_QUOTES = '"""'
# ECMA-48: a control sequence such as a colour, a text for the terminal such as its title, or a
# sequence of one letter; then what is left of a sequence that was cut.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\x1b"
)


def piped_messages() -> Iterator[str]:
    """Yield the messages of stdin, each shown as if it were typed."""
    lines: list[str] = []
    with reading_stdin():
        for line in sys.stdin:
            click.echo(PROMPT + line.strip())
            lines.append(line)
            if not _is_open("".join(lines)):
                yield _unquote("".join(lines))
                lines.clear()
    if lines:
        yield "".join(lines).strip().removeprefix(_QUOTES)


def terminal_messages(names: Sequence[str], with_paths: Sequence[str]) -> Iterator[str]:
    """Yield what the user types until Ctrl-D, or Ctrl-C twice.

    names: completed by Tab at the beginning of a message; with_paths: the names that a path
    follows, which Tab completes as well.
    """
    leaving = _Leaving()
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # prompt_toolkit would warn in terminals that do not answer
    session: PromptSession[str] = PromptSession(
        PROMPT,
        output=output,
        history=_history(),
        key_bindings=_bindings(leaving),
        completer=_CommandCompleter(names, with_paths),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        placeholder=lambda: FormattedText([("ansibrightblack", leaving.hint)]),
        prompt_continuation="  ",
    )
    session.default_buffer.on_text_changed += lambda buffer: leaving.forget()
    while True:
        leaving.forget()
        try:
            yield _unquote(session.prompt())
        except EOFError:
            return


class _Leaving:
    """Remembers if the last key was Ctrl-C."""

    def __init__(self) -> None:
        self.asked = False

    @property
    def hint(self) -> str:
        return "Ctrl-C again, or Ctrl-D, ends the chat" if self.asked else "a message, or /help"

    def forget(self) -> None:
        self.asked = False


def _bindings(leaving: _Leaving) -> KeyBindings:
    bindings = KeyBindings()

    def leave(event: KeyPressEvent) -> None:
        event.app.erase_when_done = True
        event.app.exit(exception=EOFError)

    @bindings.add("c-c")
    def _clear_or_leave(event: KeyPressEvent) -> None:
        if leaving.asked:
            leave(event)
            return
        event.current_buffer.reset()
        leaving.asked = True

    bindings.add("c-d", filter=Condition(lambda: not get_app().current_buffer.text))(leave)

    @bindings.add(Keys.BracketedPaste)
    def _paste(event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(_ESCAPES.sub("", text))

    @bindings.add(Keys.Vt100MouseEvent)
    @bindings.add(Keys.CPRResponse)
    def _ignore(event: KeyPressEvent) -> None:
        """Ignore colours of a pasted text, in a terminal that does not mark pastes."""

    @bindings.add("escape", "enter")
    @bindings.add("enter", filter=Condition(lambda: _is_open(get_app().current_buffer.text)))
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _CommandCompleter(Completer):
    """Completes names of commands at the beginning of a message, and paths behind some of them."""

    def __init__(self, names: Sequence[str], with_paths: Sequence[str]) -> None:
        self._names = names
        self._with_paths = with_paths
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text
        name, space, path = text.partition(" ")
        if space and name in self._with_paths:
            yield from self._paths.get_completions(Document(path), event)
        elif text.startswith("/") and not space:
            for command in self._names:
                if command.startswith(text):
                    yield Completion(command, -len(text))


def _history() -> History:
    """Return the messages of earlier chats, in a file that only this user may read."""
    try:
        file = data_folder() / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except (OSError, RuntimeError):  # a disk that is full or read-only
        return InMemoryHistory()
    return FileHistory(str(file))


def _is_open(text: str) -> bool:
    """Return True if a message of several lines began and did not end."""
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1


def _unquote(text: str) -> str:
    text = text.strip()
    quoted = text.startswith(_QUOTES) and text.endswith(_QUOTES) and text.count(_QUOTES) == 2
    return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip() if quoted else text
