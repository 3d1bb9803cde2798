"""Requests of conversations, whose prompts begin with the token ids of earlier turns.

The chat template writes a placeholder for an image. Each placeholder is replaced by a mark with the
image's digest and shape, so that the text alone determines the token ids. A placeholder that is
ordinary text in a message is replaced by an empty mark:

    user: ⟨digest 16x16⟩What is this?      user: What does ⟨⟩ mean?

The brackets are two code points that Unicode reserves for internal use. Text with one of them is
refused.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from headstart.cache import Namespace
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.request import PreparedPrompt, RequestGroup
from headstart.errors import RequestError
from headstart.frontend.chat.conversation import ChatPrompt, ConversationMemory
from headstart.frontend.chat.messages import (
    Message,
    TemplateOptions,
    read_content,
    read_conversation,
)
from headstart.frontend.frontend import Frontend, check_request
from headstart.frontend.images.decoding import ImageSource, is_data_url
from headstart.frontend.images.prompt import IMAGE_MARK, ImagePrompts, LoadedImage
from headstart.frontend.text import PromptCodec
from headstart.validation import describe, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[Message]
"""A chat so far: dicts with "role" and "content"."""

_MAX_TEMPLATES = 16  # templates in the cache of `_supports_parts`
# Texts that `publish` appends to a prefix. No tokenizer merges the end of the prefix with each text
# in the same way. So the token ids that both prompts begin with depend only on the prefix.
_CONTINUATIONS = ("a", " 0")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_ESCAPED = _OPEN + _CLOSE
_MARK = re.compile(f"({_OPEN}[^{_CLOSE}]*{_CLOSE})")


class ImagePromptCodec(PromptCodec):
    """Codec of texts with marks for images. The tokens of an image have the id `IMAGE_MARK`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, images: ImagePrompts) -> None:
        super().__init__(tokenizer)
        self.images = images

    def mark(self, text: str, loaded: Sequence[LoadedImage]) -> str:
        """Replace each placeholder of a rendered text with a mark. Raises RequestError."""
        unescaped = text.replace(_ESCAPED, "")
        if _OPEN in unescaped or _CLOSE in unescaped:
            raise RequestError("the conversation has U+FDD0 or U+FDD1, which are not characters")
        marked, *others = text.split(self.images.placeholder)
        if len(others) != len(loaded):
            raise RequestError(
                f"the model's chat template shows {len(others)} of {len(loaded)} images"
            )
        for image, other in zip(loaded, others, strict=True):
            shape = "x".join(map(str, image.image.shape))
            marked += f"{_OPEN}{image.digest.hex()} {shape}{_CLOSE}{other}"
        return marked

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for part in _MARK.split(text):
            if part == _ESCAPED:
                token_ids += self.images.placeholder_text_ids
            elif part.startswith(_OPEN):
                token_ids += self._expand(part)
            elif token_ids:
                token_ids += self.images.tokenize_after(part)
            elif part:
                token_ids += super().encode(part)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        token = self.images.token_id
        return super().decode([token if i == IMAGE_MARK else i for i in token_ids])

    def normalize(self, text: str) -> str:
        def show_mark(match: re.Match[str]) -> str:
            mark = match[0]
            return self.images.placeholder if mark == _ESCAPED else self.decode(self._expand(mark))

        return _MARK.sub(show_mark, text)

    def escape(self, text: str) -> str:
        return text.replace(self.images.placeholder, _ESCAPED)

    def _expand(self, mark: str) -> list[int]:
        shape = mark[:-1].rpartition(" ")[2].split("x")
        return self.images.marked_expansion(tuple(map(int, shape)))


class ChatRequests:
    """Maker of requests from conversations. Stores answers for the next turn. Thread-safe.

    chat_template: the default template of requests; None for the tokenizer's.
    """

    def __init__(self, frontend: Frontend, chat_template: str | None = None) -> None:
        self._frontend = frontend
        self.chat_template = chat_template
        self._lock = threading.Lock()
        self._supports_parts = lru_cache(_MAX_TEMPLATES)(self._try_parts)
        self._codec: ImagePromptCodec | None = None
        if frontend.images is not None:
            self._codec = ImagePromptCodec(frontend.tokenizer, frontend.images)
        self._memory = ConversationMemory(
            frontend.tokenizer, codec=self._codec, limit=frontend.text_limit
        )

    def prepare(
        self,
        messages: Conversation,
        params: SamplingParams,
        template: TemplateOptions | None = None,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """Return a request whose prompt begins with the ids of earlier turns.

        Raises RequestError, and EngineError when the engine is closed.
        """
        self._frontend.require_open()
        check_request(params, request_id, salt, adapter, priority)
        digest = None if adapter is None else self._frontend.adapters.find(adapter).digest
        namespace = Namespace(digest, salt)
        template = template or TemplateOptions()
        if template.chat_template is None:
            template = replace(template, chat_template=self.chat_template)
        codec, history = self._codec, ""
        if codec is None:
            with self._lock:
                text = self._memory.render(messages, template)
                if self._frontend.facts.num_states and template.add_generation_prompt:
                    # The next turn's prompt may branch off where the generation prompt begins.
                    options = replace(template, add_generation_prompt=False)
                    with suppress(RequestError):  # some templates require the generation prompt
                        history = self._memory.render(messages, options)
                chat = ChatPrompt(text, self._memory.encode(text, namespace))
            prompt = PreparedPrompt(chat.token_ids, text)
        else:
            text, sources, uuids = self._render_images(messages, template, codec)
            similar = params.similar_images and params.is_stored
            loaded = codec.images.read(sources, uuids, salt, similar=similar)
            with self._lock:
                text = codec.mark(text, loaded)
                chat = ChatPrompt(text, self._memory.encode(text, namespace))
            readable = _MARK.sub(codec.images.placeholder, text)
            prompt = codec.images.build(readable, chat.token_ids, loaded)
        group = self._frontend.prepare(
            prompt, params, request_id=request_id, salt=salt, adapter=adapter, priority=priority
        )
        group.chat = chat
        if history and text.startswith(history):
            tokenizer = self._frontend.tokenizer
            assert tokenizer is not None  # rendering needs a tokenizer
            generation_prompt = text[len(history) :]
            count = len(tokenizer.encode(generation_prompt, add_special_tokens=False))
            for request in group.requests:
                request.sequence.forks = [len(chat.token_ids) - count]
        return group

    def _render_images(
        self, messages: Conversation, template: TemplateOptions, codec: ImagePromptCodec
    ) -> tuple[str, list[ImageSource], list[str | None]]:
        """Return the text, and the sources and uuids of its images. Raises RequestError."""
        sources: list[ImageSource] = []
        uuids: list[str | None] = []

        def take_image(index: int, part: Mapping[str, Any]) -> dict[str, Any]:
            sources.append(_find_image(index, part))
            uuids.append(part.get("uuid"))
            return {"type": "image"}

        placeholder = codec.images.placeholder
        in_parts = template.chat_template_content_format == "openai"
        if template.chat_template_content_format == "auto":
            in_parts = self._supports_parts(template.chat_template, placeholder)
        converted = read_conversation(messages)
        for index, message in enumerate(converted):
            parts = read_content(index, message, take_image)
            for part in parts:
                if part["type"] == "text":
                    if _OPEN in part["text"] or _CLOSE in part["text"]:
                        raise RequestError(
                            f"message {index} has U+FDD0 or U+FDD1, which are not characters"
                        )
                    part["text"] = codec.escape(part["text"])
            texts = [part.get("text", placeholder) for part in parts]
            message["content"] = parts if in_parts else "\n".join(texts)
        return self._memory.apply_template(converted, template), sources, uuids

    def _try_parts(self, chat_template: str | None, placeholder: str) -> bool:
        """Return True if the template supports lists of parts and shows images."""
        parts = [{"type": "image"}, {"type": "text", "text": "text"}]
        example = TemplateOptions(chat_template=chat_template)
        try:
            rendered = self._memory.apply_template([{"role": "user", "content": parts}], example)
        except RequestError:
            return False
        return rendered.count(placeholder) == 1 and "'type'" not in rendered

    def publish(self, prefix: str | Sequence[int]) -> int:
        """Let requests of all salts share the full blocks of a prefix; return the number of blocks.

        A string is a prefix of prompts and of system messages. Only tokens that are independent of
        the text after the prefix are shared. Raises RequestError for a string that cannot begin a
        prompt, and CacheError for an invalid token id.
        """
        hasher = self._frontend.facts.hasher
        if not isinstance(prefix, Collection):
            raise RequestError(f"prefix is {describe(prefix)}; allowed: a string, or token ids")
        if not isinstance(prefix, str):
            return hasher.publish(prefix)
        params = SamplingParams(temperature=0, max_tokens=1)
        pairs = [[self._frontend.prepare(prefix + text, params) for text in _CONTINUATIONS]]
        with suppress(RequestError):  # no template, or a template without a system message
            system = {"role": "system", "content": prefix}
            chats = [[system, {"role": "user", "content": text}] for text in _CONTINUATIONS]
            pairs.append([self.prepare(chat, params) for chat in chats])
        heads = []
        for first, second in pairs:
            ids = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
            heads.append([left for left, _ in takewhile(lambda pair: pair[0] == pair[1], ids)])
        return max(hasher.publish(head) for head in heads)

    def remember(self, group: RequestGroup, output: RequestOutput) -> None:
        """Store the ids of a finished request's answers, for later turns of the same namespace."""
        chat: ChatPrompt = group.chat
        if not group.params.is_stored:
            return
        with self._lock:
            for answer in output.outputs:
                self._memory.remember(*chat, answer.text, answer.token_ids, group.namespace)

    def recall(self, messages: Conversation, replies: Mapping[int, Sequence[int]]) -> None:
        """Remember a conversation of another process, with the ids of its generated replies.

        replies: ids by the index of the message. Ids that do not decode to the message are ignored.
        Has no effect if the model has vision. Raises RequestError for invalid ids or indices, and
        if the template refuses the conversation.
        """
        for index, token_ids in replies.items():
            is_reply = type(index) is int and index in range(len(messages))
            if not is_reply or not all(type(token) is int and token >= 0 for token in token_ids):
                raise RequestError(
                    f"reply_token_ids has {describe(token_ids)} at {describe(index)}; allowed: "
                    f"token ids by the index of a message, from 0 to {len(messages) - 1}"
                )
        if self._codec is not None:
            return
        size = self._frontend.facts.vocab_size
        options = TemplateOptions(chat_template=self.chat_template)
        for index, token_ids in sorted(replies.items()):
            text = messages[index].get("content")
            if token_ids and max(token_ids) < size and isinstance(text, str):
                with self._lock:
                    prompt = self._memory.render(messages[:index], options)
                    self._memory.remember(prompt, self._memory.encode(prompt), text, token_ids)

    def clear(self) -> None:
        """Remove the stored turns. Later turns are tokenized completely."""
        with self._lock:
            self._memory.clear()


def _find_image(index: int, part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part. Raises RequestError.

    A part is `{"type": "image_url", "image_url": {"url": ...}}` with a data: URL, or `{"type":
    "image", "image": ...}` with a Pillow image, bytes, a `pathlib.Path` or a data: URL (vLLM also
    calls this type "image_pil"). Both may have a `"uuid"`. A string is never read as a path, since
    it may come from an untrusted client.
    """
    source = part.get(part["type"])
    if part["type"] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if source is None or (isinstance(source, str) and not is_data_url(source)):
        value = "None" if source is None else shorten(repr(source))
        raise RequestError(
            f"message {index} has an image that is {value}; allowed: a data: URL (nothing is "
            "fetched), in Python also a Pillow image, bytes or a pathlib.Path"
        )
    return source
