"""`headstart chat`: messages in, replies out, until the user leaves."""

import sys

import click

from headstart.cli.chat.commands import COMMANDS, PATH_COMMANDS, QuitChat, find_command
from headstart.cli.chat.messages import piped_messages, terminal_messages
from headstart.cli.chat.session import Chat
from headstart.cli.notes import note
from headstart.errors import RequestError

__all__ = ["talk"]


def talk(chat: Chat) -> None:
    """Answer messages and carry out commands until the end of input, or /quit."""
    note("/help shows the commands; /quit or the end of input ends the chat")
    is_typed = sys.stdin.isatty()
    messages = terminal_messages(list(COMMANDS), PATH_COMMANDS) if is_typed else piped_messages()
    for message in messages:
        found = find_command(message)
        if found is None:
            if message:
                chat.say(message)
            continue
        command, argument = found
        try:
            command.run(chat, argument)
        except RequestError as error:
            click.echo(f"headstart: {error}", err=True)
        except QuitChat:
            return
