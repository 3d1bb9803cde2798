"""Chats: from messages to the token ids of a prompt that begins with the tokens of earlier turns.

A reply comes back in the next turn as text. Tokenized anew it often has other ids than the model
sampled ("the" may be "t" + "he"), and from there on nothing hits. So the ids are stored under the
text that they spell, and a prompt that begins with such a text begins with its ids. Only the rest
is tokenized."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from headstart.cache import Namespace
from headstart.errors import ConfigError, RequestError
from headstart.frontend.chat.messages import (
    Message,
    RawArguments,
    TemplateOptions,
    TemplateOrder,
    check_text_content,
    read_conversation,
    text_parts,
)
from headstart.frontend.text import Spelling, TextLimit
from headstart.validation import check_utf8, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ENTRY_BYTES", "TextIndex"]


ENTRY_BYTES = 768
"""What a text costs beside its token ids: its digest, its places in four tables, and the head of
an array."""


class _Known(NamedTuple):
    """The first `num_tokens` of `token_ids`; several texts of one turn share the same array."""

    num_bytes: int
    token_ids: array[int]
    num_tokens: int


class TextIndex:
    """At most `max_texts` texts, which with their token ids take at most `max_bytes`.

    Not thread-safe. Raises ConfigError for a bound below 1.
    """

    def __init__(self, max_texts: int, max_bytes: int) -> None:
        for name, value in (("max_texts", max_texts), ("max_bytes", max_bytes)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: at least 1")
        self._max_texts = max_texts
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # least recently used first
        self._changing = False
        self._derive()

    def _derive(self) -> None:
        """Work out the fields that follow from what is known."""
        self._num_bytes = 0
        self._counts: Counter[int] = Counter()  # texts of each length
        self._lengths: list[int] = []
        self._users: Counter[int] = Counter()  # texts of each array, by its id
        for known in self._known.values():
            self._count(known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of all token ids, each array counted once, and `ENTRY_BYTES` a text."""
        self._repair()
        return self._num_bytes

    def add(self, text: str, token_ids: array[int], count: int, namespace: Namespace) -> None:
        """Keep the first `count` ids as those of `text`, in place of any earlier ones.

        One whose ids alone take more than `max_bytes` is not kept.
        """
        self._repair()
        if _size(token_ids) + ENTRY_BYTES > self._max_bytes:
            return
        data = _encode(text)
        hasher = _hasher(namespace)
        hasher.update(data)
        key = hasher.digest()
        self._changing = True
        if key in self._known:
            self._forget(key)
        known = self._known[key] = _Known(len(data), token_ids, count)
        self._count(known)
        self._make_room()
        self._changing = False

    def _make_room(self) -> None:
        while len(self._known) > self._max_texts or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def _repair(self) -> None:
        if self._changing:
            self._derive()
            self._make_room()
            self._changing = False

    def _count(self, known: _Known) -> None:
        self._counts[known.num_bytes] += 1
        if self._counts[known.num_bytes] == 1:
            insort(self._lengths, known.num_bytes)
        self._users[id(known.token_ids)] += 1
        if self._users[id(known.token_ids)] == 1:
            self._num_bytes += _size(known.token_ids)
        self._num_bytes += ENTRY_BYTES

    def _forget(self, key: bytes) -> None:
        known = self._known.pop(key)
        self._counts[known.num_bytes] -= 1
        if not self._counts[known.num_bytes]:
            del self._counts[known.num_bytes]
            del self._lengths[bisect_left(self._lengths, known.num_bytes)]
        self._users[id(known.token_ids)] -= 1
        if not self._users[id(known.token_ids)]:
            del self._users[id(known.token_ids)]
            self._num_bytes -= _size(known.token_ids)
        self._num_bytes -= ENTRY_BYTES

    def clear(self) -> None:
        """Forget every text."""
        self._changing = True
        self._known.clear()
        self._repair()

    def longest(self, text: str, namespace: Namespace) -> tuple[list[int], str]:
        """The ids of the longest known beginning of `text`, and the text after it."""
        self._repair()
        data = _encode(text)
        hasher = _hasher(namespace)
        done = 0
        found: bytes | None = None
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            hasher.update(data[done:length])
            done = length
            key = hasher.digest()
            if key in self._known:
                found = key
        if found is None:
            return [], text
        self._known.move_to_end(found)
        known = self._known[found]
        return known.token_ids[: known.num_tokens].tolist(), _decode(data[known.num_bytes :])

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._repair()
        arrays = {id(known.token_ids): known.token_ids for known in self._known.values()}
        size = sum(map(_size, arrays.values())) + ENTRY_BYTES * len(self._known)
        assert self._num_bytes == size <= self._max_bytes, "the bytes are counted wrong"
        assert len(self._known) <= self._max_texts
        lengths = Counter(known.num_bytes for known in self._known.values())
        assert self._counts == lengths and self._lengths == sorted(lengths)


def _encode(text: str) -> bytes:
    """A text in UTF-8; half a character, which a model may have written, in three bytes."""
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _size(token_ids: array[int]) -> int:
    return len(token_ids) * token_ids.itemsize


def _hasher(namespace: Namespace) -> hashlib.blake2b:
    """Adapter and salt stand in fields of their own lengths, so that no two run together."""
    hasher = hashlib.blake2b(digest_size=16)
    for field in namespace:
        name = b"" if field is None else _encode(field)
        hasher.update((field is not None).to_bytes() + len(name).to_bytes(8) + name)
    return hasher


MAX_TEXTS = 4096
MAX_BYTES = 64 * 2**20
"""Bounds of the memory: 4,096 texts, and 64 MiB of texts and token ids."""

SHARED = Namespace(None, None)
"""Turns without an adapter and without a salt."""

_AS_THE_MODEL = TemplateOptions()

# Tokens of context in which a piece of text is spelled out: enough for any decoder, which
# looks back one token (a space before a word) or three (the bytes of a character).
_CONTEXT = 8
_MAX_TEMPLATES = 16  # whose orders of messages are remembered
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class ChatPrompt(NamedTuple):
    """A conversation's prompt as its next turn will look for it: the text and the ids of it."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn: what was asked, and one answer. The prompt's ids spell the prompt."""

    prompt: str
    prompt_token_ids: Sequence[int]
    reply: str
    reply_token_ids: Sequence[int]


class ConversationMemory:
    """Renders chats and recognises what was said before.

    tokenizer: None for a model without one, which cannot chat. spelling: how texts become ids and
    back, where that is not the tokenizer's business alone. limit: how long a conversation may be,
    None for any length. max_texts: texts remembered, up to three for a turn. max_bytes: memory
    for them; the texts of a turn share 4 bytes for each token of its prompt and reply.

    Not thread-safe. Raises ConfigError for a bound below 1.
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
        longest = limit.max_model_len if limit is not None else None
        self._spelling = spelling or Spelling(tokenizer, longest)
        self._texts = TextIndex(max_texts, max_bytes)
        self._limit = limit
        self._orders: dict[tuple[str, bool], TemplateOrder] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def render(self, messages: Sequence[Message], options: TemplateOptions = _AS_THE_MODEL) -> str:
        """The prompt's text by the model's chat template, up to where the reply begins.

        Raises RequestError: no tokenizer or no template, no message, a role or content that is
        not one, too many messages or too long a text, or what the template itself refuses.
        """
        texts = read_conversation(messages)
        for place, message in enumerate(texts):
            message["content"] = check_text_content(place, message.get("content"))
        if options.chat_template_content_format == "openai":
            for message in texts:
                message["content"] = text_parts(message)
        return self.apply_template(texts, options)

    def apply_template(
        self, messages: list[dict[str, Any]], options: TemplateOptions = _AS_THE_MODEL
    ) -> str:
        """Return the prompt's text for messages whose contents the template takes as they are.

        Raises RequestError.
        """
        tokenizer = self._spelling.tokenizer
        if not (tokenizer.chat_template or options.chat_template):
            raise RequestError("the model's tokenizer has no chat template: give a prompt instead")
        if self._limit is not None:
            self._limit.check_messages(len(messages))
        try:
            ordered = self._order(messages, options).arrange(messages)
            text = _apply(tokenizer, ordered, options)
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses this: {shorten(str(error))}"
            ) from error
        # A template is a program over the messages: what it raises depends on what it does.
        except Exception as error:
            raise RequestError(
                f"the model's chat template failed: {type(error).__name__}: {shorten(str(error))}"
            ) from error
        if self._limit is None:
            check_utf8("the conversation", text)
        else:
            self._limit.check("the conversation", text)
        return text

    def _order(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions
    ) -> TemplateOrder:
        """Return the order of messages that the template takes, which is found out once."""
        tokenizer = self._spelling.tokenizer
        tools: list[dict[str, Any]] | None = [{}] if options.tools else None
        template = tokenizer.get_chat_template(options.chat_template, tools)
        in_parts = isinstance(messages[0]["content"], list)
        order = self._orders.get((template, in_parts))
        if order is None:
            if len(self._orders) >= _MAX_TEMPLATES:
                self._orders.clear()
            render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template)
            order = TemplateOrder(lambda given: str(render(given)), in_parts=in_parts)
            self._orders[template, in_parts] = order
        return order

    def encode(self, text: str, namespace: Namespace = SHARED) -> list[int]:
        """The ids of a rendered text: those remembered for its longest known beginning first.

        Decoding them gives the text back, or what tokenising all of it anew would decode to
        where the tokenizer loses something (a normaliser, a dummy space). Costs a hash over the
        text, a digest for each distinct length remembered, and tokenising the rest.
        """
        spelling = self._spelling
        known, rest = self._texts.longest(text, namespace)
        if not known:
            return spelling.tokenize(text)
        context = known[-_CONTEXT:]
        shown = spelling.spell(context) + spelling.show(rest)
        candidates = [spelling.tokenize(rest), *spelling.tokenize_anchored(rest)]
        for following in candidates:
            if spelling.spell([*context, *following]) == shown:
                return known + following
        anew = spelling.tokenize(text)
        spelled = spelling.spell(anew)
        for following in candidates:
            if spelling.spell(known + following) == spelled:
                return known + following
        return anew

    def remember(self, turn: Turn, namespace: Namespace = SHARED) -> None:
        """Keep a turn's ids for the next one, as far as its texts spell them.

        Left out at the end are tokens that the reply does not show (an end-of-turn token, which
        the template will spell again; what a stop string cut off) and a character that was
        never finished. Templates may drop white space at the end of a reply, or rewrite it: so
        the reply without that space is kept too, and the prompt alone.
        """
        token_ids = array("I", [*turn.prompt_token_ids, *turn.reply_token_ids])
        start = len(turn.prompt_token_ids)
        texts: dict[str, int] = {}
        for reply in {turn.reply.rstrip(), turn.reply}:
            count = self._count_shown(turn.reply_token_ids, reply)
            spelled = self._spell_after(turn.prompt_token_ids, turn.reply_token_ids[:count])
            if spelled is not None:
                texts[turn.prompt + self._spelling.quote(spelled)] = start + count
        texts[turn.prompt] = start  # also when the reply's tokens spell nothing
        for text, count in texts.items():
            self._texts.add(text, token_ids, count, namespace)

    def clear(self) -> None:
        """Forget every turn."""
        self._texts.clear()

    def _count_shown(self, token_ids: Sequence[int], text: str) -> int:
        """Return how many of a reply's first ids spell the beginning of `text`.

        Only whole characters count, and no space at the beginning: the ids alone may lose it.
        Longer beginnings of the ids spell longer texts, so a binary search finds the place, but
        for the tokens of an unfinished character before it.
        """
        text = text.lstrip(" ")
        places = range(len(token_ids) + 1)
        shown = bisect_left(places, True, key=lambda n: not self._is_shown(token_ids[:n], text)) - 1
        for count in range(shown, max(shown - _CONTEXT, 0), -1):
            spelled = self._spelling.spell(token_ids[:count]).lstrip(" ")
            if text.startswith(spelled) and not spelled.endswith(_UNFINISHED):
                return count
        return 0

    def _is_shown(self, token_ids: Sequence[int], text: str) -> bool:
        return text.startswith(self._spelling.spell(token_ids).lstrip(" ").rstrip(_UNFINISHED))

    def _spell_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str | None:
        """The text of token ids that follow others; None if the texts cannot be told apart.

        At the beginning of a text some decoders drop a space that they show elsewhere. Bytes
        that make no character may change what the bytes before them spell.
        """
        context = before[-_CONTEXT:]
        start = self._spelling.spell(context)
        spelled = self._spelling.spell([*context, *token_ids])
        return spelled[len(start) :] if spelled.startswith(start) else None


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: TemplateOptions
) -> str:
    arguments = RawArguments()
    try:
        text = tokenizer.apply_chat_template(
            arguments.mark(messages), tokenize=False, **options.arguments()
        )
    except Exception:
        if not arguments:
            raise
        marked = arguments.mark(messages, as_dict=True)
        text = tokenizer.apply_chat_template(marked, tokenize=False, **options.arguments())
    assert isinstance(text, str)
    return arguments.restore(text)
