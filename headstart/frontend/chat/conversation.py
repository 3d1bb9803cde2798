"""Chats: from messages to the token ids of a prompt that begins with the tokens of earlier turns.

The next turn contains the reply as text. The ids of this text often differ from the ids that the
model sampled ("the" may have been "t" + "he"). Then nothing after the first difference hits the
cache. So the sampled ids are stored with their text. A prompt that begins with a stored text gets
the stored ids, and only the rest of the prompt is tokenized.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from headstart.cache import Namespace
from headstart.errors import RequestError
from headstart.frontend.chat.messages import (
    Message,
    TemplateOptions,
    TemplateOrder,
    read_content,
    read_conversation,
    render_arguments,
    text_parts,
)
from headstart.frontend.text import REPLACEMENT, PromptCodec, TextLimit
from headstart.validation import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEXTS = 4096
MAX_BYTES = 64 * 2**20

ENTRY_BYTES = 768
"""Bytes of an entry without its token ids: digest, table entries, head of the array."""

SHARED = Namespace(None, None)
"""The namespace of turns without an adapter and without a salt."""

# Tokens of context to decode before other tokens. Decoders may drop a space at the beginning of a
# text, so one token must precede a word. A character may extend over four tokens.
_CONTEXT = 8
_MAX_TEMPLATES = 16  # templates whose `TemplateOrder` is cached


class _Entry(NamedTuple):
    """A stored text: its length in UTF-8, and its ids, the first `num_tokens` of `token_ids`.

    The texts of a turn share one array of ids.
    """

    num_bytes: int
    token_ids: array[int]
    num_tokens: int


class TextIndex:
    """Token ids by text: up to `max_texts` texts and `max_bytes`. Not thread-safe.

    Text is identified by a hash over adapter, salt and text. To find the longest stored prefix of
    text, BLAKE2 reads the text once and makes a digest at each distinct stored length. A digest
    takes a few microseconds. The least recently used text is removed first.
    """

    def __init__(self, max_texts: int, max_bytes: int) -> None:
        self._max_texts, self._max_bytes = max_texts, max_bytes
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Remove every text."""
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._lengths: Counter[int] = Counter()  # number of texts by their length in bytes
        self._users: Counter[int] = Counter()  # number of texts by the `id()` of their array
        self.num_bytes = 0  # bytes of entries and arrays; a shared array counts once

    def add(self, text: str, token_ids: array[int], count: int, namespace: Namespace) -> None:
        """Store the first `count` ids as the ids of `text`, if the array fits into `max_bytes`."""
        if _size(token_ids) + ENTRY_BYTES > self._max_bytes:
            return
        data = _encode(text)
        hasher = _make_hasher(namespace)
        hasher.update(data)
        key = hasher.digest()
        if key in self._entries:
            self._remove(key)
        self._entries[key] = _Entry(len(data), token_ids, count)
        self._lengths[len(data)] += 1
        self._users[id(token_ids)] += 1
        self.num_bytes += ENTRY_BYTES + _size(token_ids) * (self._users[id(token_ids)] == 1)
        while len(self._entries) > self._max_texts or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: bytes) -> None:
        length, token_ids, _ = self._entries.pop(key)
        self.num_bytes -= ENTRY_BYTES + _size(token_ids) * (self._users[id(token_ids)] == 1)
        for counts, item in ((self._lengths, length), (self._users, id(token_ids))):
            counts[item] -= 1
            if not counts[item]:
                del counts[item]

    def longest(self, text: str, namespace: Namespace) -> tuple[list[int], str]:
        """Return the ids of the longest stored prefix of `text`, and the rest of the text."""
        data = _encode(text)
        hasher = _make_hasher(namespace)
        done, match = 0, b""
        for length in sorted(length for length in self._lengths if length <= len(data)):
            hasher.update(data[done:length])
            done = length
            key = hasher.digest()
            if key in self._entries:
                match = key
        if not match:
            return [], text
        self._entries.move_to_end(match)
        num_bytes, token_ids, num_tokens = self._entries[match]
        return token_ids[:num_tokens].tolist(), data[num_bytes:].decode("utf-8", "surrogatepass")

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        arrays = {id(entry.token_ids): entry.token_ids for entry in self._entries.values()}
        size = sum(map(_size, arrays.values())) + ENTRY_BYTES * len(self._entries)
        assert self.num_bytes == size <= self._max_bytes, "the bytes are counted wrong"
        assert len(self._entries) <= self._max_texts
        assert self._lengths == Counter(entry.num_bytes for entry in self._entries.values())


def _encode(text: str) -> bytes:
    """Encode a string in UTF-8. A lone surrogate, which a model may write, takes three bytes."""
    return text.encode("utf-8", "surrogatepass")


def _size(token_ids: array[int]) -> int:
    return len(token_ids) * token_ids.itemsize


def _make_hasher(namespace: Namespace) -> hashlib.blake2b:
    """Return a hasher that has read the adapter and the salt, each preceded by its length."""
    hasher = hashlib.blake2b(digest_size=16)
    for field in namespace:
        name = b"" if field is None else _encode(field)
        hasher.update((field is not None).to_bytes() + len(name).to_bytes(8) + name)
    return hasher


class ChatPrompt(NamedTuple):
    """The text and ids of a conversation's prompt."""

    text: str
    token_ids: Sequence[int]


class ConversationMemory:
    """Renderer of chats that remembers the token ids of earlier turns. Not thread-safe.

    tokenizer: None for a model without one, which cannot chat. limit: on the text of a chat.
    max_texts: the maximum number of stored texts, up to three for each turn. Stored texts take up
    to `MAX_BYTES`: 4 bytes for each token of a turn's prompt and reply, and `ENTRY_BYTES` for each
    text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        codec: PromptCodec | None = None,
        limit: TextLimit | None = None,
        max_texts: int = MAX_TEXTS,
    ) -> None:
        self._limit = limit or TextLimit(tokenizer, sys.maxsize)
        self._codec = codec or PromptCodec(tokenizer, self._limit.max_model_len)
        self._texts = TextIndex(max_texts, MAX_BYTES)
        self._order = lru_cache(_MAX_TEMPLATES)(self._find_order)

    def __len__(self) -> int:
        return len(self._texts)

    def render(self, messages: Sequence[Message], options: TemplateOptions | None = None) -> str:
        """Return the prompt's text, made by the chat template. Raises RequestError."""
        options = options or TemplateOptions()
        texts = read_conversation(messages)
        for index, message in enumerate(texts):  # parts are on separate lines, as in vLLM
            parts = read_content(index, message)
            message["content"] = "\n".join(part["text"] for part in parts)
            if options.chat_template_content_format == "openai":
                message["content"] = text_parts(message)
        return self.apply_template(texts, options)

    def apply_template(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """Return the prompt's text for messages of `read_conversation`. Raises RequestError."""
        tokenizer = self._codec.tokenizer
        if not (tokenizer.chat_template or options.chat_template):
            raise RequestError("the model's tokenizer has no chat template; use a prompt instead")
        if len(messages) > self._limit.max_model_len:
            raise RequestError(
                f"the conversation has {len(messages):,} messages; allowed: "
                f"{self._limit.max_model_len:,} at most (max_model_len)"
            )
        try:
            tools: list[dict[str, Any]] | None = [{}] if options.tools else None
            template = tokenizer.get_chat_template(options.chat_template, tools)
            order = self._order(template, isinstance(messages[0]["content"], list))
            render: Callable[..., Any] = partial(
                tokenizer.apply_chat_template, tokenize=False, **options.arguments()
            )
            text = render_arguments(order.arrange(messages), lambda marked: str(render(marked)))
        except Exception as error:  # a template is a program, which may raise anything
            is_refusal = isinstance(error, TemplateError)
            problem = "refuses this" if is_refusal else f"failed: {type(error).__name__}"
            raise RequestError(
                f"the model's chat template {problem}: {shorten(str(error))}"
            ) from error
        self._limit.check("the conversation", text)
        return text

    def _find_order(self, template: str, in_parts: bool) -> TemplateOrder:
        tokenizer = self._codec.tokenizer
        render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template)
        return TemplateOrder(lambda messages: str(render(messages)), in_parts=in_parts)

    def encode(self, text: str, namespace: Namespace = SHARED) -> list[int]:
        """Return the ids of a rendered text: stored ids of its longest stored prefix, then new ids.

        The returned ids decode to `text`. If the tokenizer changes texts (by a normalizer or a
        dummy space), they decode to the same text as a new tokenization of `text`. If no
        tokenization of the part after the stored prefix achieves this, return the new tokenization.
        """
        codec = self._codec
        head, rest = self._texts.longest(text, namespace)
        if not head:
            return codec.encode(text)
        context = head[-_CONTEXT:]
        expected = codec.decode(context) + codec.normalize(rest)
        candidates = [codec.encode(rest), *codec.encode_anchored(rest)]
        for tail in candidates:
            if codec.decode([*context, *tail]) == expected:
                return head + tail
        token_ids = codec.encode(text)
        expected = codec.decode(token_ids)
        for tail in candidates:
            if codec.decode(head + tail) == expected:
                return head + tail
        return token_ids

    def remember(
        self,
        prompt: str,
        prompt_token_ids: Sequence[int],
        reply: str,
        reply_token_ids: Sequence[int],
        namespace: Namespace = SHARED,
    ) -> None:
        """Store the texts of a finished turn with the ids that decode to them, for the next turn.

        The last ids of a reply may have no text in the reply: an end-of-turn token (the template
        adds it again), tokens after a stop string, or an incomplete character. They are not stored.
        A template may drop white space at the end of a reply or rewrite the reply. So two shorter
        texts are stored too: the turn without white space at its end, and the prompt without the
        reply.
        """
        token_ids = array("I", [*prompt_token_ids, *reply_token_ids])
        start = len(prompt_token_ids)
        texts: dict[str, int] = {}
        for visible in {reply.rstrip(), reply}:
            count = self._count_visible(reply_token_ids, visible)
            # Decode with context: some decoders drop a space at the beginning of text, and bytes
            # of an incomplete character may change the text of the bytes before them.
            context = [*prompt_token_ids[-_CONTEXT:]]
            before = self._codec.decode(context)
            decoded = self._codec.decode([*context, *reply_token_ids[:count]])
            if decoded.startswith(before):
                text = self._codec.escape(decoded.removeprefix(before))
                texts[prompt + text] = start + count
        texts[prompt] = start  # even if the reply's tokens have no text
        for text, count in texts.items():
            self._texts.add(text, token_ids, count, namespace)

    def clear(self) -> None:
        """Remove every turn."""
        self._texts.clear()

    def _count_visible(self, token_ids: Sequence[int], text: str) -> int:
        """Return the number of a reply's first ids that decode to the beginning of `text`.

        A space at the beginning is ignored, as ids without context may lose it. A binary search
        finds the number; then tokens of an incomplete character are subtracted.
        """
        text = text.lstrip(" ")

        def decode(count: int) -> str:
            return self._codec.decode(token_ids[:count]).lstrip(" ")

        def is_beyond(count: int) -> bool:
            return not text.startswith(decode(count).rstrip(REPLACEMENT))

        max_count = bisect_left(range(len(token_ids) + 1), True, key=is_beyond) - 1
        for count in range(max_count, max(max_count - _CONTEXT, 0), -1):
            decoded = decode(count)
            if text.startswith(decoded) and not decoded.endswith(REPLACEMENT):
                return count
        return 0
