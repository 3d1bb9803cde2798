'''`headstart chat`: a conversation in the terminal, and its commands, which begin with a slash.

> one line                 > """
                           several lines
                           """
'''

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from rich.text import Text

from headstart.cli.messages import Content, Conversation, Turn, read_document, read_image
from headstart.cli.options import SAMPLING_FLAGS, check_sampling_name, parse_sampling
from headstart.cli.pool_picture import PoolPicture
from headstart.cli.reply import print_reply
from headstart.cli.terminal import (
    OutputConsole,
    columns_of,
    count,
    handling,
    note,
    preserving_input,
    reading_stdin,
    show_error,
)
from headstart.errors import EngineError, RequestError
from headstart.machine import data_folder
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.frontend.llm import LLM
    from headstart.frontend.streams import RequestStream

_RESERVE = 256  # tokens of the context that are reserved for the reply
_PROMPT = "> "
_QUOTES = '"""'
# Escape sequences of ECMA-48: a control sequence such as a color, a string for the terminal such as
# its title, a sequence of one letter, or the beginning of an incomplete sequence.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\x1b"
)
_KEYS = (
    "Ctrl-C ends a reply or clears a line. Ctrl-D, or Ctrl-C twice, ends the chat. "
    '""" begins and ends a message of several lines; Alt-Enter inserts a line break.'
)
_SLASHES = "type two slashes to send a message that begins with a slash"


@dataclass
class Chat:
    """A conversation with a model, printed in a terminal.

    plain: show replies as text, not as Markdown. adapter: the name of the adapter, if any. last:
    the output of the last turn. changed: the command that changed the conversation after this turn,
    if any.
    """

    llm: LLM
    model: str
    params: SamplingParams
    conversation: Conversation
    plain: bool = False
    adapter: str | None = None
    last: RequestOutput | None = field(default=None, init=False)
    changed: str = field(default="", init=False)
    _num_questions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.picture = PoolPicture(self.llm.manager)
        self.resume(self.conversation)

    def resume(self, conversation: Conversation) -> None:
        """Continue a conversation. The next prompt contains the token ids of its saved replies."""
        self.conversation, self.last = conversation, None
        if replies := conversation.reply_token_ids():
            with suppress(RequestError):  # the next turn reports the error
                self.llm.recall_chat(conversation.messages("", 0)[:-1], replies)

    def show_resumed(self, name: str) -> None:
        """Show the length of the conversation, its last question, and its last reply."""
        turns = self.conversation.turns
        size = count(len(turns), "turn")
        if messages := self.conversation.messages("", 0)[:-1]:
            try:
                stream = self.llm.stream_chat(messages, self.params, add_generation_prompt=False)
                size += f", {len(stream.prompt_token_ids):,} tokens"
            except RequestError as error:  # the next turn drops turns that do not fit
                size += f", of which not all fit: {error}"
        note(f"{name}: {size}; the line below the next reply shows how many tokens are cached")
        for line in filter(None, turns[-1].lines() if turns else ()):
            text = Text(in_one_line(line))
            text.truncate(columns_of(sys.stderr) or 80, overflow="ellipsis")
            note(text.plain)

    def send(self, text: str) -> None:
        """Answer a message, together with the waiting documents and images."""
        conversation, is_answered = self.conversation, False
        try:
            is_answered = self._answer(
                conversation.make_question(text), tuple(conversation.waiting)
            )
        finally:
            if is_answered:
                conversation.drop_waiting()
            elif conversation.waiting:
                names = ", ".join(conversation.waiting)
                note(f"{names}: still to be sent with your next message, unless you type /undo")

    def retry(self) -> None:
        """Answer the last question again. Raises RequestError if there is none."""
        turn = self.conversation.pop_turn()
        if not self._answer(turn.question, turn.attachments):
            self.conversation.turns.append(turn)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a string. Raises RequestError if the context cannot hold them."""
        self.llm.check_length("the document", text)
        tokenizer = self.llm.get_tokenizer()
        assert tokenizer is not None
        tokens = len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        if tokens >= self.llm.max_model_len:
            raise RequestError(
                f"the document has {tokens:,} tokens; the context holds {self.llm.max_model_len:,}"
            )
        return tokens

    def count_image_tokens(self, image: dict[str, Any]) -> int:
        """Count the tokens of a message with only this image. Raises RequestError."""
        if not self.llm.takes_images:
            raise RequestError(f"{self.model} takes only text")
        single = Conversation(images=[image])
        return len(self._stream(single, single.make_question(""), 0).prompt_token_ids)

    def _answer(self, question: Content, attachments: tuple[str, ...]) -> bool:
        """Answer a question, and add the turn; return False if there is no reply.

        attachments: the names of the documents and images in the question.
        """
        try:
            stream = self._fit(question)
            self._num_questions += 1
            # Ctrl-C ends only the reply, after the current step.
            with preserving_input(), handling(lambda *_: stream.abort(), signal.SIGINT):
                output = print_reply(stream, plain=self.plain)
        except (RequestError, EngineError) as error:
            show_error(error)
            return False
        self.last, self.changed = output, ""
        self.picture.update(self._num_questions)
        answer = output.outputs[0]
        is_interrupted = answer.finish_reason == "abort"
        if is_interrupted and answer.text:
            note("[interrupted: the chat continues with this part of the reply, which is cached]")
        elif is_interrupted:
            note(
                "[interrupted before the reply began: the question is removed; the computed tokens "
                "are cached]"
            )
            return False
        turn = Turn(question, answer.text, tuple(answer.token_ids), attachments)
        self.conversation.turns.append(turn)
        return True

    def _fit(self, question: Content) -> RequestStream:
        """Return the request for a question. If the context is full, drop the oldest turns.

        Then the remaining turns must be computed again. To do this rarely, drop enough turns to
        leave half of the context free. If the question alone does not fit, drop nothing and raise
        RequestError.
        """
        conversation, limit = self.conversation, self.llm.max_model_len
        reserve = min(self.params.max_tokens or limit, _RESERVE, limit // 4)
        start, stop = conversation.start, len(conversation.turns)
        try:
            stream = self._stream(conversation, question, start)
            if start == stop or len(stream.prompt_token_ids) + reserve <= limit:
                return stream
        except RequestError:
            if start == stop:
                raise
        stream = self._stream(conversation, question, stop)
        for first in range(start + 1, stop):
            with suppress(RequestError):
                longer = self._stream(conversation, question, first)
                if len(longer.prompt_token_ids) <= limit // 2:
                    stream, stop = longer, first
                    break
        conversation.start = stop
        cached: list[int] = []
        if self.last is not None:
            cached = [*self.last.prompt_token_ids, *self.last.outputs[0].token_ids]
        pairs = zip(cached, stream.prompt_token_ids, strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        oldest = f"{stop - start} oldest turns are" if stop - start > 1 else "oldest turn is"
        note(
            f"[the context of {limit:,} tokens is full: the {oldest} left out, including "
            f"documents; {len(stream.prompt_token_ids) - num_same:,} tokens must be computed again]"
        )
        return stream

    def _stream(self, conversation: Conversation, question: Content, first: int) -> RequestStream:
        messages = conversation.messages(question, first)
        return self.llm.stream_chat(messages, self.params, adapter=self.adapter)


class Command(NamedTuple):
    """A command of a chat.

    run: a function of the chat and the text after the command's name. argument: the name of this
    text, in brackets if it is optional; empty if the command takes no text. help: empty for an
    alias.
    """

    run: Callable[[Chat, str], None]
    help: str
    argument: str


COMMANDS: dict[str, Command] = {}
_PATH_COMMANDS = ("/file", "/image", "/save", "/load")


def _command(names: str, text: str, argument: str = "") -> Callable[..., Any]:
    """Return a decorator that registers a command. /help shows only its first name."""
    first, *aliases = names.split()

    def register(run: Callable[[Chat, str], None]) -> Callable[[Chat, str], None]:
        COMMANDS[first] = Command(run, text, argument)
        COMMANDS.update({name: Command(run, "", argument) for name in aliases})
        return run

    return register


class QuitChat(Exception):
    """The user ends the chat."""


def run_chat(chat: Chat) -> None:
    """Answer messages and run commands until the end of input, or /quit."""
    note("/help shows the commands; /quit or the end of input ends the chat")
    for message in terminal_messages() if sys.stdin.isatty() else piped_messages():
        try:
            if (match := find_command(message)) is not None:
                command, argument = match
                command.run(chat, argument)
            elif message:
                chat.send(message.removeprefix("/"))
        except (RequestError, OSError, ValueError, RuntimeError) as error:
            show_error(error)  # odd paths raise OSError, ValueError or RuntimeError
        except KeyboardInterrupt:  # Ctrl-C before the reply began
            note("[interrupted: the conversation is unchanged]")
        except QuitChat:
            return


def find_command(message: str) -> tuple[Command, str] | None:
    """Return the command in a message and its argument; None for a message to the model.

    A message that begins with two slashes is for the model. Raises RequestError for an unknown
    command.
    """
    if not message.startswith("/") or message.startswith("//"):
        return None
    name, *arguments = message.split(maxsplit=1)
    command = COMMANDS.get(name)
    if command is None:
        matches = get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
        hint = f"did you mean {matches[0]}?" if matches else "/help lists them"
        raise RequestError(f"{name} is not a command ({hint}); {_SLASHES}")
    if arguments and not command.argument:
        raise RequestError(f"{name} takes no argument; {_SLASHES}")
    return command, "".join(arguments)


@_command("/help /?", "shows the commands; so does /?")
def _help(chat: Chat, argument: str) -> None:
    rows = [(f"{name} {c.argument}", c.help) for name, c in COMMANDS.items() if c.help]
    width = max(len(usage) for usage, _ in rows) + 1
    for usage, text in rows:
        note(f"{usage:<{width}}{text}", " " * width)
    note(f"A command begins with a slash; {_SLASHES}, such as //etc. {_KEYS}")


@_command("/file", "sends a document with your next message", "PATH")
def _file(chat: Chat, argument: str) -> None:
    path = _path(argument)
    text = read_document(path)
    _add_waiting(chat, path, f"{chat.count_tokens(text):,} tokens")
    chat.conversation.documents.append(text)


@_command("/image", "sends an image with your next message", "PATH")
def _image(chat: Chat, argument: str) -> None:
    path = _path(argument)
    image = read_image(path, chat.llm.config.max_image_pixels)
    _add_waiting(chat, path, f"about {chat.count_image_tokens(image):,} tokens")
    chat.conversation.images.append(image)


def _add_waiting(chat: Chat, path: Path, size: str) -> None:
    """Record that a file will be sent with the next message."""
    chat.conversation.waiting.append(f"{path.name} ({size})")
    note(f"{path.name}: {size}, sent with your next message")


@_command("/system", "sets the system message, or shows it", "[TEXT]")
def _system(chat: Chat, argument: str) -> None:
    if not argument:
        note(chat.conversation.system or "there is no system message")
        return
    chat.conversation.system = argument
    chat.changed = "/system"
    has_turns = bool(chat.conversation.turns)
    note("set; all turns must be computed again" if has_turns else "set")


@_command("/retry", "answers the last question again")
def _retry(chat: Chat, argument: str) -> None:
    chat.retry()


@_command("/undo", "removes documents and images not yet sent, or else the last turn")
def _undo(chat: Chat, argument: str) -> None:
    if chat.conversation.documents or chat.conversation.images:
        chat.conversation.drop_waiting()
        note("the waiting documents and images are removed; /undo again removes the last turn")
        return
    turn = chat.conversation.pop_turn()
    chat.changed = "/undo"
    names = f", and with it {', '.join(turn.attachments)}" if turn.attachments else ""
    note(f"the last turn is removed{names}; {count(len(chat.conversation.turns), 'turn')} left")


@_command("/save", "writes the conversation to a file, as JSON", "PATH")
def _save(chat: Chat, argument: str) -> None:
    path = _path(argument)
    if not chat.conversation.turns:
        raise RequestError("there is nothing to save yet")
    chat.conversation.save(path, chat.model)
    note(f"{count(len(chat.conversation.turns), 'turn')} in {path}")


@_command("/load", "continues a saved conversation", "PATH")
def _load(chat: Chat, argument: str) -> None:
    chat.resume(Conversation.load(_path(argument)))
    chat.show_resumed("loaded")


@_command("/set", "changes temperature, top_p, ...; without NAME, shows all", "[NAME VALUE]")
def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if "=" in name:
        raise RequestError("/set needs NAME VALUE, such as /set temperature 0.7")
    if value.strip():
        values = parse_sampling(name, value.strip())
        chat.params = replace(chat.params, **values)
        note(", ".join(f"{name} is now {value}" for name, value in values.items()))
    elif name:
        current = getattr(chat.params, check_sampling_name(name))
        raise RequestError(f"{name} is {current}; /set {name} VALUE changes it")
    else:
        note(f"{_parameters(chat)}; /set NAME VALUE changes one", in_parts=True)


@_command("/pool", "draws the cache's blocks, in the color of the message that computed them")
def _pool(chat: Chat, argument: str) -> None:
    console = OutputConsole(stderr=True)
    console.print(chat.picture.draw(console.width))
    note(
        f"A block holds the K/V of {chat.llm.block_size} tokens. A prompt that begins with the "
        "same tokens uses cached blocks instead of computing them. A color stands for the message "
        "that computed the block."
    )
    if (states := chat.llm.manager.states) is not None:
        used = states.num_slots - states.num_free
        note(
            "The model has recurrent layers, so a prompt resumes only at a checkpoint of their "
            f"states; {count(used, 'checkpoint')} in {states.num_slots:,} slots."
        )


@_command("/explain", "shows how much of the last prompt was cached, and why not more")
def _explain(chat: Chat, argument: str) -> None:
    if chat.last is None:
        raise RequestError("there is no question yet")
    note(explain_turn(chat.last, chat.changed))


@_command("/show", "shows the model, the sampling parameters and the system message", "[info|...]")
def _show(chat: Chat, argument: str) -> None:
    lines = {
        "info": f"{chat.model}, with a context of {chat.llm.max_model_len:,} tokens; "
        f"{count(len(chat.conversation.turns), 'turn')} so far",
        "parameters": _parameters(chat),
        "system": chat.conversation.system or "there is no system message",
    }
    if argument and argument not in lines:
        raise RequestError(f"the argument of /show is {argument!r}; allowed: {', '.join(lines)}")
    for name, line in lines.items():
        if argument in ("", name):
            note(line, in_parts=name == "parameters")


@_command("/reset /clear", "forgets all turns, but not the system message; so does /clear")
def _reset(chat: Chat, argument: str) -> None:
    chat.resume(Conversation(system=chat.conversation.system))
    system = ", with the system message" if chat.conversation.system else ""
    note(f"a new conversation begins{system}")


@_command("/quit /exit /bye", "ends the chat; so do /exit and /bye")
def _quit(chat: Chat, argument: str) -> None:
    raise QuitChat


def _parameters(chat: Chat) -> str:
    return ", ".join(f"{name} {getattr(chat.params, name)}" for name in SAMPLING_FLAGS)


def _path(argument: str) -> Path:
    """Return the path in a command. A terminal may quote a path that is dragged into it."""
    if not argument:
        raise RequestError("the command needs the path of a file")
    path = Path(argument).expanduser()
    if not path.exists():
        with suppress(ValueError):  # if the path has an apostrophe
            parts = shlex.split(argument)
            return Path(parts[0]).expanduser() if len(parts) == 1 else path
    return path


def explain_turn(output: RequestOutput, changed: str = "") -> str:
    """Return how many tokens of the last prompt were cached, and why not more, as a sentence.

    changed: the command that changed the conversation after this turn, if any.
    """
    cached, prompt = f"{output.num_cached_tokens:,} of the", "last prompt's"
    if changed:
        cached, prompt = f"before {changed}, {cached}", "prompt's"
    text = f"{cached} {prompt} {count(len(output.prompt_token_ids), 'token')} were cached"
    if output.loaded_tokens:
        tiers = (f"{loaded:,} of them from {tier}" for tier, loaded in output.loaded_tokens.items())
        text += f" ({', '.join(tiers)})"
    return text if output.why_missed is None else f"{text}; {output.why_missed}"


def piped_messages() -> Iterator[str]:
    """Yield the messages of stdin, and print each line as if it were typed."""
    text = ""
    with reading_stdin():
        for line in sys.stdin:
            click.echo(_PROMPT + line.strip())
            text += line
            if not _is_open(text):
                yield _unquote(text)
                text = ""
    if text:
        yield text.strip().removeprefix(_QUOTES)


def terminal_messages() -> Iterator[str]:
    """Yield the messages that the user types, until Ctrl-D, or Ctrl-C twice."""
    bindings = _Bindings()
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # avoids a warning in terminals that do not support CPR
    session: PromptSession[str] = PromptSession(
        _PROMPT,
        output=output,
        history=_history(),
        key_bindings=bindings,
        completer=_CommandCompleter(),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        placeholder=lambda: FormattedText([("ansibrightblack", bindings.hint)]),
        prompt_continuation="  ",
    )
    session.default_buffer.on_text_changed += bindings.reset_hint
    while True:
        bindings.reset_hint()
        try:
            yield _unquote(session.prompt())
        except EOFError:
            return


class _Bindings(KeyBindings):
    """Key bindings of the prompt. `hint` is shown in the empty line; it changes after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_hint()
        is_empty = Condition(lambda: not get_app().current_buffer.text)
        is_open = Condition(lambda: _is_open(get_app().current_buffer.text))
        self.add("c-c")(self._clear_or_leave)
        self.add("c-d", filter=is_empty)(self._leave)
        self.add(Keys.BracketedPaste)(self._paste)
        for key in (Keys.Vt100MouseEvent, Keys.CPRResponse):
            self.add(key)(lambda event: None)  # pasted text may contain these sequences
        self.add("escape", "enter")(self._new_line)
        self.add("enter", filter=is_open)(self._new_line)

    def reset_hint(self, buffer: object = None) -> None:
        self.is_leaving, self.hint = False, "a message, or /help"

    def _leave(self, event: KeyPressEvent) -> None:
        event.app.erase_when_done = True
        event.app.exit(exception=EOFError)

    def _clear_or_leave(self, event: KeyPressEvent) -> None:
        if self.is_leaving:
            self._leave(event)
            return
        event.current_buffer.reset()
        self.is_leaving, self.hint = True, "Ctrl-C again, or Ctrl-D, ends the chat"

    def _new_line(self, event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def _paste(self, event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(_ESCAPES.sub("", text))


class _CommandCompleter(Completer):
    """Completion of a command's name, and of the path after some commands."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        name, space, path = document.text.partition(" ")
        if space and name in _PATH_COMMANDS:
            paths = PathCompleter(expanduser=True)
            yield from paths.get_completions(Document(path), event)
        elif name.startswith("/") and not space:
            yield from (Completion(c, -len(name)) for c in COMMANDS if c.startswith(name))


def _history() -> History:
    """Return the history of messages, in a file that only this user may read."""
    try:
        file = data_folder() / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except (OSError, RuntimeError):  # a full or read-only disk, or no home folder
        return InMemoryHistory()
    return FileHistory(str(file))


def _is_open(text: str) -> bool:
    """Return True if the text is the beginning of a quoted message without its end."""
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1


def _unquote(text: str) -> str:
    text = text.strip()
    is_quoted = text.startswith(_QUOTES) and text.endswith(_QUOTES) and text.count(_QUOTES) == 2
    return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip() if is_quoted else text
