"""`LLM` and `LLMEngine`: a model with automatic prefix caching, without asyncio.

An `LLMEngine` computes only in calls of `step`. The methods of an `LLM` run the steps themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.metrics import Metric, join_positions, read_metrics
from headstart.engine.outputs import OutputConverter
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError, engine_error
from headstart.frontend.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from headstart.frontend.chat.messages import TemplateOptions
from headstart.frontend.facade import Facade, Started, check_call
from headstart.frontend.streams import RequestStream, run_all
from headstart.imports import load_module

# These modules import torch. `start_engine` imports them once it has checked the model's name.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.adapter_names import Adapter
    from headstart.engine.driver import LocalDriver
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import Conversation
    from headstart.frontend.frontend import Prompt


class SyncFacade(Facade):
    """The base of `LLM` and `LLMEngine`. Its methods wait for the engine."""

    driver: LocalDriver

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the model's tokenizer; None if it has none."""
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Return the metrics of the cache and of requests, named as in vLLM."""
        return join_positions(self.driver.call(lambda: read_metrics(self.engine)))

    def has_unfinished_requests(self) -> bool:
        """Return True if a request runs or waits."""
        return self.engine.has_unfinished

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request."""
        self._require_adapter(lora_request)
        return True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the cache. While a request runs, do nothing and return False.

        reset_running_requests: preempt and recompute running requests instead. reset_connector:
        also remove the model's blocks from `cache_dir` or `remote_cache`.
        """
        return self._reset_cache(reset_running_requests, reset_connector)

    def _require_adapter(self, choice: str | LoRARequest | None) -> str | None:
        """Return the name of an adapter, which is loaded if necessary."""
        self.frontend.require_open()
        return self.frontend.adapters.require(choice, self.driver.call)

    def _prepare(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        cache_salt: str | None,
        make: Callable[..., RequestGroup] | None = None,
    ) -> list[RequestGroup]:
        """Check and tokenize the requests of a call. Raises RequestError.

        make: a function that prepares one request; by default the frontend's `prepare`.
        """
        self.frontend.require_open()
        make = make or self.frontend.prepare
        options = self._broadcast(len(prompts), sampling_params, adapter, lora_request, priority)
        adapters = [self._require_adapter(choice) for _, choice, _ in options]
        return [
            make(prompt, params, salt=cache_salt, adapter=name, priority=level)
            for prompt, (params, _, level), name in zip(prompts, options, adapters, strict=True)
        ]


class LLM(SyncFacade):
    """A model that answers prompts and caches their K/V for later prompts.

    Thread-safe, also while streams are open: all requests share the steps of one engine. After
    `close` every call raises EngineError.

    Calls have these parameters. `cache_salt`: requests with different salts share no K/V.
    `adapter`: the name of a loaded LoRA adapter. `lora_request`: an adapter in vLLM's form, loaded
    when it is first used. `priority`: requests with lower values run first. `adapter`,
    `lora_request`, `priority` and `sampling_params` apply to all prompts of a call, or are lists
    with a value for each prompt. `TemplateOptions` explains the parameters of chats.

    >>> from headstart.models.demo import demo_model_path
    >>> llm = LLM(demo_model_path(), num_blocks=64)
    >>> [output] = llm.generate("A gentle breeze stirred", SamplingParams(max_tokens=4))
    >>> len(output.outputs[0].token_ids), output.num_cached_tokens
    (4, 0)
    >>> llm.close()
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many prompts; return the outputs in the order of the prompts.

        prompts: texts or token ids. sampling_params: None for the model's defaults. use_tqdm: show
        a progress bar. tokenization_kwargs and mm_processor_kwargs must be None or empty.
        Raises RequestError before any work if a prompt is invalid, EngineError if a step fails.
        """
        check_call(locals())
        prompts = as_list(prompts)
        groups = self._prepare(
            prompts, sampling_params, adapter, lora_request, priority, cache_salt
        )
        with _progress(len(groups) if use_tqdm else 0) as report:
            return run_all(self.driver, groups, report)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, and store the token ids for the next turns.

        messages: dicts with "role" and "content", for the model's chat template. A content is a
        text or a list of OpenAI's parts, with images if the model has vision. In a later turn, the
        text of a reply gets the token ids that were generated, even if tokenizing the text gives
        other ids. Raises the same errors as `generate`.
        """
        check_call(locals())
        make = partial(self.chats.prepare, template=TemplateOptions.pick(locals()))
        chats = _as_conversations(messages)
        groups = self._prepare(
            chats, sampling_params, adapter, lora_request, priority, cache_salt, make
        )
        with _progress(len(groups) if use_tqdm else 0) as report:
            outputs: list[RequestOutput] = run_all(self.driver, groups, report)
        for group, output in zip(groups, outputs, strict=True):
            self.chats.remember(group, output)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` likeliest answers to each prompt, best first.

        Each step is one call of `generate` with all beams as prompts, which hit the cache. use_tqdm
        and concurrency_limit have no effect. Raises the same errors as `generate`.
        """
        self.engine.require_open()
        prompts = as_list(prompts)
        options = self._broadcast(len(prompts), None, adapter, lora_request, priority)
        return search_beams(self.generate, self.frontend, prompts, params, options, cache_salt)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Stream the outputs of one prompt, each with the whole text so far.

        With `output_kind` DELTA each output has only the new text. Closing the stream or deleting
        it cancels the request. The stream's method `abort` ends the request with the text so far.
        """
        [group] = self._prepare(
            [prompt], sampling_params, adapter, lora_request, priority, cache_salt
        )
        return RequestStream(self.driver, group, owner=self)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
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
    ) -> RequestStream:
        """Stream the answer to a conversation, like `stream`."""
        make = partial(self.chats.prepare, template=TemplateOptions.pick(locals()))
        [group] = self._prepare(
            [messages], sampling_params, adapter, lora_request, priority, cache_salt, make
        )
        return RequestStream(self.driver, group, self.chats, owner=self)

    def recall_chat(
        self, messages: Conversation, reply_token_ids: Mapping[int, Sequence[int]]
    ) -> None:
        """Remember a conversation of another process, so the next turn begins with the same ids.

        reply_token_ids: the generated ids by the index of the reply in `messages`. With
        `cache_dir`, the next turn may hit K/V that the other process stored on disk. Raises
        RequestError.
        """
        self.engine.require_open()
        self.chats.recall(messages, reply_token_ids)

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Read a LoRA adapter from a folder in PEFT's format; `adapter=name` selects it.

        K/V are identified by the content of the adapter: two names of the same adapter share K/V,
        and different adapters never do. Raises AdapterError.
        """
        self.engine.require_open()
        return self.frontend.adapters.load(name, path, self.driver.call)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests finish with it. Raises RequestError."""
        self.driver.call(lambda: self.engine.unload_adapter(name))

    @property
    def default_sampling_params(self) -> SamplingParams:
        """A copy of the default sampling parameters."""
        return self.get_default_sampling_params()

    @property
    def llm_engine(self) -> Self:
        """This object, which has the attributes of vLLM's `LLMEngine`."""
        return self

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return 1, the number of processes that run the model."""
        return 1

    def close(self) -> None:
        """Free the K/V memory; open streams end with an EngineError. Idempotent."""
        self.driver.close()


def as_list(prompts: Any) -> list[Any]:
    """Return one or several prompts as a list; a list of integers is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], SupportsIndex):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    several = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not several or (messages and isinstance(messages[0], Mapping)):
        return [cast("Conversation", messages)]
    return list(cast("Sequence[Conversation]", messages))


@contextmanager
def _progress(prompts: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Show a progress bar on stderr for two prompts or more.

    Yield a function that must be called with each output.
    """
    tokens = 0
    with load_module("tqdm").tqdm(total=prompts, desc="prompts", disable=prompts < 2) as bar:

        def report(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(answer.token_ids) for answer in output.outputs)
            bar.set_postfix_str(f"{tokens} tokens generated", refresh=False)
            bar.update()

        yield report


class LLMEngine(SyncFacade):
    """An engine that computes one step for all its requests in each call of `step`.

    The engine's thread runs the step while `step` waits, so Ctrl-C interrupts only the wait. Not
    thread-safe.

    >>> from headstart.models.demo import demo_model_path
    >>> engine = LLMEngine(demo_model_path(), num_blocks=64)
    >>> engine.add_request("a", [5, 6], SamplingParams(max_tokens=3))
    'a'
    >>> steps = 0
    >>> while engine.has_unfinished_requests():
    ...     steps += len(engine.step())
    >>> engine.close()
    >>> steps
    3
    """

    def _attach(self, started: Started) -> None:
        super()._attach(started)
        # Changed only in the engine's thread, except that `step` removes the first of `_pending`.
        self._converters: dict[str, OutputConverter] = {}  # by unfinished request
        # Results of the next calls of `step`: outputs by request, or the error of one request.
        self._pending: deque[dict[str, Any]] = deque()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
    ) -> str:
        """Queue a request and return its id. Raises RequestError.

        arrival_time, trace_headers and session_id have no effect; tokenization_kwargs, prompt_text
        and kv_hints must be None or empty.
        """
        check_call(locals())
        make = partial(self.frontend.prepare, request_id=request_id)
        [group] = self._prepare([prompt], params, adapter, lora_request, priority, cache_salt, make)
        self.driver.call(lambda: self._submit(group))
        return group.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return the outputs of its requests in their `output_kind`.

        If a request fails, the outputs of other requests are returned first. The next call raises
        the EngineError. If Ctrl-C interrupts the call, the next call returns the outputs.
        """
        self.engine.require_open()
        if not self._pending:
            self.driver.call(self._advance)
        results = list(self._pending[0].values())
        del self._pending[0]  # only now, so that Ctrl-C before it loses nothing
        for result in results:
            if isinstance(result, EngineError):
                raise result
        return results

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Cancel requests; unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.driver.call(lambda: self._forget(ids))

    # `_submit`, `_advance` and `_forget` run in the engine's thread.

    def _submit(self, group: RequestGroup) -> None:
        request_id = group.request_id
        if any(request_id in results for results in self._pending):
            raise RequestError(
                f"request {request_id!r} exists: the next call of step returns its output"
            )
        self.engine.submit(group)
        self._converters[request_id] = OutputConverter(group.params.output_kind)

    def _advance(self) -> None:
        """Run a step, and add the outputs of its requests to `_pending`."""
        outputs: dict[str, RequestOutput] = {}
        failures: list[dict[str, EngineError]] = []
        ended: list[str] = []
        for group, error in self.engine.step():
            request_id = group.request_id
            try:
                output = group.output() if error is None else None
            except Exception as cause:  # ends only this request
                self.engine.abort(request_id)
                error = engine_error("an output cannot be made", cause)
            if error is not None:
                failures.append({request_id: error})
                ended.append(request_id)
                continue
            assert output is not None
            if output.finished:
                ended.append(request_id)
            if (new := self._converters[request_id].next(output)) is not None:
                outputs[request_id] = new
        if outputs or not failures:
            self._pending.append(outputs)
        self._pending += failures
        for request_id in ended:  # last, so that `has_unfinished_requests` is never False too early
            del self._converters[request_id]

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
            self._converters.pop(request_id, None)
            for results in self._pending:
                results.pop(request_id, None)
        self._pending = deque(filter(None, self._pending))

    def has_unfinished_requests(self) -> bool:
        """Return True if a call of `step` would return an output."""
        return bool(self._converters or self._pending)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._converters)

    def close(self) -> None:
        """Cancel all requests, and free the K/V memory. Idempotent."""
        self.driver.close()
        self._converters.clear()
        self._pending.clear()
