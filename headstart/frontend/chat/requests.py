"""Chats as requests: what `LLM` and `AsyncLLM` share between messages and the engine."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TypedDict, Unpack

from headstart.cache import Namespace
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.engine.request import RequestGroup
from headstart.errors import RequestError
from headstart.frontend.chat.conversation import ChatPrompt, ConversationMemory, Turn
from headstart.frontend.chat.messages import Message, TemplateOptions
from headstart.frontend.frontend import Frontend
from headstart.frontend.images.chat import ImageChat, ImageSpelling
from headstart.frontend.images.prompt import Tenant
from headstart.frontend.inputs import RequestOptions, check_request
from headstart.validation import describe

Conversation = Sequence[Message]
"""A chat so far: dicts with "role" and "content"."""


_FOLLOWING = ("a", " 0")  # no tokenizer makes one beginning of both


class RequestKeywords(TypedDict, total=False):
    """Options of a request besides its conversation: see `EngineCore.prepare`."""

    request_id: str | None
    salt: str | None
    adapter: str | None
    priority: int


class ChatRequests:
    """Makes requests of conversations, and remembers what was answered, for the next turn.

    May be used from several threads.
    """

    def __init__(self, frontend: Frontend, chat_template: str | None = None) -> None:
        """`chat_template` is for conversations that bring none; None for the tokenizer's."""
        self._frontend = frontend
        self.chat_template = chat_template
        self._lock = threading.Lock()
        self._images: ImageChat | None = None
        limit = frontend.text_limit
        if frontend.images is None:
            self._memory = ConversationMemory(frontend.tokenizer, limit=limit)
        else:
            spelling = ImageSpelling(frontend.tokenizer, frontend.images)
            self._memory = ConversationMemory(frontend.tokenizer, spelling=spelling, limit=limit)
            self._images = ImageChat(frontend.images, self._memory, spelling)

    def prepare(
        self,
        messages: Conversation,
        params: SamplingParams,
        template: TemplateOptions | None = None,
        **options: Unpack[RequestKeywords],
    ) -> RequestGroup:
        """A request whose prompt begins with the ids of earlier turns.

        Raises RequestError, and EngineError when the engine is closed.
        """
        self._frontend.require_open()
        request = RequestOptions(**options)
        check_request(params, request)
        salt, adapter = request.salt, request.adapter
        found = self._frontend.adapters.find(adapter) if adapter is not None else None
        namespace = Namespace(found.digest if found is not None else None, salt)
        tenant = Tenant(salt, params.similar_images and params.is_stored)
        template = template or TemplateOptions()
        if template.chat_template is None:
            template = replace(template, chat_template=self.chat_template)
        chat, prompt = self._prompt(messages, template, namespace, tenant)
        group = self._frontend.prepare(prompt, params, **options)
        group.chat = chat
        return group

    def publish(self, prefix: str | Sequence[int]) -> int:
        """Let requests of all salts share the blocks that lie wholly in a prefix; how many.

        A text is what prompts begin with, and what the system says first in chats. Its blocks are
        those whose tokens do not depend on what follows. Raises RequestError for a text that the
        model takes in neither place, and CacheError for what is no token.
        """
        names = self._frontend.facts.names
        if not isinstance(prefix, Collection):
            raise RequestError(f"prefix is {describe(prefix)}; allowed: a text, or token ids")
        if not isinstance(prefix, str):
            return names.publish(prefix)
        params = SamplingParams(temperature=0, max_tokens=1)
        pairs = [[self._frontend.prepare(prefix + text, params) for text in _FOLLOWING]]
        with suppress(RequestError):  # no template, or one without a system
            chats = [[_message("system", prefix), _message("user", text)] for text in _FOLLOWING]
            pairs.append([self.prepare(chat, params) for chat in chats])
        heads = [_common_head(*(group.prompt_token_ids for group in pair)) for pair in pairs]
        return max(names.publish(head) for head in heads)

    def _prompt(
        self,
        messages: Conversation,
        template: TemplateOptions,
        namespace: Namespace,
        tenant: Tenant,
    ) -> tuple[ChatPrompt, PreparedPrompt]:
        if self._images is not None:
            text, loaded = self._images.read(messages, tenant, template)
            with self._lock:
                return self._images.prompt(text, loaded, namespace)
        with self._lock:
            text = self._memory.render(messages, template)
            token_ids = self._memory.encode(text, namespace)
        return ChatPrompt(text, token_ids), PreparedPrompt(token_ids, text)

    def remember(self, group: RequestGroup, output: RequestOutput) -> None:
        """Keep the ids of a finished request's answers, for later turns of the same namespace."""
        chat: ChatPrompt = group.chat
        if not group.params.is_stored:
            return
        with self._lock:
            for answer in output.outputs:
                turn = Turn(*chat, answer.text, answer.token_ids)
                self._memory.remember(turn, group.namespace)

    def recall(self, messages: Conversation, replies: Mapping[int, Sequence[int]]) -> None:
        """Take up a conversation of another process, with the ids of replies that were generated.

        replies: ids by the place of the message. Those that do not spell the message are left out.
        Raises RequestError for a conversation that the template refuses, and for what are no ids
        or no places. Chats with images are read anew.
        """
        _check_replies(messages, replies)
        if self._images is not None:
            return
        size = self._frontend.facts.vocab_size
        options = TemplateOptions(chat_template=self.chat_template)
        for place, token_ids in sorted(replies.items()):
            text = messages[place]["content"]
            if token_ids and max(token_ids) < size and isinstance(text, str):
                with self._lock:
                    prompt = self._memory.render(messages[:place], options)
                    turn = Turn(prompt, self._memory.encode(prompt), text, token_ids)
                    self._memory.remember(turn)

    def clear(self) -> None:
        """Forget what was answered: later turns are tokenised as a whole."""
        with self._lock:
            self._memory.clear()


def _check_replies(messages: object, replies: object) -> None:
    """Raise RequestError if these are not lists of token ids by the place of a message."""
    if not isinstance(replies, Mapping):
        raise RequestError(
            f"reply_token_ids is {describe(replies)}; allowed: a dict from the place of a reply to "
            "its token ids"
        )
    count = len(messages) if isinstance(messages, Sequence) else 0
    for place, token_ids in replies.items():
        is_place = type(place) is int and 0 <= place < count
        if not is_place or not _is_message(messages[place]):  # type: ignore[index]
            raise RequestError(
                f"reply_token_ids has the place {describe(place)}; allowed: that of a message "
                f"with a content, from 0 to {count - 1}"
            )
        is_list = isinstance(token_ids, Collection) and not isinstance(token_ids, Mapping)
        if not is_list or not all(type(one) is int and one >= 0 for one in token_ids):
            raise RequestError(
                f"reply_token_ids[{place}] is {describe(token_ids)}; allowed: a list of token ids"
            )


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and "content" in given


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _common_head(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The ids with which both lists begin."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return [token_id for token_id, _ in pairs]
