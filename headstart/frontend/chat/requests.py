"""Requests made of conversations, which begin with the token ids of earlier turns."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

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
from headstart.frontend.inputs import check_request
from headstart.validation import describe

Conversation = Sequence[Message]
"""A chat so far: dicts with "role" and "content"."""

_FOLLOWING = ("a", " 0")  # no tokenizer makes one beginning of both


class ChatRequests:
    """Makes requests of conversations, and remembers the answers for the next turn.

    May be used from several threads.
    """

    def __init__(self, frontend: Frontend, chat_template: str | None = None) -> None:
        """`chat_template` is for conversations that bring none; None for the tokenizer's."""
        self._frontend = frontend
        self.chat_template = chat_template
        self._lock = threading.Lock()
        self._images: ImageChat | None = None
        spelling = None
        if frontend.images is not None:
            spelling = ImageSpelling(frontend.tokenizer, frontend.images)
        self._memory = ConversationMemory(
            frontend.tokenizer, spelling=spelling, limit=frontend.text_limit
        )
        if frontend.images is not None and spelling is not None:
            self._images = ImageChat(frontend.images, self._memory, spelling)

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
        if self._images is not None:
            tenant = Tenant(salt, params.similar_images and params.is_stored)
            text, loaded = self._images.read(messages, tenant, template)
            with self._lock:
                chat, prompt = self._images.prompt(text, loaded, namespace)
        else:
            with self._lock:
                text = self._memory.render(messages, template)
                chat = ChatPrompt(text, self._memory.encode(text, namespace))
            prompt = PreparedPrompt(chat.token_ids, text)
        group = self._frontend.prepare(
            prompt, params, request_id=request_id, salt=salt, adapter=adapter, priority=priority
        )
        group.chat = chat
        return group

    def publish(self, prefix: str | Sequence[int]) -> int:
        """Let requests of all salts share the blocks that lie wholly in a prefix; return how many.

        A text is a beginning of prompts, and of the system's message in chats. Its blocks are
        those whose tokens do not depend on what follows. Raises RequestError for a text that the
        model takes in neither place, and CacheError for a value that is no token.
        """
        names = self._frontend.facts.names
        if not isinstance(prefix, Collection):
            raise RequestError(f"prefix is {describe(prefix)}; allowed: a text, or token ids")
        if not isinstance(prefix, str):
            return names.publish(prefix)
        params = SamplingParams(temperature=0, max_tokens=1)
        pairs = [[self._frontend.prepare(prefix + text, params) for text in _FOLLOWING]]
        with suppress(RequestError):  # no template, or one without a system
            system = {"role": "system", "content": prefix}
            chats = [[system, {"role": "user", "content": text}] for text in _FOLLOWING]
            pairs.append([self.prepare(chat, params) for chat in chats])
        heads = []
        for first, second in pairs:
            both = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
            heads.append([left for left, _ in takewhile(lambda ids: ids[0] == ids[1], both)])
        return max(names.publish(head) for head in heads)

    def remember(self, group: RequestGroup, output: RequestOutput) -> None:
        """Store the ids of a finished request's answers, for later turns of the same namespace."""
        chat: ChatPrompt = group.chat
        if not group.params.is_stored:
            return
        with self._lock:
            for answer in output.outputs:
                turn = Turn(*chat, answer.text, answer.token_ids)
                self._memory.remember(turn, group.namespace)

    def recall(self, messages: Conversation, replies: Mapping[int, Sequence[int]]) -> None:
        """Remember a conversation of another process, with the ids of replies that were generated.

        replies: ids by the place of the message. Ids that do not spell the message are left out.
        Raises RequestError for a conversation that the template refuses, and for values that are no
        ids or no places. Chats with images are read anew.
        """
        for place, token_ids in replies.items():
            is_reply = type(place) is int and place in range(len(messages))
            if not is_reply or not all(type(token) is int and token >= 0 for token in token_ids):
                raise RequestError(
                    f"reply_token_ids has {describe(token_ids)} at {describe(place)}; allowed: "
                    f"token ids by the place of a message, from 0 to {len(messages) - 1}"
                )
        if self._images is not None:
            return
        size = self._frontend.facts.vocab_size
        options = TemplateOptions(chat_template=self.chat_template)
        for place, token_ids in sorted(replies.items()):
            text = messages[place].get("content")
            if token_ids and max(token_ids) < size and isinstance(text, str):
                with self._lock:
                    prompt = self._memory.render(messages[:place], options)
                    turn = Turn(prompt, self._memory.encode(prompt), text, token_ids)
                    self._memory.remember(turn)

    def clear(self) -> None:
        """Forget the answers: later turns are tokenized as a whole."""
        with self._lock:
            self._memory.clear()
