"""The messages of a user: documents and images from files, and the turns of a chat.

system message, which stays
turn   documents and images, a question  ->  reply
turn   ...
waiting: documents and images for the next question
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import ENODEV
from pathlib import Path
from typing import Any

from headstart.errors import RequestError
from headstart.frontend.images.decoding import decode_image, file_limit, read_source
from headstart.validation import check_utf8, describe

Content = str | list[dict[str, Any]]
"""A text, or OpenAI's parts where a message has images."""


def join_content(documents: Sequence[str], images: Sequence[dict[str, Any]], text: str) -> Content:
    """Return a message: images first, then documents, then the text, separated by empty lines."""
    texts = [*(document.rstrip("\n") for document in documents), text]
    whole = "\n\n".join(filter(None, texts))
    return [*images, {"type": "text", "text": whole}] if images else whole


def read_document(path: Path) -> str:
    """Read a text that is not empty. Raises RequestError."""
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path} is empty")
    return text


def read_text(path: Path) -> str:
    """Read a file of UTF-8. Raises RequestError, also for a device, which may never end."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise OSError(ENODEV, "it is a device; allowed: a file, or a pipe")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason}") from error
    except ValueError as error:  # a name that no file can have
        raise RequestError(f"cannot read {describe(str(path))}: {error}") from error


def read_image(path: Path, max_pixels: int) -> dict[str, Any]:
    """Read an image as OpenAI's part of a message. Raises RequestError."""
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
    """A question with its documents and images, and the reply, whose tokens may be known.

    shown: the names of the documents and images, which are not saved.
    """

    question: Content
    reply: str
    token_ids: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()

    def lines(self) -> tuple[str, str]:
        """Return the question's last paragraph, which was typed, and the reply, a line each."""
        question = self.question
        if not isinstance(question, str):
            parts = [part.get("text") for part in question if isinstance(part, dict)]
            question = next((part for part in reversed(parts) if isinstance(part, str)), "")
        typed = question.rstrip().rpartition("\n\n")[2]
        return f"> {' '.join(typed.split())}", " ".join(self.reply.split())


@dataclass
class Conversation:
    """A chat so far. `documents` and `images` wait for the next question, named in `waiting`.

    Turns before `start` no longer fit the context: they are saved, and not sent to the model.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    start: int = 0
    documents: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def ask(self, text: str) -> Content:
        """Return a question with the documents and images that wait for it."""
        return join_content(self.documents, self.images, text)

    def drop_waiting(self) -> None:
        """Forget the documents and images that wait."""
        self.documents, self.images, self.waiting = [], [], []

    def take_back(self) -> Turn:
        """Remove and return the last turn. Raises RequestError if there is none."""
        if not self.turns:
            raise RequestError("nothing was asked yet")
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
        """Return the tokens of replies, where they are known, by the index of the message."""
        first = 2 if self.system else 1
        return {
            first + 2 * index: list(turn.token_ids)
            for index, turn in enumerate(self.turns)
            if turn.token_ids
        }

    def save(self, path: Path, model: str) -> None:
        """Write all turns as JSON that only this user may read.

        Raises RequestError, also where the file exists and is no saved conversation.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except RequestError as error:
                raise RequestError(f"{path} is there, and not replaced: {error}") from error
        if not path.parent.is_dir():
            raise RequestError(f"cannot write {path}: {path.parent} is no folder")
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
        """Read what `save` wrote, or any list of messages in OpenAI's form. Raises RequestError."""
        text = read_text(path)
        try:
            content = json.loads(text)
            messages = content.get("messages") if isinstance(content, dict) else content
            return cls._of_messages(messages)
        except (ValueError, RecursionError, RequestError) as error:
            raise RequestError(f"{path} is no saved conversation: {error}") from error

    @classmethod
    def _of_messages(cls, messages: object) -> Conversation:
        if not isinstance(messages, list):
            raise RequestError('it has no list of "messages"')
        conversation = cls()
        expected = "user"
        question: Content = ""
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise RequestError(f"message {index} has no role and content")
            role, content = message["role"], message["content"]
            if role != expected and not (index == 0 and role == "system"):
                raise RequestError(
                    f"message {index} is of the role {describe(role)}; allowed: {expected}, "
                    "as user and assistant take turns"
                )
            if isinstance(content, str):
                check_utf8(f"message {index}", content)
            elif role != "user" or not (isinstance(content, list) and content):
                raise RequestError(
                    f"message {index} has the content {describe(content)}; allowed: a text"
                )
            if role == "system":
                conversation.system = content
            elif role == "user":
                expected, question = "assistant", content
            else:
                token_ids = _read_token_ids(message.get("token_ids"))
                conversation.turns.append(Turn(question, content, token_ids))
                expected = "user"
        if expected == "assistant":
            raise RequestError("its last message is a question without a reply")
        return conversation


def _read_token_ids(value: object) -> tuple[int, ...]:
    """Return token ids as `save` wrote them; none if they are anything else."""
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    return ()
