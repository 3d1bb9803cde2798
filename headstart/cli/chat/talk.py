"""`headstart chat`: messages in, replies out, until the user leaves."""

import sys

from headstart.cli.chat.commands import COMMANDS, PATH_COMMANDS, QuitChat, find_command
from headstart.cli.chat.messages import piped_messages, terminal_messages
from headstart.cli.chat.session import Chat
from headstart.cli.streams import note, tell_error
from headstart.errors import RequestError

__all__ = ["talk"]


def talk(chat: Chat) -> None:
    """Answer messages and carry out commands until the end of input, or /quit."""
    note("/help shows the commands; /quit or the end of input ends the chat")
    is_typed = sys.stdin.isatty()
    messages = terminal_messages(list(COMMANDS), PATH_COMMANDS) if is_typed else piped_messages()
    for message in messages:
        try:
            _answer(chat, message)
        except (RequestError, OSError, ValueError, RuntimeError) as error:  # odd paths raise many
            tell_error(error)
        except KeyboardInterrupt:  # before the reply began: the conversation is as it was
            note("[interrupted: the conversation is as it was before]")
        except QuitChat:
            return


def _answer(chat: Chat, message: str) -> None:
    found = find_command(message)
    if found is not None:
        command, argument = found
        command.run(chat, argument)
    elif message:
        chat.say(message.removeprefix("/"))
