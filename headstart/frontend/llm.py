"""`LLM` and `LLMEngine`: a model with automatic prefix caching for ordinary Python.

An `LLMEngine` computes as the program calls `step`; an `LLM` as it is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.metrics import Metric, read_metrics
from headstart.engine.outputs import ShownOutputs
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError, engine_error
from headstart.frontend.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from headstart.frontend.chat.messages import TemplateOptions
from headstart.frontend.facade import Facade, Started, check_call
from headstart.frontend.streams import RequestStream, run_all
from headstart.imports import load_module

# These import torch, which waits until the model's name is checked: see `start_engine`.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.adapter_names import Adapter
    from headstart.engine.driver import LocalDriver
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import Conversation
    from headstart.frontend.frontend import Prompt


class SyncFacade(Facade):
    """A facade whose methods wait for the engine."""

    driver: LocalDriver

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the model's tokenizer, None if it came without one."""
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Return counts of the cache and of requests, in vLLM's names."""
        return self.driver.call(lambda: read_metrics(self.engine))

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
        """Forget everything cached; return False, and do nothing, while a request runs.

        reset_running_requests: compute running requests again instead. reset_connector: also forget
        what the model has on disk or another machine.
        """
        return self._reset_cache(reset_running_requests, reset_connector)

    def _require_adapter(self, choice: str | LoRARequest | None) -> str | None:
        """Return the name of an adapter, which is loaded if need be."""
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
        """Check and tokenize the requests of a call; `make` prepares each, as the frontend does.

        Raises RequestError.
        """
        self.frontend.require_open()
        make = make or self.frontend.prepare
        options = self._spread(len(prompts), sampling_params, adapter, lora_request, priority)
        names = [self._require_adapter(choice) for _, choice, _ in options]
        return [
            make(prompt, params, salt=cache_salt, adapter=name, priority=rank)
            for prompt, (params, _, rank), name in zip(prompts, options, names, strict=True)
        ]


class LLM(SyncFacade):
    """A model that answers prompts and caches what it computed for the next one.

    May be called from several threads, and while streams are open: all requests share the steps of
    one engine. After `close` every call raises EngineError.

    Parameters of calls: `cache_salt`: requests of different salts share no K/V. `adapter`: the name
    of a loaded LoRA adapter; `lora_request`: the same in vLLM's form, loaded when it is first used.
    `priority`: requests of lower values run first. Of a call with several prompts, `adapter`,
    `lora_request`, `priority` and `sampling_params` are a value for all or a list. Parameters of
    chats are explained in `TemplateOptions`.

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
        """Answer prompts, texts or token ids, one or many; outputs in the order of the prompts.

        sampling_params: None takes the model's own. use_tqdm: show a progress bar. The last two
        must be empty. Raises RequestError before any work, for all prompts if one is bad;
        EngineError when a step failed.
        """
        check_call(locals())
        prompts = _as_list(prompts)
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
        """Answer a conversation, or several; the next turn hits every token of this one.

        messages: dicts with "role" and "content", by the model's chat template; a content is a
        text or a list of OpenAI's parts, images among them if the model sees. A reply that
        comes back in a later turn is recognized by its text and keeps its token ids, even where
        tokenizing it again could give others. Raises what `generate` does.
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

        Beams are ordinary prompts: each step of all beams is one call of `generate`, and hits the
        cache in all but its last token. use_tqdm and concurrency_limit have no effect. Raises what
        `generate` does.
        """
        self.engine.require_open()
        prompts = _as_list(prompts)
        options = self._spread(len(prompts), None, adapter, lora_request, priority)
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
        """Stream the outputs of one prompt, each with all of the text so far.

        With `output_kind` DELTA each has the new part. Closing the iterator forgets the request;
        its `abort` ends it with the text so far. An iterator without references is closed, too,
        without waiting until the engine has removed the request.
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
        """Stream the answer to a conversation, as `stream` does."""
        make = partial(self.chats.prepare, template=TemplateOptions.pick(locals()))
        [group] = self._prepare(
            [messages], sampling_params, adapter, lora_request, priority, cache_salt, make
        )
        return RequestStream(self.driver, group, self.chats, owner=self)

    def recall_chat(
        self, messages: Conversation, reply_token_ids: Mapping[int, Sequence[int]]
    ) -> None:
        """Take up a conversation of another process: its next turn begins with the same ids.

        reply_token_ids: those that were generated, by the place of the reply in `messages`. With
        `cache_dir` their K/V are found again. Raises RequestError.
        """
        self.engine.require_open()
        self.chats.recall(messages, reply_token_ids)

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Read a LoRA adapter from a folder in PEFT's format; `adapter=name` selects it.

        K/V belong to the adapter's content: the same adapter under two names shares them, another
        one loaded under an old name shares none. Raises AdapterError.
        """
        self.engine.require_open()
        return self.frontend.adapters.load(name, path, self.driver.call)

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; requests that run with it finish. Raises RequestError."""
        self.driver.call(lambda: self.engine.unload_adapter(name))

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The result of `get_default_sampling_params`."""
        return self.get_default_sampling_params()

    @property
    def llm_engine(self) -> Self:
        """This object: it has what vLLM's programs read of an engine."""
        return self

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of processes that compute: one."""
        return 1

    def close(self) -> None:
        """End open streams with an EngineError and free the K/V memory. Idempotent."""
        self.driver.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of integers is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], SupportsIndex):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    several = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not several or (messages and isinstance(messages[0], Mapping)):
        return [cast("Conversation", messages)]  # if it is none, the error will say so
    return list(cast("Sequence[Conversation]", messages))


@contextmanager
def _progress(prompts: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Show a bar on stderr for several prompts; yield a function to call for each output."""
    tokens = 0
    with load_module("tqdm").tqdm(total=prompts, desc="prompts", disable=prompts < 2) as bar:

        def report(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(answer.token_ids) for answer in output.outputs)
            bar.set_postfix_str(f"{tokens} tokens generated", refresh=False)
            bar.update()

        yield report


class LLMEngine(SyncFacade):
    """Takes requests, and answers all of them step by step as `step` is called.

    The engine's thread runs each step while `step` waits, so Ctrl-C interrupts the wait alone. To
    be called from one thread.

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

    def _take(self, started: Started) -> None:
        super()._take(started)
        # Changed in the engine's thread alone, but that `step` takes the first of `_pending`.
        self._shown: dict[str, ShownOutputs] = {}  # of unfinished requests
        # For the next steps: outputs by request, or the error of one request.
        self._pending: deque[dict[str, RequestOutput | EngineError]] = deque()

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
        """Queue a request; returns its id. Raises RequestError, and nothing is queued then.

        arrival_time, trace_headers and session_id have no effect; tokenization_kwargs, prompt_text
        and kv_hints must be empty.
        """
        check_call(locals())
        make = partial(self.frontend.prepare, request_id=request_id)
        [group] = self._prepare([prompt], params, adapter, lora_request, priority, cache_salt, make)
        self.driver.call(lambda: self._submit(group))
        return group.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; return outputs of the requests that it moved, by their `output_kind`.

        Raises the EngineError of a request that failed; the others' outputs come before it. If it
        is interrupted, such as by Ctrl-C, its outputs come with the next step.
        """
        self.engine.require_open()
        if not self._pending:
            self.driver.call(self._advance)
        outputs: list[RequestOutput] = []
        error: EngineError | None = None
        for output in self._pending[0].values():
            if isinstance(output, EngineError):
                error = output
            else:
                outputs.append(output)
        del self._pending[0]  # last and not by a call, after which a signal could lose the outputs
        if error is not None:
            raise error
        return outputs

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Forget requests; an unknown id changes nothing."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        self.driver.call(lambda: self._forget(names))

    # In the engine's thread

    def _submit(self, group: RequestGroup) -> None:
        name = group.request_id
        if any(name in moved for moved in self._pending):
            raise RequestError(f"request {name!r} has an output that the next step returns")
        self.engine.submit(group)
        self._shown[name] = ShownOutputs(group.params.output_kind)

    def _advance(self) -> None:
        """Run a step and make the outputs of the requests that moved."""
        outputs: dict[str, RequestOutput | EngineError] = {}
        failures: list[dict[str, RequestOutput | EngineError]] = []
        ended: list[str] = []
        for group, error in self.engine.step():
            name = group.request_id
            try:
                output = group.output() if error is None else None
            except Exception as cause:  # it ends this request alone
                self.engine.abort(name)
                error = engine_error("an output cannot be made", cause)
            if error is not None:
                failures.append({name: error})
                ended.append(name)
                continue
            assert output is not None
            if output.finished:
                ended.append(name)
            if (new := self._shown[name].next(output)) is not None:
                outputs[name] = new
        if outputs or not failures:
            self._pending.append(outputs)
        self._pending += failures
        for name in ended:  # last, so that `has_unfinished_requests` misses nothing
            del self._shown[name]

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.engine.abort(name)
            self._shown.pop(name, None)
            for moved in self._pending:
                moved.pop(name, None)
        self._pending = deque(filter(None, self._pending))

    def has_unfinished_requests(self) -> bool:
        """Return True if a step would return an output."""
        return bool(self._shown or self._pending)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose answers have not ended."""
        return len(self._shown)

    def close(self) -> None:
        """Forget all requests and free the K/V memory. Idempotent."""
        self.driver.close()
        self._shown.clear()
        self._pending.clear()


# These import torch, which waits until the model's name is checked: see `start_engine`.
