"""`headstart chat`: a conversation in the terminal, the cost of each turn below it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console

from headstart.cli.pool_picture import PoolPicture
from headstart.cli.reply_metrics import print_reply
from headstart.cli.streams import reading_stdin
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.llm import LLM
    from headstart.engine.outputs import RequestOutput

HELP = "/reset begins anew · /pool draws the block pool · /quit (or end of input) ends"
PROMPT = "> "


class Chat:
    """One conversation: messages so far, and a picture of whose blocks are in the pool."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)
        self._picture = PoolPicture(llm.engine.manager)
        self._turns = 0

    def talk(self) -> None:
        """Read lines until /quit or the end of input, and answer each."""
        click.secho(HELP, dim=True, err=True)
        for line in _lines():
            if line in ("/quit", "/exit"):
                return
            if not self._is_command(line):
                self._answer(line)

    def _is_command(self, line: str) -> bool:
        if line == "/reset":
            self._messages = list(self._beginning)
        elif line == "/pool":
            Console(stderr=True).print(self._picture.draw())
        elif line.startswith("/"):
            click.secho(HELP, dim=True, err=True)
        return line.startswith("/") or not line

    def _answer(self, text: str) -> None:
        """One turn; a turn that fails or is interrupted leaves the conversation as it was."""
        asked = [*self._messages, {"role": "user", "content": text}]
        self._turns += 1
        try:
            replies = self._llm.stream_chat(asked, self._params)
            output = print_reply(_until_interrupted(replies))
        except RequestError as error:
            click.echo(f"headstart: {error}", err=True)
            return
        if output.finished:
            self._messages = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
        self._picture.look(self._turns)


def _until_interrupted(replies: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """The outputs until the end or Ctrl-C, which takes effect between two steps."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        for output in replies:
            yield output
            if interrupts:
                return
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """What the user types, or what stdin holds: then each line is shown as if it were typed."""
    if sys.stdin.isatty():
        while True:
            try:
                with reading_stdin():
                    line = input(PROMPT).strip()
                yield line
            except (EOFError, KeyboardInterrupt):
                click.echo()
                return
    with reading_stdin():
        for line in sys.stdin:
            click.echo(PROMPT + line.strip())
            yield line.strip()
