"""`LLM`: a model with automatic prefix caching, to be called from ordinary Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.params import SamplingParams
from headstart.frontend.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from headstart.frontend.chat.messages import TemplateOptions
from headstart.frontend.facade import SyncFacade, check_call
from headstart.frontend.streams import RequestStream, run_all
from headstart.imports import load_module

# These import torch, which waits until the model's name is checked: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.adapter_names import Adapter
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.chat.requests import Conversation
    from headstart.frontend.inputs import Prompt


class LLM(SyncFacade):
    """A model that answers prompts and caches what it computed for the next one.

    May be called from several threads, and while streams are open: all requests share the steps of
    one engine. After `close` every call raises EngineError.

    Parameters of calls: `cache_salt`: requests of different salts share no K/V. `adapter`: the name
    of a loaded LoRA adapter; `lora_request`: the same in vLLM's form, loaded when it is first used.
    `priority`: requests of lower values run first. Of a call with several prompts, `adapter`,
    `lora_request`, `priority` and `sampling_params` are one for all or a list. Those of chats are
    explained in `TemplateOptions`.

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
            return run_all(self._driver, groups, report)

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
        comes back in a later turn is recognised by its text and keeps its token ids, even where
        tokenizing it anew would give others. Raises what `generate` does.
        """
        check_call(locals())
        make = partial(self._chats.prepare, template=TemplateOptions.pick(locals()))
        chats = _as_conversations(messages)
        groups = self._prepare(
            chats, sampling_params, adapter, lora_request, priority, cache_salt, make
        )
        with _progress(len(groups) if use_tqdm else 0) as report:
            outputs: list[RequestOutput] = run_all(self._driver, groups, report)
        for group, output in zip(groups, outputs, strict=True):
            self._chats.remember(group, output)
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
        return RequestStream(self._driver, group, owner=self)

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
        make = partial(self._chats.prepare, template=TemplateOptions.pick(locals()))
        [group] = self._prepare(
            [messages], sampling_params, adapter, lora_request, priority, cache_salt, make
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
        return self.frontend.adapters.load(name, path, self._driver.call)

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; requests that run with it finish. Raises RequestError."""
        self._driver.call(lambda: self.engine.unload_adapter(name))

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
        self._driver.close()


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
def _progress(prompts: int) -> Iterator[Callable[[RequestOutput], None] | None]:
    """A bar on stderr for several prompts; yields a function to call for each answered prompt."""
    if prompts < 2:
        yield None
        return
    rich = load_module("rich.progress")  # which takes 60 ms
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[tokens]} tokens generated"),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    console = load_module("rich.console").Console(stderr=True)
    with rich.Progress(*columns, console=console) as progress:
        task = progress.add_task("prompts", total=prompts, tokens=0)

        def report(output: RequestOutput) -> None:
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            tokens += progress.tasks[task].fields["tokens"]
            progress.update(task, advance=1, tokens=tokens)

        yield report
