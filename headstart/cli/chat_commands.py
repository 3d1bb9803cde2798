"""`headstart chat`: messages in, replies out, and the commands that begin with a slash."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headstart.cli.chat_input import piped_messages, terminal_messages
from headstart.cli.chat_session import Chat
from headstart.cli.conversation import Conversation, read_document, read_image
from headstart.cli.options import SAMPLING_FLAGS, check_sampling_name, parse_sampling
from headstart.cli.progress import count
from headstart.cli.streams import note, tell_error
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

_KEYS = (
    "Ctrl-C ends a reply, clears a line, and twice ends the chat, as Ctrl-D does. "
    '""" begins and ends a message of several lines; Alt-Enter begins a line, too.'
)
_SLASHES = "a message that begins with a slash is sent with two"


class QuitChat(Exception):
    """Raised by the command that ends the chat."""


@dataclass(frozen=True)
class Command:
    """A command, which changes a chat by the text behind its name.

    argument: the name of that text, in brackets if it is optional; empty for a command without.
    help: empty for another name of a command.
    """

    run: Callable[[Chat, str], None]
    help: str
    argument: str = ""


def talk(chat: Chat) -> None:
    """Answer messages and run commands until the end of input, or /quit."""
    note("/help shows the commands; /quit or the end of input ends the chat")
    is_typed = sys.stdin.isatty()
    messages = terminal_messages(list(COMMANDS), PATH_COMMANDS) if is_typed else piped_messages()
    for message in messages:
        try:
            if (found := find_command(message)) is not None:
                command, argument = found
                command.run(chat, argument)
            elif message:
                chat.say(message.removeprefix("/"))
        except (RequestError, OSError, ValueError, RuntimeError) as error:  # odd paths raise many
            tell_error(error)
        except KeyboardInterrupt:  # before the reply began
            note("[interrupted: the conversation is as it was before]")
        except QuitChat:
            return


def find_command(message: str) -> tuple[Command, str] | None:
    """Return a message's command and its argument; None for a message to the model.

    A message to the model begins with no slash, or with two. Raises RequestError for an unknown
    command.
    """
    if not message.startswith("/") or message.startswith("//"):
        return None
    name, *rest = message.split(maxsplit=1)
    argument = rest[0] if rest else ""
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise RequestError(f"{name} is no command ({hint}); {_SLASHES}")
    if argument and not command.argument:
        raise RequestError(f"{name} takes no text behind it; {_SLASHES}")
    return command, argument


def _help(chat: Chat, argument: str) -> None:
    shown = {name: command for name, command in COMMANDS.items() if command.help}
    rows = [(f"{name} {command.argument}", command.help) for name, command in shown.items()]
    width = max(len(usage) for usage, _ in rows) + 1
    for usage, text in rows:
        note(f"{usage:<{width}}{text}", " " * width)
    note(f"A command begins with a slash; {_SLASHES}: //etc. {_KEYS}")


def _file(chat: Chat, argument: str) -> None:
    path = _path(argument)
    text = read_document(path)
    tokens = chat.count_tokens(text)
    chat.conversation.documents.append(text)
    chat.conversation.waiting.append(f"{path.name} ({tokens:,} tokens)")
    note(f"{path.name}: {tokens:,} tokens, which go with your next message")


def _image(chat: Chat, argument: str) -> None:
    path = _path(argument)
    image = read_image(path, chat.llm.config.max_image_pixels)
    tokens = chat.count_image_tokens(image)
    chat.conversation.images.append(image)
    chat.conversation.waiting.append(f"{path.name} (about {tokens:,} tokens)")
    note(f"{path.name}: about {tokens:,} tokens, which go with your next message")


def _system(chat: Chat, argument: str) -> None:
    if not argument:
        note(chat.conversation.system or "there is no system message")
        return
    chat.conversation.system = argument
    chat.changed = "/system"
    turns = len(chat.conversation.turns)
    note("all turns are read again behind the new system message" if turns else "set")


def _undo(chat: Chat, argument: str) -> None:
    if chat.conversation.documents or chat.conversation.images:
        chat.conversation.drop_waiting()
        note("the documents and images that waited are taken back; /undo again takes a turn back")
        return
    turn = chat.conversation.take_back()
    chat.changed = "/undo"
    shown = f", and with it {', '.join(turn.shown)}" if turn.shown else ""
    note(f"the last turn is taken back{shown}; {count(len(chat.conversation.turns), 'turn')} left")


def _save(chat: Chat, argument: str) -> None:
    path = _path(argument)
    if not chat.conversation.turns:
        raise RequestError("nothing was said yet, so there is nothing to save")
    chat.conversation.save(path, chat.model)
    note(f"{count(len(chat.conversation.turns), 'turn')} in {path}")


def _load(chat: Chat, argument: str) -> None:
    chat.take_up(Conversation.load(_path(argument)))
    chat.last = None  # for /explain: nothing was asked in this conversation
    chat.tell_taken_up("loaded")


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if "=" in name:
        raise RequestError("the form is /set NAME VALUE, as in /set temperature 0.7")
    if value.strip():
        values = parse_sampling(name, value.strip())
        chat.set(**values)
        note(", ".join(f"{known} is now {told}" for known, told in values.items()))
    elif name:
        now = getattr(chat.params, check_sampling_name(name))
        raise RequestError(f"{name} is {now}; /set {name} VALUE changes it")
    else:
        note(f"{_parameters(chat)}; /set NAME VALUE changes one", in_parts=True)


def _pool(chat: Chat, argument: str) -> None:
    console = Console(stderr=True)
    console.print(chat.picture.draw(console.width))
    size = chat.llm.block_size
    note(
        f"A block holds the K/V of {size} tokens. What is cached is not computed again when a "
        "prompt begins with the same tokens; a colour stands for the message that computed it."
    )


def _explain(chat: Chat, argument: str) -> None:
    if chat.last is None:
        raise RequestError("nothing was asked yet")
    note(explain_turn(chat.last, chat.changed))


def _show(chat: Chat, argument: str) -> None:
    lines = {
        "info": f"{chat.model}, with a context of {chat.llm.max_model_len:,} tokens; "
        f"{count(len(chat.conversation.turns), 'turn')} so far",
        "parameters": _parameters(chat),
        "system": chat.conversation.system or "there is no system message",
    }
    if argument and argument not in lines:
        raise RequestError(f"/show {argument} is not there; allowed: {', '.join(lines)}")
    for name, line in lines.items():
        if argument in ("", name):
            note(line, in_parts=name == "parameters")


def _parameters(chat: Chat) -> str:
    return ", ".join(f"{name} {getattr(chat.params, name)}" for name in SAMPLING_FLAGS)


def _reset(chat: Chat, argument: str) -> None:
    chat.conversation = Conversation(system=chat.conversation.system)
    chat.last = None  # as after /load
    kept = ", with the system message" if chat.conversation.system else ""
    note(f"the conversation begins anew{kept}")


def _quit(chat: Chat, argument: str) -> None:
    raise QuitChat


COMMANDS: Mapping[str, Command] = {
    "/help": Command(_help, "shows this; so does /?"),
    "/?": Command(_help, ""),
    "/file": Command(_file, "puts a document before your next message", "PATH"),
    "/image": Command(_image, "shows the model an image", "PATH"),
    "/system": Command(_system, "sets the system message, or shows it", "[TEXT]"),
    "/retry": Command(lambda chat, _: chat.retry(), "answers the last question again"),
    "/undo": Command(_undo, "takes back documents and images not yet sent, else the last turn"),
    "/save": Command(_save, "writes the conversation to a file, as JSON", "PATH"),
    "/load": Command(_load, "goes on with a saved conversation", "PATH"),
    "/set": Command(
        _set, "changes temperature, top_p, ...; alone, shows all of them", "[NAME VALUE]"
    ),
    "/pool": Command(
        _pool, "draws the memory of the cache: which blocks are cached, and for which message"
    ),
    "/explain": Command(_explain, "says what of the last prompt was cached, and why not more"),
    "/show": Command(
        _show, "shows the model, the sampling parameters and the system message", "[info|...]"
    ),
    "/reset": Command(_reset, "forgets all turns, but not the system message; so does /clear"),
    "/clear": Command(_reset, ""),
    "/quit": Command(_quit, "ends the chat; so do /exit and /bye"),
    "/exit": Command(_quit, ""),
    "/bye": Command(_quit, ""),
}
PATH_COMMANDS = ("/file", "/image", "/save", "/load")


def _path(argument: str) -> Path:
    """Return a path as it was typed, or dragged into the terminal, which quotes it."""
    if not argument:
        raise RequestError("which file? Give its path behind the command")
    path = Path(argument).expanduser()
    if path.exists():
        return path
    try:
        words = shlex.split(argument)
    except ValueError:  # an apostrophe
        return path
    return Path(words[0]).expanduser() if len(words) == 1 else path


def explain_turn(output: RequestOutput, changed: str = "") -> str:
    """Return a sentence about the cached part of the last turn's prompt, and its tiers.

    changed: the command that has changed the conversation since.
    """
    whose = f"before {changed}, {{}} of the prompt's" if changed else "{} of the last prompt's"
    text = whose.format(f"{output.num_cached_tokens:,}")
    text += f" {count(len(output.prompt_token_ids), 'token')} were cached"
    if output.loaded_tokens:
        tiers = (f"{loaded:,} of them from {tier}" for tier, loaded in output.loaded_tokens.items())
        text += f" ({', '.join(tiers)})"
    return text if output.why_missed is None else f"{text}; {output.why_missed}"
