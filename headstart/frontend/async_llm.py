"""The engine for asyncio: every request streams its outputs, and all share the same steps.

A driver runs the engine in a thread and passes outputs to the caller's event loop. Prompts are
tokenized and images read in other threads, so they do not block the loop. Grammars are compiled in
a few separate threads, because this may take long and must not delay other requests.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.config import count_cores
from headstart.engine.metrics import Metric, read_metrics
from headstart.engine.params import SamplingParams
from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import EngineError
from headstart.frontend.chat.messages import TemplateOptions
from headstart.frontend.facade import Facade, Started, check_call
from headstart.frontend.streams import AsyncRequestStream

# These modules import torch. `start_engine` imports them once it has checked the model's name.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.adapter_names import Adapter
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import Conversation
    from headstart.frontend.frontend import Prompt

Answer = TypeVar("Answer")

_FEW_IDS = 4096  # token ids; checking this many takes half a millisecond


class AsyncLLM(Facade):
    """An engine that streams answers to many callers at once.

    `async for output in llm.generate(prompt, params)`: each output has the whole text so far.
    Leaving the loop or cancelling the task cancels the request and frees its blocks and its id at
    once. After `close` every call raises EngineError. Parameters of calls are as in `LLM`.
    """

    @classmethod
    def from_started(cls, started: Started) -> AsyncLLM:
        """Make an `AsyncLLM` over an engine that has been loaded."""
        llm = cls.__new__(cls)
        llm._attach(started)
        return llm

    def _attach(self, started: Started) -> None:
        super()._attach(started)
        # Compiling a grammar may take long and cannot be stopped, so these threads are not joined.
        count = max(2, count_cores() // 2)
        self._compilers = TenantQueue("headstart-grammars", count + 1, per_tenant=count)
        weakref.finalize(self, self._compilers.abandon, EngineError("the engine is closed"))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        session_id: str | None = None,
        data_parallel_rank: int | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the outputs of one request.

        trace_headers and session_id have no effect. tokenization_kwargs, mm_processor_kwargs,
        prompt_text, data_parallel_rank, kv_hints, reasoning_ended and reasoning_parser_kwargs must
        be None or empty. Raises RequestError, at the latest when the first output is read.
        """
        check_call(locals())
        return self._stream(
            lambda: self.prepare(
                prompt,
                sampling_params,
                request_id,
                lora_request=lora_request,
                adapter=adapter,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the answer to a conversation, and store its token ids for the next turn."""
        template = TemplateOptions.pick(locals())
        return self._stream(
            lambda: self.prepare(
                messages,
                sampling_params,
                request_id,
                template=template,
                lora_request=lora_request,
                adapter=adapter,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    async def prepare(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        template: TemplateOptions | None = None,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> RequestGroup:
        """Check and tokenize a request, and return it for a call of `outputs`.

        template: required if `prompt` is a conversation.

        Most prompts are checked and tokenized in another thread. A short list of token ids is
        checked in the calling thread, because waking another thread takes longer. Raises
        RequestError.
        """
        self.frontend.require_open()
        options = self._broadcast(1, sampling_params, adapter, lora_request, priority)
        [(params, choice, priority)] = options
        make: Callable[..., RequestGroup] = self.frontend.prepare
        if template is not None:
            make = partial(self.chats.prepare, template=template)
        adapter = await self._require_adapter(choice)
        make = partial(
            make,
            prompt,
            params,
            request_id=request_id,
            salt=cache_salt,
            adapter=adapter,
            priority=priority,
        )
        is_short = template is None and isinstance(prompt, list) and len(prompt) <= _FEW_IDS
        if not isinstance(params, SamplingParams):
            return make()
        if params.structured_outputs is not None:
            return await asyncio.wrap_future(self._compilers.submit(make))
        if is_short and params.n == 1 and not params.bad_words:  # bad_words need the tokenizer
            return make()
        return await asyncio.to_thread(make)

    def outputs(self, request: RequestGroup, *, paced: bool = False) -> AsyncRequestStream:
        """Queue a prepared request and stream its outputs; closing the stream cancels the request.

        paced: to save time of the event loop, deliver only the newest output every 5 ms (see
        `AsyncMailbox`).
        """

        async def prepared() -> RequestGroup:
            return request

        return self._stream(prepared, paced=paced)

    def _stream(
        self, prepare: Callable[[], Awaitable[RequestGroup]], *, paced: bool = False
    ) -> AsyncRequestStream:
        return AsyncRequestStream(self.driver, prepare, self.chats, owner=self, paced=paced)

    async def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the engine's thread between two steps, where it may use the cache."""
        return await self.driver.call_async(function)

    def read_metrics(self) -> list[Metric]:
        """Return the engine's metrics. Must run in the engine's thread: see `call`."""
        return read_metrics(self.engine)

    def publish(self, prefix: str | Sequence[int]) -> int:
        """Let later requests of all salts share a prefix's full blocks; return the block count.

        prefix: the beginning of prompts, as token ids or as a string. A string may also be the
        beginning of system messages. Raises RequestError or CacheError.
        """
        return self.chats.publish(prefix)

    async def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Read a LoRA adapter from a folder, like `LLM.load_adapter`."""
        self.frontend.require_open()
        return await asyncio.to_thread(self.frontend.adapters.load, name, path, self.driver.call)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, like `LLM.unload_adapter`."""
        await asyncio.to_thread(self.driver.call, lambda: self.engine.unload_adapter(name))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request."""
        self.frontend.require_open()
        await self._require_adapter(lora_request)
        return True

    async def _require_adapter(self, choice: str | LoRARequest | None) -> str | None:
        """Return the name of an adapter, which is loaded if necessary."""
        if isinstance(choice, LoRARequest):  # loading it may read files
            return await asyncio.to_thread(self.frontend.adapters.require, choice, self.driver.call)
        return choice

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the model's tokenizer; None if it has none."""
        return self.tokenizer

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the cache, like `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self._reset_cache, reset_running_requests, reset_connector)

    async def forget_inputs(self) -> None:
        """Remove the stored turns of chats, and the cached images that no request uses."""
        await asyncio.to_thread(self.chats.clear)
        images = self.frontend.images
        if images is not None:
            await self.call(images.clear)

    async def check_health(self) -> None:
        """Raise EngineError if the engine cannot answer requests any more."""
        self.frontend.require_open()

    @property
    def is_running(self) -> bool:
        """True until the engine is closed or fails."""
        return not self.is_stopped

    @property
    def has_engine(self) -> bool:
        """True if a replica can compute requests; always True for an engine in this process."""
        return True

    @property
    def is_stopped(self) -> bool:
        """True if the engine is closed or failed."""
        try:
            self.frontend.require_open()
        except EngineError:
            return True
        return False

    errored = is_stopped

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish reason "abort"."""
        self.driver.abort(request_id)

    def close(self) -> None:
        """Stop the threads; unfinished requests end with an EngineError. Idempotent.

        A thread that compiles a grammar cannot be stopped: it ends after the compilation.
        """
        self.driver.close()
        self._compilers.abandon(EngineError("the engine is closed"))

    def shutdown(self, timeout: float | None = None) -> None:
        """Close after the current step."""
        self.close()


AsyncLLMEngine = AsyncLLM  # the older of vLLM's two names
