"""The engine for asyncio: every request streams its own outputs, all share the same steps.

One thread runs the very engine that `LLM` runs; between its steps it takes what was added or
aborted meanwhile. Outputs cross back to the event loop that asked for them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.engine.adapters import LoRARequest, choose_adapters
from headstart.engine.params import SamplingParams
from headstart.engine.start import start_engine
from headstart.errors import EngineError, HeadstartError, RequestError

# What brings torch with it waits until the model's name is known: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.adapters import Adapter
    from headstart.engine.chat import Conversation
    from headstart.engine.inputs import Prompt
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup

    Deliver = Callable[[RequestOutput | HeadstartError], None]


class AsyncLLM:
    """Streams token by token for many callers at once.

    `async for output in llm.generate(prompt, params)`: each output has all of the text so far.
    Leaving the loop, or cancelling the task, aborts the request and frees its blocks.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; `options` are the fields of `EngineConfig`."""
        self.engine, self._chats = start_engine(model, options)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._closed = False
        self._lock = threading.Lock()  # so that no order comes after the last
        self._thread = threading.Thread(target=self._run, name="headstart-engine", daemon=True)
        self._thread.start()

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
        request = await self._prepare(
            lambda: self.engine.prepare(
                prompt, params, request_id=request_id, salt=cache_salt, adapter=name
            ),
            aside=isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data")),
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
        request = await self._prepare(
            lambda: self._chats.prepare(
                messages, params, request_id=request_id, salt=cache_salt, adapter=name
            ),
            aside=_has_parts(messages),
        )
        async with aclosing(self._stream(request)) as outputs:
            async for output in outputs:
                if output.finished:
                    self._chats.remember(request, output)
                yield output

    async def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """As `LLM.load_adapter`; requests go on meanwhile."""
        return await asyncio.to_thread(self.engine.adapters.load, name, path)

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`; its memory is given back with the next step."""
        self.engine.adapters.unload(name)

    async def _load_chosen(
        self, adapter: str | None, lora_request: LoRARequest | None
    ) -> str | None:
        [choice] = choose_adapters(adapter, lora_request, 1)
        if isinstance(choice, LoRARequest):  # which may read files
            return await asyncio.to_thread(self.engine.adapters.require, choice)
        return choice

    async def _prepare(self, prepare: Callable[[], RequestGroup], *, aside: bool) -> RequestGroup:
        """In a thread `aside`, if there are images to read: the loop's other streams go on."""
        return await asyncio.to_thread(prepare) if aside else prepare()

    async def _stream(self, request: RequestGroup) -> AsyncGenerator[RequestOutput]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | HeadstartError] = asyncio.Queue()

        def deliver(output: RequestOutput | HeadstartError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        def add() -> None:
            try:
                self.engine.submit(request)
            except RequestError as error:
                deliver(error)
            else:
                self._deliver[request.request_id] = deliver

        def leave() -> None:
            if self._deliver.get(request.request_id) is deliver:  # not another's of the same id
                self._abort(request.request_id)

        self._post(add)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, HeadstartError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                with suppress(EngineError):  # closed meanwhile: it is gone already
                    self._post(leave)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish reason "abort"."""
        self._post(lambda: self._send(self.engine.abort(request_id)))

    def close(self) -> None:
        """Stop the thread; requests under way end with an EngineError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._orders.put(None)
        self._thread.join()
        self.engine.close()

    def _post(self, order: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            self._orders.put(order)

    def _abort(self, request_id: str) -> None:
        self._deliver.pop(request_id, None)
        self.engine.abort(request_id)

    def _send(self, output: RequestOutput | None) -> None:
        if output is None:
            return
        deliver = self._deliver.get(output.request_id)
        if output.finished:
            self._deliver.pop(output.request_id, None)
        if deliver is not None:
            try:
                deliver(output)
            except RuntimeError:  # the loop that asked was closed without a word
                self._abort(output.request_id)

    def _run(self) -> None:
        """The thread: orders, a step, its outputs, until closed or the engine breaks."""
        reason = EngineError("the engine was closed")
        try:
            while self._take_orders():
                for result in self.engine.step():
                    if result.error is None:
                        self._send(result.group.output())
                    else:
                        self._fail(result.group.request_id, result.error)
        except Exception as error:  # a fault of the engine itself: nobody may wait for ever
            reason = EngineError(f"the engine broke: {type(error).__name__}: {error}")
            reason.__cause__ = error
            with self._lock:
                self._closed = True
        for request_id in list(self._deliver):
            self.engine.abort(request_id)
            self._fail(request_id, reason)

    def _take_orders(self) -> bool:
        """Carry out what was asked since the last step; wait for it when there is no work."""
        wait = not self.engine.has_unfinished
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = not self.engine.has_unfinished

    def _fail(self, request_id: str, error: HeadstartError) -> None:
        deliver = self._deliver.pop(request_id, None)
        if deliver is not None:
            with suppress(RuntimeError):  # as in _send
                deliver(error)


def _has_parts(messages: Conversation) -> bool:
    """Whether a message is more than a text: only then can it show an image."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping) and not isinstance(message.get("content"), str)
        for message in messages
    )
