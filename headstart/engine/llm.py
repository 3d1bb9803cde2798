"""`LLM`: a model with automatic prefix caching, to be called from ordinary Python."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headstart.engine.adapters.request import choose_adapters
from headstart.engine.params import SamplingParams
from headstart.engine.startup.start import start_engine
from headstart.engine.streams import RequestStream
from headstart.errors import RequestError

# What brings torch with it waits until the model's name is known: see `start_engine`.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.adapters.request import Adapter, LoRARequest
    from headstart.engine.chat.requests import Conversation
    from headstart.engine.inputs import Prompt
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup


class LLM:
    """A model that answers prompts and keeps what it computed for the next one.

    May be called from several threads, and while streams are open: all requests share the steps of
    one engine. After `close` every call raises EngineError.

    >>> from headstart.models.demo.llama import demo_model_path
    >>> llm = LLM(demo_model_path(), num_blocks=64)
    >>> [output] = llm.generate("A gentle breeze stirred", SamplingParams(max_tokens=4))
    >>> len(output.outputs[0].token_ids), output.num_cached_tokens
    (4, 0)
    >>> llm.close()
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model by path or hub name; `options` are the fields of `EngineConfig`.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        self.engine, self._chats, self._driver = start_engine(model, options)
        weakref.finalize(self, self._driver.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, texts or token ids, one or many; outputs in the order of the prompts.

        cache_salt: prompts of different salts share no K/V. adapter: the name of a loaded LoRA
        adapter for all prompts, or one (or None) for each; lora_request: the same in vLLM's
        spelling, loaded when first asked for. Raises RequestError before any work, for all
        prompts if one is bad; EngineError when a step failed.
        """
        prompts = _as_list(prompts)
        names = self._load_chosen(adapter, lora_request, len(prompts))
        groups = [
            self.engine.prepare(prompt, params, salt=cache_salt, adapter=name)
            for prompt, params, name in zip(
                prompts, _spread(sampling_params, prompts), names, strict=True
            )
        ]
        return self._run(groups, show_progress=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; the next turn hits every token of this one.

        messages: dicts with "role" and "content", by the model's chat template; a content is a
        text or a list of OpenAI's parts, images among them if the model sees. A reply that
        comes back in a later turn is recognised by its text and keeps its token ids, even where
        tokenising it anew would give others. Salt and adapters as in `generate`.
        """
        conversations = _as_conversations(messages)
        names = self._load_chosen(adapter, lora_request, len(conversations))
        groups = [
            self._chats.prepare(conversation, params, salt=cache_salt, adapter=name)
            for conversation, params, name in zip(
                conversations, _spread(sampling_params, conversations), names, strict=True
            )
        ]
        outputs = self._run(groups, show_progress=use_tqdm)
        for group, output in zip(groups, outputs, strict=True):
            self._chats.remember(group, output)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> RequestStream:
        """Outputs of one prompt token by token, each with all of the text so far.

        Closing the iterator forgets the request; its `abort` ends it with the text so far. An
        iterator that nobody holds any more is closed, too, but nobody waits until the engine has
        let go of the request.
        """
        params = sampling_params or SamplingParams()
        group = self.engine.prepare(prompt, params, salt=cache_salt, adapter=adapter)
        return RequestStream(self._driver, group)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> RequestStream:
        """As `stream`, for a conversation."""
        params = sampling_params or SamplingParams()
        group = self._chats.prepare(messages, params, salt=cache_salt, adapter=adapter)
        return RequestStream(self._driver, group, self._chats)

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

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing done, while a request runs."""
        return self._driver.call(self.engine.reset_prefix_cache)

    def close(self) -> None:
        """End open streams with an EngineError and free the K/V memory. Idempotent."""
        self._driver.close()

    def _load_chosen(
        self,
        adapter: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        count: int,
    ) -> list[str | None]:
        """The adapter's name for each prompt; those of `lora_request` are loaded if need be."""
        self.engine.require_open()
        chosen = choose_adapters(adapter, lora_request, count)
        return [self.engine.adapters.require(choice, self._driver.call) for choice in chosen]

    def _run(self, groups: list[RequestGroup], *, show_progress: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        updates = self._driver.mailbox()
        try:
            for group in groups:
                self._driver.submit(group, updates.receive, every_step=False)
            with _progress(hidden=not show_progress or len(groups) < 2) as progress:
                task = progress.add_task("prompts", total=len(groups), tokens=0)
                while len(outputs) < len(groups):
                    output = updates.get()
                    outputs[output.request_id] = output
                    tokens = sum(len(answer.token_ids) for answer in output.outputs)
                    tokens += progress.tasks[task].fields["tokens"]
                    progress.update(task, advance=1, tokens=tokens)
        finally:
            if len(outputs) < len(groups):
                self._driver.cancel(groups)
        return [outputs[group.request_id] for group in groups]


def _progress(*, hidden: bool) -> Progress:
    """A bar on stderr: prompts answered, tokens generated for them, time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens generated"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=hidden,
    )


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


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Any]
) -> list[SamplingParams]:
    """One for each prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        return [params] * len(prompts)  # as above
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
    return list(params)
