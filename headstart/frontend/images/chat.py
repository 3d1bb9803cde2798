"""Chats with images: the mark of an image in a prompt's text, and its token ids.

The chat template writes a placeholder where an image stands. Each is replaced by a mark with the
image's digest and shape, so that a text with other images is another text, and its ids follow from
it alone:

    user: ⟨digest 16x16⟩What is this?      <image> spelled in a message: ⟨⟩

The brackets are two code points that Unicode reserves for a program's internal use and that no text
may have; a text that has them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headstart.cache import Namespace
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError
from headstart.frontend.chat.conversation import ChatPrompt, ConversationMemory
from headstart.frontend.chat.messages import (
    TemplateOptions,
    read_content,
    read_conversation,
)
from headstart.frontend.images.decoding import ImageSource, is_data_url
from headstart.frontend.images.prompt import IMAGE_MARK, ImagePrompts, LoadedImage, Tenant
from headstart.frontend.text import Spelling
from headstart.validation import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_QUOTED = _OPEN + _CLOSE
_MARK = re.compile(f"({_OPEN}[^{_CLOSE}]*{_CLOSE})")


class ImageSpelling(Spelling):
    """Spells texts with marks for images; ids of an image's tokens are `IMAGE_MARK`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, images: ImagePrompts) -> None:
        super().__init__(tokenizer)
        self._images = images

    def mark(self, text: str, loaded: Sequence[LoadedImage]) -> str:
        """Return a rendered text with a mark for each of its placeholders. Raises RequestError."""
        unquoted = text.replace(_QUOTED, "")
        if _OPEN in unquoted or _CLOSE in unquoted:
            raise RequestError("the conversation has U+FDD0 or U+FDD1, which are no characters")
        marked, *others = text.split(self._images.placeholder)
        if len(others) != len(loaded):
            raise RequestError(
                f"the model's chat template shows {len(others)} of {len(loaded)} images"
            )
        for image, other in zip(loaded, others, strict=True):
            shape = "x".join(map(str, image.image.shape))
            marked += f"{_OPEN}{image.digest.hex()} {shape}{_CLOSE}{other}"
        return marked

    def tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in _MARK.split(text):
            if piece == _QUOTED:
                token_ids += self._images.spelled
            elif piece.startswith(_OPEN):
                token_ids += self._expand(piece)
            elif token_ids:
                token_ids += self._images.tokenize_after(piece)
            elif piece:
                token_ids += super().tokenize(piece)
        return token_ids

    def spell(self, token_ids: Sequence[int]) -> str:
        token = self._images.token_id
        return super().spell([token if i == IMAGE_MARK else i for i in token_ids])

    def show(self, text: str) -> str:
        def show_mark(match: re.Match[str]) -> str:
            mark = match[0]
            return self._images.placeholder if mark == _QUOTED else self.spell(self._expand(mark))

        return _MARK.sub(show_mark, text)

    def quote(self, text: str) -> str:
        return text.replace(self._images.placeholder, _QUOTED)

    def _expand(self, mark: str) -> list[int]:
        """Return the ids of a marked image."""
        shape = mark[:-1].rpartition(" ")[2].split("x")
        return self._images.marked_expansion(tuple(map(int, shape)))


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
        """Return the rendered text and, once that is not too long, the images.

        Raises RequestError.
        """
        sources: list[ImageSource] = []
        ids: list[str | None] = []

        def take_image(place: int, part: Mapping[str, Any]) -> dict[str, Any]:
            sources.append(_find_image(place, part))
            ids.append(part.get("uuid"))
            return {"type": "image"}

        read = read_conversation(messages)
        for place, message in enumerate(read):
            parts = read_content(place, message, take_image)
            for part in parts:
                if part["type"] == "text":
                    if _OPEN in part["text"] or _CLOSE in part["text"]:
                        raise RequestError(
                            f"message {place} has U+FDD0 or U+FDD1, which are no characters"
                        )
                    part["text"] = self._spelling.quote(part["text"])
            message["content"] = parts
        if not self._wants_parts(options):
            for message in read:  # a text, with each part on a separate line
                message["content"] = "\n".join(
                    part.get("text", self._images.placeholder) for part in message["content"]
                )
        text = self._memory.apply_template(read, options)
        return text, self._images.read(sources, ids, tenant)

    def prompt(
        self, rendered: str, loaded: Sequence[LoadedImage], namespace: Namespace
    ) -> tuple[ChatPrompt, PreparedPrompt]:
        """Return the prompt as the next turn looks it up, and as the engine takes it."""
        text = self._spelling.mark(rendered, loaded)
        marked = self._memory.encode(text, namespace)
        readable = _MARK.sub(self._images.placeholder, text)
        return ChatPrompt(text, marked), self._images.settle(readable, marked, loaded)

    def _wants_parts(self, options: TemplateOptions) -> bool:
        """Return True for a template that takes a message in parts."""
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


def _find_image(place: int, part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part. Raises RequestError.

    A part is `{"type": "image_url", "image_url": {"url": ...}}` with a data: URL, or `{"type":
    "image", "image": ...}` with a Pillow image, bytes, a `pathlib.Path` or a data: URL ("image_pil"
    is vLLM's name of it). Both may have a `"uuid"`. A text is never taken for a path, since it may
    come from outside.
    """
    source = part.get(part["type"])
    if part["type"] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if source is None or (isinstance(source, str) and not is_data_url(source)):
        value = "None" if source is None else shorten(repr(source))
        raise RequestError(
            f"message {place} has an image that is {value}; allowed: a data: URL (nothing is "
            "fetched), in Python also a Pillow image, bytes or a pathlib.Path"
        )
    return source
