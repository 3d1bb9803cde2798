"""The engine for asyncio: every request streams its own outputs, all share the same steps.

The driver of `LLM` runs the same engine in a thread; outputs cross back to the event loop that
asked for them. Tokenising and reading images happen in other threads, so the loop never waits.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.engine.adapters.request import LoRARequest, choose_adapters
from headstart.engine.params import SamplingParams
from headstart.engine.startup.start import start_engine

# What brings torch with it waits until the model's name is known: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.adapters.request import Adapter
    from headstart.engine.chat.requests import Conversation
    from headstart.engine.inputs import Prompt
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup


class AsyncLLM:
    """Streams token by token for many callers at once.

    `async for output in llm.generate(prompt, params)`: each output has all of the text so far.
    Leaving the loop, or cancelling the task, aborts the request and frees its blocks. After
    `close` every call raises EngineError.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; `options` are the fields of `EngineConfig`."""
        self.engine, self._chats, self._driver = start_engine(model, options)
        weakref.finalize(self, self._driver.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the outputs of one request. Raises RequestError before any work.

        adapter: the name of a loaded LoRA adapter; lora_request: the same in vLLM's spelling,
        loaded when first asked for.
        """
        params = sampling_params or SamplingParams()
        name = await self._load_chosen(adapter, lora_request)
        request = await asyncio.to_thread(
            lambda: self.engine.prepare(
                prompt, params, request_id=request_id, salt=cache_salt, adapter=name
            )
        )
        async with aclosing(self._stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the answer to a conversation; the next turn hits every token of this one."""
        params = sampling_params or SamplingParams()
        name = await self._load_chosen(adapter, lora_request)
        request = await asyncio.to_thread(
            lambda: self._chats.prepare(
                messages, params, request_id=request_id, salt=cache_salt, adapter=name
            )
        )
        async with aclosing(self._stream(request)) as outputs:
            async for output in outputs:
                if output.finished:
                    await asyncio.to_thread(self._chats.remember, request, output)
                yield output

    async def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """As `LLM.load_adapter`; requests go on meanwhile."""
        self.engine.require_open()
        return await asyncio.to_thread(self.engine.adapters.load, name, path, self._driver.call)

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`; requests go on meanwhile."""
        await asyncio.to_thread(self._driver.call, lambda: self.engine.unload_adapter(name))

    async def _load_chosen(
        self, adapter: str | None, lora_request: LoRARequest | None
    ) -> str | None:
        self.engine.require_open()
        [choice] = choose_adapters(adapter, lora_request, 1)
        if isinstance(choice, LoRARequest):  # which may read files
            return await asyncio.to_thread(self.engine.adapters.require, choice, self._driver.call)
        return choice

    async def _stream(self, request: RequestGroup) -> AsyncGenerator[RequestOutput]:
        updates = self._driver.async_mailbox()
        finished = False
        try:
            self._driver.submit(request, updates.receive)
            while not finished:
                output = await updates.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._driver.cancel([request], wait=False)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish reason "abort"."""
        self._driver.abort(request_id)

    def close(self) -> None:
        """Stop the thread; requests under way end with an EngineError. Idempotent."""
        self._driver.close()
