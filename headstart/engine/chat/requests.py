"""Chats as requests: what `LLM` and `AsyncLLM` share between messages and the engine."""

import threading
from collections.abc import Sequence

from headstart.cache import Namespace
from headstart.engine.chat.conversation import ChatPrompt, ConversationMemory, Turn
from headstart.engine.chat.messages import Message
from headstart.engine.engine import Engine
from headstart.engine.images.chat import ImageChat, ImageSpelling
from headstart.engine.images.reading import Tenant
from headstart.engine.inputs import check_request
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.engine.request import RequestGroup

Conversation = Sequence[Message]
"""A chat so far: dicts with "role" and "content"."""


class ChatRequests:
    """Makes requests of conversations, and remembers what was answered, for the next turn.

    May be used from several threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._images: ImageChat | None = None
        limit = engine.text_limit
        if engine.images is None:
            self._memory = ConversationMemory(engine.tokenizer, limit=limit)
        else:
            spelling = ImageSpelling(engine.tokenizer, engine.images)
            self._memory = ConversationMemory(engine.tokenizer, spelling=spelling, limit=limit)
            self._images = ImageChat(engine.images, self._memory, spelling)

    def prepare(
        self,
        messages: Conversation,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> RequestGroup:
        """A request whose prompt begins with the ids of earlier turns.

        Raises RequestError, and EngineError when the engine is closed.
        """
        self._engine.require_open()
        check_request(params, request_id=request_id, salt=salt, adapter=adapter)
        found = self._engine.adapters.find(adapter) if adapter is not None else None
        namespace = Namespace(found.digest if found is not None else None, salt)
        tenant = Tenant(salt, params.similar_images)
        chat, prompt = self._prompt(messages, namespace, tenant)
        group = self._engine.prepare(
            prompt, params, request_id=request_id, salt=salt, adapter=adapter
        )
        group.chat = chat
        return group

    def _prompt(
        self, messages: Conversation, namespace: Namespace, tenant: Tenant
    ) -> tuple[ChatPrompt, PreparedPrompt]:
        if self._images is not None:
            text, loaded = self._images.read(messages, tenant)
            with self._lock:
                return self._images.prompt(text, loaded, namespace)
        with self._lock:
            text = self._memory.render(messages)
            token_ids = self._memory.encode(text, namespace)
        return ChatPrompt(text, token_ids), PreparedPrompt(token_ids, text)

    def remember(self, group: RequestGroup, output: RequestOutput) -> None:
        """Keep the ids of a finished request's answers, for later turns of the same namespace."""
        assert group.chat is not None
        with self._lock:
            for answer in output.outputs:
                turn = Turn(*group.chat, answer.text, answer.token_ids)
                self._memory.remember(turn, group.namespace)
