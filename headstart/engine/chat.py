"""Chats as requests: what `LLM` and `AsyncLLM` share between messages and the engine."""

import threading
from collections.abc import Sequence

from headstart.cache import Namespace
from headstart.engine.conversation import ConversationMemory, Message, Turn
from headstart.engine.engine import Engine
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.request import RequestGroup

Conversation = Sequence[Message]
"""A chat so far: dicts with "role" and "content"."""


class ChatRequests:
    """Makes requests of conversations, and remembers what was answered, for the next turn.

    May be used from several threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory = ConversationMemory(engine.tokenizer)
        self._lock = threading.Lock()

    def prepare(
        self,
        messages: Conversation,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> RequestGroup:
        """A request whose prompt begins with the ids of earlier turns. Raises RequestError."""
        found = self._engine.adapters.find(adapter) if adapter is not None else None
        namespace = Namespace(found.digest if found is not None else None, salt)
        with self._lock:
            text = self._memory.render(messages)
            token_ids = self._memory.encode(text, namespace)
        group = self._engine.prepare(
            token_ids, params, request_id=request_id, salt=salt, adapter=adapter
        )
        group.prompt = text
        return group

    def remember(self, output: RequestOutput, namespace: Namespace) -> None:
        """Keep the ids of a finished request's answers, for later turns of the same namespace."""
        assert output.prompt is not None
        with self._lock:
            for answer in output.outputs:
                turn = Turn(output.prompt, output.prompt_token_ids, answer.text, answer.token_ids)
                self._memory.remember(turn, namespace)
