"""Chats: from messages to the token ids of a prompt that begins with the tokens of earlier turns.

The next turn contains the reply as text. If the text is tokenized again, it often has other ids
than the model sampled ("the" may have been "t" + "he"), and nothing after these ids hits. So ids
are stored with the text that they decode to. A prompt that begins with a stored text gets the
stored ids, and only the rest of the prompt is tokenized.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    refuse_image,
    render_arguments,
    text_parts,
)
from headstart.frontend.text import Spelling, TextLimit
from headstart.validation import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEXTS = 4096
MAX_BYTES = 64 * 2**20
"""Limits of the memory: 4,096 texts, and 64 MiB of texts and token ids."""

ENTRY_BYTES = 768
"""Bytes of a text's entry without its token ids: digest, table entries, head of the array."""

SHARED = Namespace(None, None)
"""The namespace of turns without an adapter and without a salt."""

# Tokens of context with which a piece of text is decoded. Decoders look back one token (a space
# before a word) or three tokens (the bytes of a character).
_CONTEXT = 8
_MAX_TEMPLATES = 16  # templates whose `TemplateOrder` is cached
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class _Entry(NamedTuple):
    """The first `num_tokens` of `token_ids`. Several texts of a turn share one array."""

    num_bytes: int
    token_ids: array[int]
    num_tokens: int


class TextIndex:
    """Token ids by text: at most `max_texts` texts, which take at most `max_bytes` with their ids.

    A text is identified by a hash over adapter, salt and text. To find the longest stored prefix of
    a text, BLAKE2 reads the text once and makes a digest at each distinct stored length. A digest
    takes a few microseconds, so the number of texts is limited too. The least recently used text is
    removed first. Not thread-safe.
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
        """Store the first `count` ids as the ids of `text`; replace earlier ids.

        If the ids of one text take more than `max_bytes`, they are not stored.
        """
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
    """Encode a text in UTF-8. A lone surrogate, which a model may write, takes three bytes."""
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
    """The text and ids of a conversation's prompt, for the next turn to find."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RememberedTurn:
    """A finished turn: the texts of prompt and reply, and their token ids."""

    prompt: str
    prompt_token_ids: Sequence[int]
    reply: str
    reply_token_ids: Sequence[int]


class ConversationMemory:
    """Rendering of chats, and memory of their earlier turns. Not thread-safe.

    tokenizer: None for a model without one, which cannot chat. spelling: conversion of texts to ids
    and back; defaults to the tokenizer's. limit: the longest conversation. max_texts: number of
    stored texts, up to three for a turn. max_bytes: their memory; the texts of a turn share 4 bytes
    for each token of its prompt and reply.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        spelling: Spelling | None = None,
        limit: TextLimit | None = None,
        max_texts: int = MAX_TEXTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._limit = limit or TextLimit(tokenizer, sys.maxsize)
        self._spelling = spelling or Spelling(tokenizer, self._limit.max_model_len)
        self._texts = TextIndex(max_texts, max_bytes)
        self._order = lru_cache(_MAX_TEMPLATES)(self._find_order)

    def __len__(self) -> int:
        return len(self._texts)

    def render(self, messages: Sequence[Message], options: TemplateOptions | None = None) -> str:
        """Return the prompt's text, made by the chat template, up to the beginning of the reply.

        Raises RequestError: no tokenizer, template or message; an invalid role or content; too
        many messages; too long a text; or an error of the template.
        """
        options = options or TemplateOptions()
        texts = read_conversation(messages)
        for place, message in enumerate(texts):  # parts are on separate lines, as in vLLM
            parts = read_content(place, message, refuse_image)
            message["content"] = "\n".join(part["text"] for part in parts)
            if options.chat_template_content_format == "openai":
                message["content"] = text_parts(message)
        return self.apply_template(texts, options)

    def apply_template(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """Return the prompt's text for messages whose contents already have the template's form.

        Raises RequestError.
        """
        tokenizer = self._spelling.tokenizer
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
        """Return the `TemplateOrder` of a template."""
        tokenizer = self._spelling.tokenizer
        render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template)
        return TemplateOrder(lambda messages: str(render(messages)), in_parts=in_parts)

    def encode(self, text: str, namespace: Namespace = SHARED) -> list[int]:
        """Return the ids of a rendered text: the ids of its longest stored prefix, then the rest.

        The ids decode to the text. If the tokenizer changes texts (a normalizer, a dummy space),
        they decode to the same text as freshly tokenized ids. Costs a hash over the text, a digest
        for each distinct stored length, and tokenizing the rest.
        """
        spelling = self._spelling
        head, rest = self._texts.longest(text, namespace)
        if not head:
            return spelling.tokenize(text)
        context = head[-_CONTEXT:]
        shown = spelling.spell(context) + spelling.show(rest)
        candidates = [spelling.tokenize(rest), *spelling.tokenize_anchored(rest)]
        for following in candidates:
            if spelling.spell([*context, *following]) == shown:
                return head + following
        anew = spelling.tokenize(text)
        spelled = spelling.spell(anew)
        for following in candidates:
            if spelling.spell(head + following) == spelled:
                return head + following
        return anew

    def remember(self, turn: RememberedTurn, namespace: Namespace = SHARED) -> None:
        """Store the ids of a turn that decode to its texts, for the next turn.

        Tokens at the end that the reply does not show are left out: an end-of-turn token, which
        the template adds again, text after a stop string, and an incomplete character. Templates
        may drop white space at the end of a reply or rewrite the reply. So two shorter texts are
        stored too: the turn without that white space, and the prompt without the reply.
        """
        token_ids = array("I", [*turn.prompt_token_ids, *turn.reply_token_ids])
        start = len(turn.prompt_token_ids)
        texts: dict[str, int] = {}
        for reply in {turn.reply.rstrip(), turn.reply}:
            count = self._count_shown(turn.reply_token_ids, reply)
            # Decode with context: some decoders drop a space at the beginning of a text, and bytes
            # of an incomplete character may change the text of the bytes before them.
            context = [*turn.prompt_token_ids[-_CONTEXT:]]
            before = self._spelling.spell(context)
            spelled = self._spelling.spell([*context, *turn.reply_token_ids[:count]])
            if spelled.startswith(before):
                text = self._spelling.quote(spelled.removeprefix(before))
                texts[turn.prompt + text] = start + count
        texts[turn.prompt] = start  # even if the reply's tokens have no text
        for text, count in texts.items():
            self._texts.add(text, token_ids, count, namespace)

    def clear(self) -> None:
        """Forget every turn."""
        self._texts.clear()

    def _count_shown(self, token_ids: Sequence[int], text: str) -> int:
        """Return how many of a reply's first ids decode to the beginning of `text`.

        Only whole characters count. A space at the beginning does not, as ids without context may
        lose it. More ids decode to longer texts, so a binary search finds the number; then tokens
        of an incomplete character are subtracted.
        """
        text = text.lstrip(" ")

        def spell(count: int) -> str:
            return self._spelling.spell(token_ids[:count]).lstrip(" ")

        def is_beyond(count: int) -> bool:
            return not text.startswith(spell(count).rstrip(_UNFINISHED))

        shown = bisect_left(range(len(token_ids) + 1), True, key=is_beyond) - 1
        for count in range(shown, max(shown - _CONTEXT, 0), -1):
            spelled = spell(count)
            if text.startswith(spelled) and not spelled.endswith(_UNFINISHED):
                return count
        return 0
