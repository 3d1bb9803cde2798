"""From OpenAI's fields to `SamplingParams` and the options of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.server.errors import ApiError
from headstart.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Function,
    FunctionName,
    FunctionTool,
    ResponseFormat,
    SamplingFields,
    TemplateFields,
    ToolChoice,
)
from headstart.server.tools import Tool, ToolUse, make_tools

__all__ = [
    "as_tools",
    "form_field",
    "read_chat_sampling",
    "read_completion_sampling",
    "read_template",
    "read_tools",
]

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "allowed_token_ids", "logit_bias", "prompt_logprobs", "skip_special_tokens"),
    "include_stop_str_in_output",
)
_TEMPLATE = (
    *("chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


def _common(body: SamplingFields) -> dict[str, Any]:
    params = {name: getattr(body, name) for name in _SAME}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    params["stop"] = [text for text in stop if text] or None  # an empty text stops nothing
    params["structured_outputs"] = _read_form(body)
    return params | body.cache_sampling


def read_completion_sampling(body: CompletionRequest) -> dict[str, Any]:
    """Return the sampling of a completion. Raises RequestError for what is not supported."""
    if body.suffix:
        raise RequestError("suffix is given; allowed: none, models here continue a text")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of is {body.best_of}; allowed: none, or n, which is {body.n or 1}; give n"
        )
    params = _common(body) | {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    if body.max_tokens == 0 and body.echo:
        params["max_tokens"] = 1  # of which nothing is told: see `completions`
    if body.echo and body.logprobs is not None:
        params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return params


def read_chat_sampling(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the sampling of a chat; without a limit an answer may fill the context."""
    most = body.max_completion_tokens
    params = _common(body) | {"max_tokens": body.max_tokens if most is None else most}
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    params["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return params


def as_tools(tools: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    """Return the tools in the form of every API. Raises RequestError."""
    return _as_tools([tool.function for tool in tools or ()])


def _as_tools(functions: Sequence[Function]) -> tuple[Tool, ...]:
    return make_tools(
        functions, lambda function: Tool(function.name, function.description, function.parameters)
    )


def read_tools(body: ChatCompletionRequest) -> ToolUse:
    """Return the tools of a chat, or its functions. Raises RequestError."""
    tools, parallel = as_tools(body.tools), body.parallel_tool_calls is not False
    choice: Literal["none", "auto", "required"] | ToolChoice | FunctionName | None
    choice = body.tool_choice
    if body.functions is not None or body.function_call is not None:
        if body.tools is not None or body.tool_choice is not None:
            raise RequestError("tools and functions are both given; allowed: one of them")
        tools, choice, parallel = _as_tools(body.functions or ()), body.function_call, False
    if isinstance(choice, ToolChoice):
        choice = choice.function
    if isinstance(choice, FunctionName):
        return ToolUse(tools, "required", choice.name, parallel)
    return ToolUse(tools, choice or "auto", None, parallel)


def read_template(body: TemplateFields) -> dict[str, Any]:
    """Return the template options of a body, without the tools."""
    options = {key: value for key in _TEMPLATE if (value := getattr(body, key)) is not None}
    if options.get("continue_final_message"):
        options.setdefault("add_generation_prompt", False)
    named = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    more = {key: value for key, value in named.items() if value is not None}
    if more:
        options["chat_template_kwargs"] = more | options.get("chat_template_kwargs", {})
    return options


def form_field(body: SamplingFields, use: ToolUse | None = None) -> str | None:
    """Return the field that gives an answer's form; None for `structured_outputs`, or none."""
    if use is not None and use.is_forced:
        return "tools"
    return None if body.response_format is None else "response_format"


def _read_form(body: SamplingFields) -> StructuredOutputsParams | None:
    named = _read_format(body.response_format)
    if body.structured_outputs is None:
        return named
    if named is not None:
        raise RequestError("response_format and structured_outputs both give a form; allowed: one")
    return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True))


def _read_format(given: ResponseFormat | None) -> StructuredOutputsParams | None:
    """Return the form without white space between tokens: a model could write it for ever."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    if given.type == "structural_tag":
        tag = {"structures": given.structures, "triggers": given.triggers}
        for name in (name for name, value in tag.items() if value is None):
            raise ApiError(400, f"response_format.{name} is missing", param="response_format")
        return StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=True)
    if given.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", param="response_format")
    schema = given.json_schema.schema_ or {}
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)
