"""Messages of `headstart chat` and prompts of `headstart run`, with documents and images.

A conversation:

system message
turn       documents and images, a question  ->  reply
turn       ...
waiting    documents and images for the next question
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from errno import ENODEV
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.terminal import decode_argument, reading_stdin, waiting
from headstart.engine.config import EngineConfig
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.frontend.images.decoding import decode_image, file_limit, read_source
from headstart.imports import load_module
from headstart.models.config_values import context_bound
from headstart.models.files import BUILT_IN, read_json
from headstart.validation import check_utf8, describe

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.frontend.llm import LLM
    from headstart.frontend.streams import RequestStream

Content = str | list[dict[str, Any]]
"""The content of a message: a string, or a list of OpenAI content parts if it has images."""

_STDIN = "-"
_MODEL_NAME = re.compile(
    r"[\w.-]+/[\w.-]+(?::[\w.-]+)?|[a-z][\w.-]*:(?:latest|\d[\w.-]*)|.*\.gguf|" + BUILT_IN
)


def join_content(documents: Sequence[str], images: Sequence[dict[str, Any]], text: str) -> Content:
    """Return a message with the images first, then the documents and the text.

    The texts are separated by empty lines.
    """
    texts = [*(document.rstrip("\n") for document in documents), text]
    joined = "\n\n".join(filter(None, texts))
    return [*images, {"type": "text", "text": joined}] if images else joined


def read_document(path: Path) -> str:
    """Read a text file. Raises RequestError, also if it is empty."""
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path} is empty")
    return text


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises RequestError, also for a device, which may be endless."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise OSError(ENODEV, "it is a device; allowed: a file or a pipe")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason}") from error
    except ValueError as error:  # an impossible file name
        raise RequestError(f"cannot read {describe(str(path))}: {error}") from error


def read_image(path: Path, max_pixels: int) -> dict[str, Any]:
    """Read an image as a part of a message in OpenAI's form. Raises RequestError."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    try:
        data = read_source(path, file_limit(max_pixels))
        decode_image(data, max_pixels)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    content = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}


@dataclass(frozen=True)
class Turn:
    """A question with its documents and images, and the reply.

    token_ids: the tokens of the reply; empty if unknown. attachments: the names of the
    documents and images, which are not saved.
    """

    question: Content
    reply: str
    token_ids: tuple[int, ...] = ()
    attachments: tuple[str, ...] = ()

    def lines(self) -> tuple[str, str]:
        """Return two lines: the text that the user typed after the documents, and the reply."""
        question = self.question
        if not isinstance(question, str):
            parts = [part.get("text") for part in question if isinstance(part, dict)]
            question = next((part for part in reversed(parts) if isinstance(part, str)), "")
        typed = question.rstrip().rpartition("\n\n")[2]
        return f"> {' '.join(typed.split())}", " ".join(self.reply.split())


@dataclass
class Conversation:
    """A chat. `documents` and `images` wait for the next question. `waiting` has their names.

    Turns before `start` do not fit into the context. They are saved, but not sent to the model.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    start: int = 0
    documents: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def make_question(self, text: str) -> Content:
        """Return a question with the waiting documents and images."""
        return join_content(self.documents, self.images, text)

    def drop_waiting(self) -> None:
        self.documents, self.images, self.waiting = [], [], []

    def pop_turn(self) -> Turn:
        """Remove and return the last turn. Raises RequestError if there is none."""
        if not self.turns:
            raise RequestError("there is no question yet")
        self.start = min(self.start, len(self.turns) - 1)
        return self.turns.pop()

    def messages(self, question: Content, first: int) -> list[dict[str, Any]]:
        """Return the messages for the model, without the turns before `first`."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns[first:]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.reply})
        return [*messages, {"role": "user", "content": question}]

    def reply_token_ids(self) -> dict[int, list[int]]:
        """Return the known token ids of replies, by the index of the message."""
        first = 2 if self.system else 1
        return {first + 2 * i: list(t.token_ids) for i, t in enumerate(self.turns) if t.token_ids}

    def save(self, path: Path, model: str) -> None:
        """Write all turns as JSON that only this user may read.

        Raises RequestError, also if the file exists and is not a saved conversation.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except RequestError as error:
                raise RequestError(f"{path} exists, and is not replaced: {error}") from error
        if not path.parent.is_dir():
            raise RequestError(f"cannot write {path}: {path.parent} is not a folder")
        messages = self.messages("", 0)[:-1]
        for index, token_ids in self.reply_token_ids().items():
            messages[index]["token_ids"] = token_ids
        part = path.with_name(f"{path.name}.part")
        try:
            with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"model": model, "messages": messages}, file, indent=1)
            part.replace(path)
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read a saved conversation or a list of OpenAI's messages. Raises RequestError."""
        text = read_text(path)
        try:
            content = json.loads(text)
            messages = content.get("messages") if isinstance(content, dict) else content
            if not isinstance(messages, list):
                raise RequestError('it has no list of "messages"')
            return cls._of_messages(messages)
        except (ValueError, RecursionError, RequestError) as error:
            raise RequestError(f"{path} is not a saved conversation: {error}") from error

    @classmethod
    def _of_messages(cls, messages: list[Any]) -> Conversation:
        conversation = cls()
        expected = "user"
        question: Content = ""
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise RequestError(f"message {index} lacks a role or content")
            role, content = message["role"], message["content"]
            if role != expected and not (index == 0 and role == "system"):
                raise RequestError(
                    f"message {index} has the role {describe(role)}; allowed: {expected}, "
                    "as user and assistant alternate"
                )
            if isinstance(content, str):
                check_utf8(f"message {index}", content)
            elif role != "user" or not (isinstance(content, list) and content):
                raise RequestError(
                    f"message {index} has the content {describe(content)}; allowed: a string"
                )
            if role == "system":
                conversation.system = content
            elif role == "user":
                expected, question = "assistant", content
            else:
                tokens = message.get("token_ids")
                tokens = tokens if isinstance(tokens, list) else []
                are_ids = all(type(token) is int and token >= 0 for token in tokens)
                turn = Turn(question, content, tuple(tokens) if are_ids else ())
                conversation.turns.append(turn)
                expected = "user"
        if expected == "assistant":
            raise RequestError("its last message is a question without a reply")
        return conversation


def names_model(prompt: str) -> bool:
    """Return True if a prompt looks like the name of a model."""
    return _MODEL_NAME.fullmatch(prompt) is not None


@dataclass(frozen=True)
class Questions:
    """Prompts of `headstart run`, all about the same documents and images.

    raw: complete the texts without the model's chat template. form: the prescribed format of the
    answers, if any.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...] = ()
    images: tuple[dict[str, Any], ...] = ()
    system: str | None = None
    raw: bool = False
    form: StructuredOutputsParams | None = None

    def streams(
        self, llm: LLM, params: SamplingParams, adapter: str | None
    ) -> Iterator[RequestStream]:
        """Yield a request for each text. Raises RequestError."""
        params = replace(params, structured_outputs=self.form)
        tokenizer = llm.get_tokenizer()
        is_chat = not self.raw and tokenizer is not None and bool(tokenizer.chat_template)
        if not is_chat and (self.system is not None or self.images):
            raise RequestError("--system and --image need a model with a chat template")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        for text in self.texts:
            if is_chat:
                content = join_content(self.documents, self.images, text)
                messages: list[dict[str, Any]] = [*system, {"role": "user", "content": content}]
                yield llm.stream_chat(messages, params, adapter=adapter)
            else:
                yield llm.stream("".join([*self.documents, text]), params, adapter=adapter)

    def check_model(self, folder: Path, config: EngineConfig) -> None:
        """Raise RequestError if the model in `folder` takes no images, or if a prompt is too long.

        Call it before the model is loaded. Tokens are counted without the chat template.
        """
        settings = folder / "config.json"
        content = read_json(settings) if settings.is_file() else None
        limits = [config.max_model_len]
        if content is not None:
            names = {"vision_config", "image_token_id", "image_token_index"}
            if self.images and not names & content.keys():
                raise RequestError("--image needs a model with vision")
            limits.append(context_bound(content))
        if config.num_blocks is not None:
            limits.append(config.num_blocks * config.block_size)
        limit = min((limit for limit in limits if limit is not None), default=None)
        longest = "".join([*self.documents, max(self.texts, key=len)])
        if limit is None or len(longest.encode()) < limit:
            return  # a token has at least one byte
        with waiting("counting the tokens of the prompt"):
            # This import takes a second. The model needs it anyway.
            codec = load_module("headstart.frontend.text")
            codec.check_text_fits(folder, longest, limit)

    def check(self, answers: Sequence[RequestOutput]) -> None:
        """Raise RequestError for an answer that was cut off before its JSON was complete."""
        for number, answer in enumerate(answers if self.form is not None else (), start=1):
            try:
                # Parse integers as strings, because int() refuses more than 4,300 digits.
                json.loads(answer.outputs[0].text, parse_int=str)
            except ValueError as error:
                raise RequestError(
                    f"answer {number} was cut off and is not complete JSON; allowed: --max-tokens "
                    f"above {len(answer.outputs[0].token_ids)}, no --stop"
                ) from error


def read_questions(prompts: Sequence[str], options: dict[str, Any]) -> Questions:
    """Remove the options of questions from `options`, and read the files that they name.

    Raises RequestError.
    """
    files, images = options.pop("files"), options.pop("images")
    system, raw, schema = options.pop("system"), options.pop("raw"), options.pop("json")
    if raw and (images or system is not None):
        raise RequestError("--raw uses no chat template; --system and --image need one")
    if [*prompts, *files].count(_STDIN) > 1:
        raise RequestError(f"{_STDIN} is used more than once; standard input can be read only once")
    documents = tuple(
        _read_stdin() if file == _STDIN else read_document(Path(decode_argument(file)))
        for file in files
    )
    texts = tuple(_read_stdin() if text == _STDIN else decode_argument(text) for text in prompts)
    if not texts and not documents:
        if sys.stdin.isatty():
            raise RequestError(
                "there is no prompt; allowed: prompts, --file, or text on standard input"
            )
        texts = (_read_stdin(),)
    if not all(text.strip() for text in texts):
        raise RequestError("a prompt is empty; allowed: text")
    limit = options["max_image_pixels"] or EngineConfig.max_image_pixels
    return Questions(
        texts or ("",),
        documents,
        tuple(read_image(Path(decode_argument(image)), limit) for image in images),
        None if system is None else decode_argument(system),
        raw,
        None if schema is None else _read_schema(Path(decode_argument(schema))),
    )


def _read_schema(path: Path) -> StructuredOutputsParams:
    """Return the answer format for a JSON schema in a file. Raises RequestError.

    The format excludes white space between JSON's tokens, since small models might generate white
    space endlessly.
    """
    text = read_text(path)
    try:
        form = StructuredOutputsParams(json=text, disable_any_whitespace=True)
        with waiting(f"compiling the schema in {path}"):
            # This import loads torch. The model needs it anyway.
            load_module("headstart.frontend.grammar").check_constraint(form.constraint)
    except RequestError as error:
        text = str(error).replace("structured_outputs.json", str(path))
        raise RequestError(f"--json: {text}") from error
    return form


def _read_stdin() -> str:
    with reading_stdin():
        text = sys.stdin.read()
    if not text.strip():
        raise RequestError("standard input is empty; allowed: text")
    return text
