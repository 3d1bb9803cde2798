"""What was said in a chat, without a terminal or a model: turns, documents, files to keep it in.

system message, which stays
turn   documents and images, a question  ->  reply
turn   ...
waiting: documents and images for the next question
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.cli.contents import Content, join_content, read_text
from headstart.errors import RequestError
from headstart.validation import check_utf8, describe

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True)
class Turn:
    """One question, with what was shown before it, and its reply, whose tokens may be known.

    shown: the names of documents and images that came with the question; files do not keep them.
    """

    question: Content
    reply: str
    token_ids: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()

    def lines(self) -> tuple[str, str]:
        """Both in a line each, the question as it was typed: its last paragraph."""
        question = self.question
        if not isinstance(question, str):
            parts = [part.get("text") for part in question if isinstance(part, dict)]
            question = next((part for part in reversed(parts) if isinstance(part, str)), "")
        typed = question.rstrip().rpartition("\n\n")[2]
        return f"> {' '.join(typed.split())}", " ".join(self.reply.split())


@dataclass
class Conversation:
    """A chat so far. `documents` and `images` wait for the next question, named in `waiting`.

    Turns before `start` no longer fit the context: the model is not shown them, files keep them.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    start: int = 0
    documents: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def ask(self, text: str) -> Content:
        """A question with the documents and images that wait for it."""
        return join_content(self.documents, self.images, text)

    def drop_waiting(self) -> None:
        """Forget the documents and images that wait."""
        self.documents, self.images, self.waiting = [], [], []

    def take_back(self) -> Turn:
        """The last turn, which is no part of the conversation any more. Raises RequestError."""
        if not self.turns:
            raise RequestError("nothing was asked yet")
        self.start = min(self.start, len(self.turns) - 1)
        return self.turns.pop()

    def messages(self, question: Content, first: int) -> list[dict[str, Any]]:
        """What the model is asked; the turns before `first` are left out."""
        found: list[dict[str, Any]] = []
        if self.system:
            found.append({"role": "system", "content": self.system})
        for turn in self.turns[first:]:
            found.append({"role": "user", "content": turn.question})
            found.append({"role": "assistant", "content": turn.reply})
        return [*found, {"role": "user", "content": question}]

    def reply_token_ids(self) -> dict[int, list[int]]:
        """The tokens of replies, where they are known, by the place of the message."""
        first = 2 if self.system else 1
        return {
            first + 2 * at: list(turn.token_ids)
            for at, turn in enumerate(self.turns)
            if turn.token_ids
        }

    def save(self, path: Path, model: str) -> None:
        """Write all turns as JSON, readable by this user alone.

        Raises RequestError, also where the file is there and is no saved conversation.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except RequestError as error:
                raise RequestError(f"{path} is there, and not replaced: {error}") from error
        if not path.parent.is_dir():
            raise RequestError(f"cannot write {path}: {path.parent} is no folder")
        messages = self.messages("", 0)[:-1]
        for place, token_ids in self.reply_token_ids().items():
            messages[place]["token_ids"] = token_ids
        content = {"model": model, "messages": messages}
        part = path.with_name(f"{path.name}.part")
        try:
            with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump(content, file, indent=1)
            part.replace(path)
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """What `save` wrote, or any list of messages in OpenAI's form. Raises RequestError."""
        text = read_text(path)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is no saved conversation: {error}") from error
        messages = content.get("messages") if isinstance(content, dict) else content
        try:
            return cls._of_messages(messages)
        except RequestError as error:
            raise RequestError(f"{path} is no saved conversation: {error}") from error

    @classmethod
    def _of_messages(cls, messages: object) -> Conversation:
        if not isinstance(messages, list):
            raise RequestError('it has no list of "messages"')
        for place, message in enumerate(messages):
            _check_message(place, message)
        found = cls()
        rest = messages
        if messages and messages[0]["role"] == "system":
            found.system, rest = _check_text(0, messages[0]["content"]), messages[1:]
        offset = len(messages) - len(rest)
        for place, message in enumerate(rest, offset):
            expected = ("user", "assistant")[(place - offset) % 2]
            if message["role"] != expected:
                raise RequestError(
                    f"message {place} is of the role {describe(message['role'])}; allowed: "
                    f"{expected}, as user and assistant take turns"
                )
        if len(rest) % 2:
            raise RequestError("its last message is a question without a reply")
        for place in range(0, len(rest), 2):
            reply = _check_text(offset + place + 1, rest[place + 1]["content"])
            token_ids = _read_token_ids(rest[place + 1].get("token_ids"))
            found.turns.append(Turn(rest[place]["content"], reply, token_ids))
        return found


def _check_message(place: int, message: object) -> None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise RequestError(f"message {place} has no role and content")
    content = message["content"]
    if isinstance(content, str):
        check_utf8(f"message {place}", content)
    elif message["role"] != "user" or not (isinstance(content, list) and content):
        raise RequestError(f"message {place} has the content {describe(content)}; allowed: a text")


def _check_text(place: int, content: object) -> str:
    if not isinstance(content, str):
        raise RequestError(f"message {place} has the content {describe(content)}; allowed: a text")
    return content


def _read_token_ids(found: object) -> tuple[int, ...]:
    """Token ids as `save` wrote them; none if they are anything else."""
    is_whole = isinstance(found, list) and all(type(one) is int and one >= 0 for one in found)
    return tuple(found) if isinstance(found, list) and is_whole else ()
