"""What `headstart run` asks: prompts, files, images and standard input, put together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.contents import join_content, read_document, read_image
from headstart.cli.streams import as_typed, reading_stdin
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.llm import LLM
    from headstart.engine.params import SamplingParams
    from headstart.engine.streams import RequestStream

__all__ = ["Questions", "read_questions"]

STDIN = "-"


@dataclass(frozen=True)
class Questions:
    """Texts to answer one after another, all about the same documents and images.

    raw: the texts are completed as they are, without the model's chat template.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...] = ()
    images: tuple[dict[str, Any], ...] = ()
    system: str | None = None
    raw: bool = False

    def streams(self, llm: LLM, params: SamplingParams) -> Iterator[RequestStream]:
        """A request for each text. Raises RequestError."""
        tokenizer = llm.get_tokenizer()
        is_chat = not self.raw and tokenizer is not None and bool(tokenizer.chat_template)
        if not is_chat and (self.system is not None or self.images):
            raise RequestError("--system and --image need a model with a chat template")
        for text in self.texts:
            if is_chat:
                yield llm.stream_chat(self._messages(text), params)
            else:
                yield llm.stream("".join([*self.documents, text]), params)

    def _messages(self, text: str) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        content = join_content(self.documents, self.images, text)
        return [*system, {"role": "user", "content": content}]


def read_questions(prompts: Sequence[str], options: dict[str, Any]) -> Questions:
    """What the arguments of `run` ask; the options for it are taken out of `options`.

    Raises RequestError.
    """
    files, images = options.pop("files"), options.pop("images")
    system, raw = options.pop("system"), options.pop("raw")
    if raw and (images or system is not None):
        raise RequestError("--raw takes no chat template, which --system and --image need")
    if [*prompts, *files].count(STDIN) > 1:
        raise RequestError(f"{STDIN} stands more than once: standard input can be read once")
    documents = tuple(
        _read_stdin() if file == STDIN else read_document(Path(as_typed(file))) for file in files
    )
    texts = tuple(_read_stdin() if text == STDIN else as_typed(text) for text in prompts)
    if not texts and not documents:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give one or more, or --file, or text on standard input")
        texts = (_read_stdin(),)
    if not all(text.strip() for text in texts):
        raise RequestError("a prompt is empty; allowed: a text")
    shown = tuple(read_image(Path(as_typed(image))) for image in images)
    return Questions(
        texts or ("",), documents, shown, None if system is None else as_typed(system), raw
    )


def _read_stdin() -> str:
    with reading_stdin():
        text = sys.stdin.read()
    if not text.strip():
        raise RequestError("standard input is empty; allowed: a text")
    return text
