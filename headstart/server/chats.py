"""Conversations of all APIs: their requests to the engine, and the parsers of their answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headstart.engine.params import SamplingParams
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.frontend.chat.messages import TemplateOptions
from headstart.server.answers import (
    HERMES,
    THINK_CLOSE,
    THINK_OPEN,
    AnswerParser,
    CallFormat,
    CharacterSource,
    Reading,
    choose_format,
    read_reasoning,
)
from headstart.server.bodies import CacheFields, Whole, suggest_name
from headstart.server.errors import ApiError, as_api_error, naming
from headstart.server.service import Service
from headstart.server.tools import Reasoning, ToolUse, after_reasoning, force_calls
from headstart.validation import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.request import RequestGroup


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Claude Code begins its system prompt with this line. It contains a digest of the request, so a
# prompt that begins with it can never hit.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

# Fields without effect: cache hints, and a field that clients add when they send back an answer.
_ECHOED = frozenset({"provider_specific_fields", "cache_control", "prompt_cache_breakpoint"})
_MESSAGE_FIELDS = _ECHOED | {
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"),
    *("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "is_error"),
    *("annotations", "parsed", "id"),
}
_CALL = _ECHOED | {"id", "type", "function", "index"}
_FUNCTION = _ECHOED | {"name", "arguments", "parsed_arguments"}
_PART = _ECHOED | {"type", "annotations", "logprobs"}
_IMAGES = frozenset({"image_url", "image", "image_pil"})
_VALUES = {
    "function": _FUNCTION,
    "function_call": _FUNCTION,
    "image_url": frozenset({"url", "detail", "format"}),
    "audio_url": frozenset({"url"}),
    "input_audio": frozenset({"data", "format"}),
}
"""The allowed fields of an object, by the name of the field that contains the object."""


def read_roles(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Any],
    chat_template: str | None = None,
    *,
    with_tools: bool = False,
) -> list[Any]:
    """Return the messages with roles that templates know: OpenAI's `developer` becomes `system`.

    Claude Code's billing line is removed from system messages. chat_template: replaces the
    tokenizer's. Raises ApiError for a field or role that neither OpenAI nor the template names.
    Most templates would write an unknown role into the prompt.
    """
    template = "" if tokenizer is None else template_text(tokenizer, chat_template, with_tools)
    read = (_read_role(index, message, template) for index, message in enumerate(messages))
    return [message for message in read if message is not None]


def _read_role(index: int, message: Any, template: str) -> Any:
    """Return the message for the template; None if it consisted only of the billing line."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        return message  # the engine refuses it
    message = check_fields(message, index, template)
    if role in ("system", "developer"):
        return _without_billing({**message, "role": "system"})
    is_known = role in _ROLES or f"'{role}'" in template or f'"{role}"' in template
    if template and not is_known:
        raise ApiError(
            400,
            f"message {index} has the role {shorten(repr(role))}; allowed: "
            f"{', '.join(_ROLES)}, or one that the model's chat template names",
            param=f"messages[{index}].role",
        )
    return message


def _without_billing(message: dict[str, Any]) -> dict[str, Any] | None:
    content = message.get("content")
    remaining: Any = []
    if isinstance(content, str):
        remaining = _BILLING.sub("", content)
    elif not isinstance(content, list):
        return message
    else:
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or not _BILLING.match(text):
                remaining.append(part)
            elif rest := _BILLING.sub("", text):
                remaining.append({**part, "text": rest})
    return {**message, "content": remaining} if remaining or not content else None


def check_fields(message: Mapping[str, Any], index: int, template: str) -> dict[str, Any]:
    """Return a message without nulls, except a null content. Raises ApiError for unknown fields."""
    path = f"messages[{index}]"
    read = _check(message, _MESSAGE_FIELDS, path, template)
    if "content" in message:
        read["content"] = content = message["content"]
        if isinstance(content, list):
            read["content"] = parts = list(content)
            for i, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if isinstance(kind, str):  # a part's type is also the name of its field
                    names = _PART | ({kind, "uuid"} if kind in _IMAGES else {kind})
                    parts[i] = _check(part, names, f"{path}.content[{i}]", template)
    calls = read.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [
            _check(call, _CALL, f"{path}.tool_calls[{i}]", template)
            if isinstance(call, Mapping)
            else call
            for i, call in enumerate(calls)
        ]
    return read


def _check(fields: Mapping[str, Any], names: Set[str], path: str, template: str) -> dict[str, Any]:
    read = {name: value for name, value in fields.items() if value is not None}
    for name in sorted(read.keys() - names):
        if not re.search(rf"[.'\"]{re.escape(str(name))}\b", template):
            field = shorten(repr(name))
            text = f"{path} has the unknown field {field}{suggest_name(str(name), names)}"
            raise ApiError(400, text, param=shorten(f"{path}.{name}"))
    for name, value in read.items():
        if isinstance(value, Mapping) and name in _VALUES and name in names:
            read[name] = _check(value, _VALUES[name], f"{path}.{name}", template)
    return read


def template_text(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, with_tools: bool
) -> str:
    """Return the chat template; "" if there is none. The engine reports a missing one later."""
    try:
        text: str = tokenizer.get_chat_template(chat_template, [{}] if with_tools else None)
    except ValueError:
        return ""
    return text


def chat_content(parts: Sequence[dict[str, Any]]) -> Any:
    """Return the content of a message with these parts.

    A single text part is replaced by its text, so that the prompt is the same as for a string.
    """
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


Result = TypeVar("Result")

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_MESSAGE_FIELD = re.compile(r"^(message \d+|messages\[\d+\][\w.\[\]]*)")
_MANY = 1000  # messages; more are read and stored in a thread


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A conversation to answer.

    messages: in OpenAI's form. paths: the path of each message in the body; empty if the paths are
    `messages[i]`. sampling: fields of `SamplingParams`; None if not set. names: the API's names of
    these fields, if they differ. retention: seconds for which the whole prompt is retained.
    template: fields of `TemplateOptions`, without the tools.
    """

    model: str | None
    messages: Sequence[Any]
    sampling: Mapping[str, Any]
    salt: str | None = None
    retention: float = 0.0
    priority: int = 0
    tools: ToolUse = field(default_factory=ToolUse)
    template: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class ChatFields(CacheFields):
    """Fields that the chat requests of all APIs have in common. Subclasses add fields."""

    model: str | None = None
    priority: Whole = 0

    @property
    def names(self) -> Mapping[str, str]:
        """This API's names of `SamplingParams` fields, for the fields whose names differ."""
        return {}

    def read_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams`. Raises RequestError."""
        return {"max_tokens": None}

    def read_tools(self) -> ToolUse:
        """Return the client's tools, without hosted tools. Raises RequestError or ApiError."""
        raise NotImplementedError

    def read_template(self) -> dict[str, Any]:
        """Return the template options, without the tools."""
        return {}

    def as_call(
        self, messages: Sequence[Any], salt: str | None, paths: Sequence[str] = ()
    ) -> ChatCall:
        """Return the call for a conversation. Raises RequestError or ApiError."""
        with naming(self.names):
            return ChatCall(
                model=self.model,
                messages=messages,
                paths=paths,
                sampling=self.read_sampling(),
                names=self.names,
                salt=salt,
                retention=self.retention,
                priority=self.priority,
                tools=self.read_tools(),
                template=self.read_template(),
            )


@dataclass(frozen=True)
class Dialect:
    """The format of the answers to one conversation.

    special: ids of the tokenizer's special tokens. hidden: the special tokens that the parser
    removes from the text; None if the detokenizer already leaves out all special tokens.
    """

    tools: ToolUse
    calls: CallFormat = HERMES
    reasoning: Reasoning = "none"
    special: Mapping[str, int] = field(default_factory=dict)
    hidden: tuple[str, ...] | None = None

    def parser(self) -> AnswerParser:
        max_calls = None if self.tools.parallel else 1
        forced = self.tools.is_forced
        return AnswerParser(self._read, self.hidden or (), max_calls=max_calls, only_calls=forced)

    def _read(self, source: CharacterSource) -> Reading[None]:
        if self.reasoning != "none":
            yield from read_reasoning(source, is_open=self.reasoning == "begun")
        if self.tools.may_call:
            yield from self.calls.read(source, self.tools.names)
        else:
            yield from source.read_until((), source.content)


class PreparedChat(NamedTuple):
    """An engine request, and the format of its answers."""

    request: RequestGroup
    dialect: Dialect


async def prepare_chat(
    service: Service, call: ChatCall, request_id: str, *, stream: bool, will_run: bool = True
) -> PreparedChat:
    """Check and tokenize a conversation. Raises ApiError, RequestError.

    will_run: see `Service.prepare`.
    """
    adapter = service.adapter(call.model)
    call = replace(call, template=service.template_options(call.template))
    async with _naming_fields(service, call):
        dialect = await asyncio.to_thread(_read_dialect, service, call)
        sampling = dict(call.sampling)
        form: StructuredOutputsParams | None = sampling.get("structured_outputs")
        if call.tools.is_forced:
            if form is not None:
                raise RequestError(
                    "tool_choice and structured outputs are both set; allowed: one of them"
                )
            form = force_calls(call.tools, dialect.calls, dialect.special, dialect.reasoning)
        elif form is not None and dialect.reasoning == "begun":
            # Reasoning may precede JSON. Any other constraint excludes reasoning.
            with_reasoning = after_reasoning(form, dialect.special)
            if with_reasoning is None:
                dialect = replace(dialect, reasoning="possible")
            form = with_reasoning or form
        sampling["structured_outputs"] = form
        if dialect.hidden is not None:
            sampling["skip_special_tokens"] = False
        options = dict(call.template)
        if call.tools.tools:
            options["tools"] = [tool.for_template() for tool in call.tools.tools]
        read = partial(
            read_roles,
            service.llm.tokenizer,
            call.messages,
            call.template.get("chat_template") or service.llm.chat_template,
            with_tools=bool(call.tools.tools),
        )
        request = await service.prepare(
            await read_many(len(call.messages), read),
            service.params(sampling, stream=stream),
            request_id,
            adapter=adapter,
            cache_salt=call.salt,
            priority=call.priority,
            will_run=will_run,
            template=TemplateOptions(**options),
        )
        if call.retention:
            request.retain(len(request.prompt_token_ids), call.retention)
        return PreparedChat(request, dialect)


@asynccontextmanager
async def _naming_fields(service: Service, call: ChatCall) -> AsyncIterator[None]:
    """Translate errors: replace the engine's names of fields by the names in the request's body.

    All tools are compiled as one grammar, whose error names no tool. After such an error each
    schema is compiled alone to find the wrong tool.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        names = {**call.names}
        refusal = as_api_error(error)
        message = _MESSAGE.fullmatch(refusal.param or "")
        if message is not None and call.paths:
            name = call.paths[int(message[1])] + message[2]
            text = _MESSAGE_FIELD.sub(name, str(refusal), count=1)
            raise ApiError(refusal.status, text, param=name, code=refusal.code) from error
        if call.tools.is_forced and str(error).startswith("structured_outputs"):
            names["structured_outputs"] = "tools"
            for index, tool in enumerate(call.tools.tools):
                if call.tools.name in (None, tool.name):
                    with naming({"structured_outputs": f"tools[{index}]"}):
                        form = StructuredOutputsParams(json=tool.schema)
                        await service.llm.prepare([0], SamplingParams(structured_outputs=form))
        with naming(names):
            raise


def are_many(count: int) -> bool:
    """Return True if `count` messages or parts take too long for the event loop."""
    return count > _MANY


async def read_many(count: int, read: Callable[[], Result]) -> Result:
    """Return the result of `read`, which runs in a thread if `are_many(count)`."""
    return await asyncio.to_thread(read) if are_many(count) else read()


def _read_dialect(service: Service, call: ChatCall) -> Dialect:
    """Return the format of answers. Raises RequestError if the model cannot call tools."""
    tokenizer = service.llm.tokenizer
    if tokenizer is None:  # the engine raises the error
        return Dialect(call.tools)
    template = call.template.get("chat_template") or service.llm.chat_template
    text = template_text(tokenizer, template, bool(call.tools.tools))
    calls = choose_format(text)
    if calls is None and call.tools.may_call and not call.tools.is_forced:
        raise RequestError(
            "tools are set, and the model's chat template has no known tool call format; "
            'allowed: tool_choice "none", or one that requires a call'
        )
    calls = calls or HERMES
    reasoning = _find_reasoning(tokenizer, text, call)
    special = {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    required = set(calls.markers if call.tools.may_call else ())
    if reasoning != "none":
        required.update((THINK_OPEN, THINK_CLOSE))
    hidden = None
    if call.sampling.get("skip_special_tokens") is not False and not required.isdisjoint(special):
        hidden = tuple(special.keys() - required)
    return Dialect(call.tools, calls, reasoning, special, hidden)


def _find_reasoning(tokenizer: PreTrainedTokenizerBase, text: str, call: ChatCall) -> Reasoning:
    """Return the kind of reasoning, judged by the template and the end of a rendered prompt."""
    if THINK_OPEN not in text and THINK_CLOSE not in text:
        return "none"
    if not call.template.get("add_generation_prompt", True):
        return "possible"
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}],
            tokenize=False,
            chat_template=text,
            add_generation_prompt=True,
            **(call.template.get("chat_template_kwargs") or {}),
        )
    except Exception:  # a template may raise anything; rendering the conversation reports it
        return "possible"
    return "begun" if str(rendered).rstrip().endswith(THINK_OPEN) else "possible"
