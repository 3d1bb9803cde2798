"""`LLM`: a model with automatic prefix caching, to be called from ordinary Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, Unpack, cast

from headstart.engine.metrics import Metric, read_metrics
from headstart.engine.params import SamplingParams
from headstart.engine.sampling.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from headstart.errors import ConfigError
from headstart.frontend.engine_args import EngineArgs, require_engine_args
from headstart.frontend.start import start_engine
from headstart.frontend.streams import RequestStream, run_all
from headstart.frontend.vllm_api.call_options import (
    CallOptions,
    StreamChatOptions,
    StreamOptions,
    read_call,
    read_template,
    spread_params,
)
from headstart.frontend.vllm_api.calls import BEAM_SEARCH_CALL, CHAT, GENERATE, STREAM, STREAM_CHAT
from headstart.frontend.vllm_api.members import LLM as MEMBERS
from headstart.frontend.vllm_api.signatures import OfOneProcess, check_calls
from headstart.frontend.vllm_api.views import EngineView, ModelView, read_config
from headstart.imports import load_module
from headstart.validation import check_flag

# What brings torch with it waits until the model's name is known: see `start_engine`.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.adapters.request import Adapter, LoRARequest
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.chat.requests import Conversation
    from headstart.frontend.inputs import Prompt


@check_calls(ConfigError, generate=GENERATE, chat=CHAT)
class LLM(OfOneProcess):
    """A model that answers prompts and keeps what it computed for the next one.

    May be called from several threads, and while streams are open: all requests share the steps of
    one engine. After `close` every call raises EngineError.

    >>> from headstart.models.demo import demo_model_path
    >>> llm = LLM(demo_model_path(), num_blocks=64)
    >>> [output] = llm.generate("A gentle breeze stirred", SamplingParams(max_tokens=4))
    >>> len(output.outputs[0].token_ids), output.num_cached_tokens
    (4, 0)
    >>> llm.close()
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model by path or hub name; `options` are the fields of `EngineConfig`, or vLLM's.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        started = start_engine(model, options)
        self.engine, self._chats, self._driver, self._sampling = started
        weakref.finalize(self, self._driver.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """As `LLM(...)`, with vLLM's object of arguments."""
        given = require_engine_args(engine_args)
        return cls(given.model, **given.options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answer prompts, texts or token ids, one or many; outputs in the order of the prompts.

        sampling_params: one for all prompts or one for each; None takes the model's own. options:
        see `CallOptions`. Raises RequestError before any work, for all prompts if one is bad;
        EngineError when a step failed.
        """
        self.engine.require_open()
        prompts = _as_list(prompts)
        call = read_call(GENERATE, options, len(prompts))
        chosen = spread_params(sampling_params, self._sampling, len(prompts))
        groups = [
            self.engine.prepare(prompt, params, salt=call.salt, adapter=name, priority=priority)
            for prompt, params, name, priority in zip(
                prompts, chosen, self._load(call.adapters), call.priorities, strict=True
            )
        ]
        return self._run(groups, show_progress=call.show_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Unpack[StreamChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; the next turn hits every token of this one.

        messages: dicts with "role" and "content", by the model's chat template; a content is a
        text or a list of OpenAI's parts, images among them if the model sees. A reply that
        comes back in a later turn is recognised by its text and keeps its token ids, even where
        tokenising it anew would give others. options: as in `generate`, and `TemplateOptions`.
        """
        self.engine.require_open()
        conversations = _as_conversations(messages)
        call = read_call(CHAT, {**options, "use_tqdm": use_tqdm}, len(conversations))
        template = read_template(CHAT, options)
        chosen = spread_params(sampling_params, self._sampling, len(conversations))
        groups = [
            self._chats.prepare(
                conversation, params, template, salt=call.salt, adapter=name, priority=priority
            )
            for conversation, params, name, priority in zip(
                conversations, chosen, self._load(call.adapters), call.priorities, strict=True
            )
        ]
        outputs = self._run(groups, show_progress=call.show_progress)
        for group, output in zip(groups, outputs, strict=True):
            self._chats.remember(group, output)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        **options: Unpack[CallOptions],
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest answers to each prompt, best first.

        Beams are ordinary prompts: each step of all beams is one call of `generate`, and hits the
        cache in all but its last token. Raises what `generate` does.
        """
        self.engine.require_open()
        prompts = _as_list(prompts)
        call = read_call(BEAM_SEARCH_CALL, options, len(prompts))
        return search_beams(self.generate, self.engine, prompts, params, call)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> RequestStream:
        """Outputs of one prompt token by token, each with all of the text so far.

        With `output_kind` DELTA each has what is new. Closing the iterator forgets the request; its
        `abort` ends it with the text so far. An iterator that nobody holds any more is closed, too,
        but nobody waits until the engine has let go of the request.
        """
        call = read_call(STREAM, options, 1)
        [name] = self._load(call.adapters)
        [params] = spread_params(sampling_params, self._sampling, 1)
        group = self.engine.prepare(
            prompt, params, salt=call.salt, adapter=name, priority=call.priorities[0]
        )
        return RequestStream(self._driver, group, owner=self)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[StreamChatOptions],
    ) -> RequestStream:
        """As `stream`, for a conversation."""
        call = read_call(STREAM_CHAT, options, 1)
        template = read_template(STREAM_CHAT, options)
        [name] = self._load(call.adapters)
        [params] = spread_params(sampling_params, self._sampling, 1)
        [priority] = call.priorities
        group = self._chats.prepare(
            messages, params, template, salt=call.salt, adapter=name, priority=priority
        )
        return RequestStream(self._driver, group, self._chats, owner=self)

    def recall_chat(
        self, messages: Conversation, reply_token_ids: Mapping[int, Sequence[int]]
    ) -> None:
        """Take up a conversation of another process: its next turn begins with the same ids.

        reply_token_ids: those that were generated, by the place of the reply in `messages`. With
        `cache_dir` their K/V are found again. Raises RequestError.
        """
        self.engine.require_open()
        self._chats.recall(messages, reply_token_ids)

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Read a LoRA adapter from a folder in PEFT's format; `adapter=name` asks for it.

        K/V belong to the adapter's content: the same adapter under two names shares them, another
        one loaded under an old name shares none. Raises AdapterError.
        """
        self.engine.require_open()
        return self.engine.adapters.load(name, path, self._driver.call)

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; requests that run with it finish. Raises RequestError."""
        self._driver.call(lambda: self.engine.unload_adapter(name))

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, None if it came without one."""
        self.engine.require_open()
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling of calls that bring none: the model's own, see `generation_config`."""
        return self._sampling.clone()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """As `get_default_sampling_params`."""
        return self.get_default_sampling_params()

    @property
    def chat_template(self) -> str | None:
        """The template of chats that bring none, None for the tokenizer's."""
        return self._chats.chat_template

    def get_metrics(self) -> list[Metric]:
        """Counts of the cache and of requests, in vLLM's names."""
        return self._driver.call(lambda: read_metrics(self.engine))

    @property
    def llm_engine(self) -> EngineView:
        """What vLLM's programs read of the engine; `engine` is the engine itself."""
        return EngineView(self.engine, self._driver)

    @property
    def model_config(self) -> ModelView:
        """The model's configuration, in vLLM's names."""
        return read_config(self.engine).model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """Processes that compute: this one."""
        return 1

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget everything cached; False, and nothing done, while a request runs.

        reset_running_requests: those that run are computed anew, instead. reset_connector: forget
        what the model has on disk or another machine, too.
        """
        again = check_flag("reset_running_requests", reset_running_requests)
        tiers = check_flag("reset_connector", reset_connector)
        return self._driver.call(
            lambda: self.engine.reset_prefix_cache(reset_running_requests=again, reset_tiers=tiers)
        )

    def close(self) -> None:
        """End open streams with an EngineError and free the K/V memory. Idempotent."""
        self._driver.close()

    def __getattr__(self, name: str) -> Any:
        raise MEMBERS.missing(name, dir(type(self)))

    def _load(self, adapters: Sequence[str | LoRARequest | None]) -> list[str | None]:
        """The adapters' names; those of a LoRARequest are loaded if need be."""
        self.engine.require_open()
        return [self.engine.adapters.require(choice, self._driver.call) for choice in adapters]

    def _run(self, groups: list[RequestGroup], *, show_progress: bool) -> list[RequestOutput]:
        with _progress(len(groups) if show_progress else 0) as tell:
            return run_all(self._driver, groups, tell)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of integers is one."""
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


def _progress(prompts: int) -> AbstractContextManager[Callable[[RequestOutput], None] | None]:
    """What to call for each prompt that is answered; None if nobody is to see it."""
    if prompts < 2:
        return nullcontext()
    shown: AbstractContextManager[Any] = load_module("headstart.frontend.progress").show_progress(
        prompts
    )
    return shown
