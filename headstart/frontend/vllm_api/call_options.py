"""The keyword arguments of `LLM` and `AsyncLLM`: checked, and spread over the prompts of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypedDict

from headstart.engine.adapters.request import LoRARequest, choose_adapters
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError
from headstart.frontend.chat.template import TemplateOptions
from headstart.frontend.vllm_api.rows import Names
from headstart.validation import describe

__all__ = [
    "Call",
    "CallOptions",
    "ChatOptions",
    "StreamChatOptions",
    "StreamOptions",
    "read_call",
    "read_template",
    "spread_params",
]


class _EveryOption(TypedDict, total=False):
    cache_salt: str | None
    priority: int | Sequence[int] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    adapter: str | Sequence[str | None] | None


class StreamOptions(_EveryOption, total=False):
    """cache_salt: prompts of different salts share no K/V. adapter: the name of a loaded LoRA
    adapter; lora_request: the same in vLLM's spelling, loaded when first asked for. priority:
    requests of lower values run first. For several prompts one for all, or a list."""


class CallOptions(StreamOptions, total=False):
    """As `StreamOptions`; use_tqdm: whether a bar shows how far it is."""

    use_tqdm: bool | Callable[..., Any]


class StreamChatOptions(StreamOptions, total=False):
    """As `StreamOptions`, and those of `TemplateOptions`."""

    chat_template: str | None
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(StreamChatOptions, total=False):
    """As `CallOptions`, and those of `TemplateOptions`."""

    use_tqdm: bool | Callable[..., Any]


_TEMPLATE = [field.name for field in fields(TemplateOptions)]


class Call(NamedTuple):
    """What comes beside the prompts: one adapter and one priority for each of them."""

    salt: str | None
    adapters: list[str | LoRARequest | None]
    priorities: list[int]
    show_progress: bool


def read_call(names: Names, given: Mapping[str, Any], count: int) -> Call:
    """The options of a call with `count` prompts. Raises RequestError."""
    options = names.read(given)
    use_tqdm = options.get("use_tqdm", True)
    if not (isinstance(use_tqdm, bool) or callable(use_tqdm)):
        raise RequestError(f"use_tqdm is {describe(use_tqdm)}; allowed: True or False")
    return Call(
        options.get("cache_salt"),
        choose_adapters(options.get("adapter"), options.get("lora_request"), count),
        _spread_priorities(options.get("priority"), count),
        bool(use_tqdm),
    )


def read_template(names: Names, given: Mapping[str, Any]) -> TemplateOptions:
    """The options of a chat's template. Raises RequestError."""
    options = names.read(given)
    return TemplateOptions(**{name: options[name] for name in _TEMPLATE if name in options})


def _spread_priorities(given: object, count: int) -> list[Any]:
    """One for each prompt; `Engine.prepare` checks what it is."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [0 if given is None else given] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} priorities for {count} prompts")
    return list(given)


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    count: int,
) -> list[SamplingParams]:
    """One for each prompt; `default` where none are given. Raises RequestError."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        return [params] * count  # if it is none, the error will say so
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)
