"""Chats with images: what stands in a prompt's text for an image, and what that is in ids.

The chat template writes a placeholder where an image stands. Each one is replaced by a mark that
says the image's digest and shape, so that a text with other images is another text, and its
ids follow from it alone:

    user: ⟨digest 16x16⟩What is this?      <image> spelled in a message: ⟨⟩

The brackets are two code points that Unicode keeps for a program's own use and that no text may
hold; a text that has them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.cache import Namespace
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError
from headstart.frontend.chat.conversation import ChatPrompt, ConversationMemory
from headstart.frontend.chat.messages import (
    TemplateOptions,
    describe_content,
    kind_of_part,
    read_conversation,
    text_parts,
)
from headstart.frontend.images.decoding import is_data_url
from headstart.frontend.images.prompt import (
    IMAGE_MARK,
    ImagePrompts,
    ImageSource,
    LoadedImage,
    Tenant,
)
from headstart.frontend.text import Spelling
from headstart.validation import check_utf8, describe, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ImageChat", "ImageMessages", "ImageSpelling", "read_messages"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_QUOTED = _OPEN + _CLOSE
_MARK = re.compile(f"({_OPEN}[^{_CLOSE}]*{_CLOSE})")


class ImageSpelling(Spelling):
    """Spells texts with marks for images; ids of an image's tokens are `IMAGE_MARK`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, images: ImagePrompts) -> None:
        super().__init__(tokenizer)
        self._images = images

    def mark(self, text: str, loaded: Sequence[LoadedImage]) -> str:
        """A rendered text with a mark for each of its placeholders. Raises RequestError."""
        if _OPEN in text.replace(_QUOTED, "") or _CLOSE in text.replace(_QUOTED, ""):
            raise RequestError("the conversation has U+FDD0 or U+FDD1, which are no characters")
        first, *others = text.split(self._images.placeholder)
        if len(others) != len(loaded):
            raise RequestError(
                f"the model's chat template shows {len(others)} of {len(loaded)} images"
            )
        for one, other in zip(loaded, others, strict=True):
            shape = "x".join(map(str, one.image.shape))
            first += f"{_OPEN}{one.digest.hex()} {shape}{_CLOSE}{other}"
        return first

    def tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in _MARK.split(text):
            if piece == _QUOTED:
                token_ids += self._images.spelled
            elif piece.startswith(_OPEN):
                token_ids += self._images.marked_expansion(_shape(piece))
            elif token_ids:
                token_ids += self._images.tokenize_after(piece)
            elif piece:
                token_ids += super().tokenize(piece)
        return token_ids

    def spell(self, token_ids: Sequence[int]) -> str:
        token = self._images.token_id
        return super().spell([token if i == IMAGE_MARK else i for i in token_ids])

    def show(self, text: str) -> str:
        shown = ""
        for piece in _MARK.split(text):
            if piece == _QUOTED:
                shown += self._images.placeholder
            elif piece.startswith(_OPEN):
                shown += self.spell(self._images.marked_expansion(_shape(piece)))
            else:
                shown += piece
        return shown

    def quote(self, text: str) -> str:
        return text.replace(self._images.placeholder, _QUOTED)

    def readable(self, text: str) -> str:
        """A marked text as users read it: one placeholder for each image."""
        return _MARK.sub(self._images.placeholder, text)


def _shape(mark: str) -> tuple[int, ...]:
    return tuple(map(int, mark[:-1].rpartition(" ")[2].split("x")))


class ImageMessages(NamedTuple):
    """A conversation whose images are taken out, in order, and whose texts are quoted."""

    messages: list[dict[str, Any]]
    sources: list[ImageSource]
    ids: list[str | None]


def read_messages(messages: Sequence[Any], quote: Callable[[str], str]) -> ImageMessages:
    """Take the images out of messages in OpenAI's form. Raises RequestError.

    A part is `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`
    with a data: URL, or `{"type": "image", "image": ...}` with a Pillow image, bytes, a
    `pathlib.Path` or a data: URL ("image_pil" is vLLM's name of it). Either kind of image may have
    a `"uuid"`. A text is never taken for a path, since it may come from outside.
    """
    found = ImageMessages([], [], [])
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) and not (isinstance(content, (list, tuple)) and content):
            raise RequestError(
                f"message {place} has {describe_content(content)}; it must be a text or a list "
                "of text and image parts"
            )
        parts = text_parts(message) if isinstance(content, str) else content
        taken = [_read_part(place, part, found, quote) for part in parts]
        found.messages.append({**message, "content": taken})
    return found


def _read_part(
    place: int, part: Any, found: ImageMessages, quote: Callable[[str], str]
) -> dict[str, Any]:
    kind = kind_of_part(part)
    if kind == "text" and isinstance(part, Mapping) and isinstance(part.get("text"), str):
        text: str = part["text"]
        check_utf8(f"message {place}", text)
        if _OPEN in text or _CLOSE in text:
            raise RequestError(f"message {place} has U+FDD0 or U+FDD1, which are no characters")
        return {"type": "text", "text": quote(text)}
    if kind == "image_url" and isinstance(part, Mapping):
        given = part.get("image_url")
        source = given.get("url") if isinstance(given, Mapping) else given
    elif kind in ("image", "image_pil") and isinstance(part, Mapping):
        source = part.get(kind)
    else:
        raise RequestError(
            f"message {place} has a part of type {describe(kind)}; allowed: text, image_url, image"
        )
    if source is None or (isinstance(source, str) and not is_data_url(source)):
        given = "None" if source is None else shorten(repr(source))
        raise RequestError(
            f"message {place} has an image that is {given}; allowed: a data: URL (nothing is "
            "fetched), in Python also a Pillow image, bytes or a pathlib.Path"
        )
    found.sources.append(source)
    found.ids.append(part.get("uuid"))
    return {"type": "image"}


class ImageChat:
    """Renders conversations with images for one model."""

    def __init__(
        self, images: ImagePrompts, memory: ConversationMemory, spelling: ImageSpelling
    ) -> None:
        self._images = images
        self._memory = memory
        self._spelling = spelling
        self._takes_parts: bool | None = None

    def read(
        self, messages: Sequence[Any], tenant: Tenant, options: TemplateOptions
    ) -> tuple[str, list[LoadedImage]]:
        """The rendered text and, once that is not too long, the images. Raises RequestError."""
        found = read_messages(read_conversation(messages), self._spelling.quote)
        text = self._render(found.messages, options)
        return text, self._images.read(found.sources, found.ids, tenant)

    def prompt(
        self, rendered: str, loaded: Sequence[LoadedImage], namespace: Namespace
    ) -> tuple[ChatPrompt, PreparedPrompt]:
        """The prompt as the next turn will look for it, and as the engine takes it."""
        text = self._spelling.mark(rendered, loaded)
        marked = self._memory.encode(text, namespace)
        ready = self._images.settle(self._spelling.readable(text), marked, loaded)
        return ChatPrompt(text, marked), ready

    def _render(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """By a template that takes a message in parts, if it does, else as one text."""
        if not self._wants_parts(options):
            messages = _as_texts(messages, self._images.placeholder)
        return self._memory.apply_template(messages, options)

    def _wants_parts(self, options: TemplateOptions) -> bool:
        if options.chat_template_content_format != "auto":
            return options.chat_template_content_format == "openai"
        if options.chat_template is not None:
            return self._shows_an_image(TemplateOptions(chat_template=options.chat_template))
        if self._takes_parts is None:
            self._takes_parts = self._shows_an_image(TemplateOptions())
        return self._takes_parts

    def _shows_an_image(self, options: TemplateOptions) -> bool:
        parts = [{"type": "image"}, {"type": "text", "text": "text"}]
        try:
            shown = self._memory.apply_template([{"role": "user", "content": parts}], options)
        except RequestError:
            return False
        return shown.count(self._images.placeholder) == 1 and "'type'" not in shown


def _as_texts(messages: Sequence[dict[str, Any]], placeholder: str) -> list[dict[str, Any]]:
    """The same for a template whose messages are one text each: parts on lines of their own."""
    return [
        {
            **message,
            "content": "\n".join(
                placeholder if part["type"] == "image" else part["text"]
                for part in message["content"]
            ),
        }
        for message in messages
    ]
