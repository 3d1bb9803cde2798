"""Conversations of every API: the engine's requests for them, and the parsers of their answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headstart.engine.params import SamplingParams
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.server.answers import (
    HERMES,
    THINK_CLOSE,
    THINK_OPEN,
    AnswerParser,
    CallFormat,
    Reading,
    Source,
    choose_format,
    read_reasoning,
    shows_reasoning,
)
from headstart.server.errors import ApiError, as_api_error, naming_form
from headstart.server.messages import read_roles, template_text
from headstart.server.service import Service
from headstart.server.tools import Thought, ToolUse, after_reasoning, force_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.request import RequestGroup

Result = TypeVar("Result")

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_MESSAGE_FIELD = re.compile(r"^(message \d+|messages\[\d+\][\w.\[\]]*)")
_MANY = 1000  # messages; to read one takes 2 us, and to store it 3


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A conversation to answer.

    messages: in OpenAI's form. places: their fields in the body; empty for `messages`. sampling:
    fields of `SamplingParams`; None was not set. retention: seconds for which the whole prompt is
    worth keeping. template: fields of `TemplateOptions`, without the tools.
    """

    model: str | None
    messages: Sequence[Any]
    sampling: Mapping[str, Any]
    salt: str | None = None
    retention: float = 0.0
    priority: int = 0
    tools: ToolUse = field(default_factory=ToolUse)
    template: Mapping[str, Any] = field(default_factory=dict)
    places: Sequence[str] = ()


@dataclass(frozen=True)
class Dialect:
    """The format of the answers to one conversation.

    special: ids of the tokenizer's special tokens. hidden: those of them that answers leave out
    though the detokenizer shows them all; None if it does not.
    """

    tools: ToolUse
    calls: CallFormat = HERMES
    thought: Thought = "none"
    special: Mapping[str, int] = field(default_factory=dict)
    hidden: tuple[str, ...] | None = None

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        most = None if self.tools.parallel else 1
        forced = self.tools.is_forced
        return AnswerParser(self._read, self.hidden or (), max_calls=most, only_calls=forced)

    def _read(self, source: Source) -> Reading[None]:
        if self.thought != "none":
            yield from read_reasoning(source, is_open=self.thought == "begun")
        if self.tools.may_call:
            yield from self.calls.read(source, self.tools.names)
        else:
            yield from source.until((), source.content)


class PreparedChat(NamedTuple):
    """A request of the engine, and the format of its answers."""

    request: RequestGroup
    dialect: Dialect


async def prepare_chat(
    service: Service, call: ChatCall, request_id: str, *, stream: bool, is_kept: bool = True
) -> PreparedChat:
    """Make a checked and tokenized request of a conversation. Raises ApiError, RequestError.

    is_kept: see `Service.prepare_chat`.
    """
    adapter = service.adapter(call.model)
    call = replace(call, template=service.template_options(call.template))
    dialect = await asyncio.to_thread(_read_dialect, service, call)
    sampling = dict(call.sampling)
    form: StructuredOutputsParams | None = sampling.get("structured_outputs")
    if call.tools.is_forced:
        if form is not None:
            raise RequestError("tool_choice and a form of the answer are both set; allowed: one")
        form = force_calls(call.tools, dialect.calls, dialect.special, dialect.thought)
    elif form is not None and dialect.thought == "begun":
        # A form of JSON follows reasoning that the prompt began; others are all of an answer.
        later = after_reasoning(form, dialect.special)
        dialect = replace(dialect, thought="possible") if later is None else dialect
        form = later or form
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
    async with _naming_fields(service, call):
        request = await service.prepare_chat(
            await read_many(len(call.messages), read),
            service.params(sampling, stream=stream),
            request_id,
            adapter=adapter,
            cache_salt=call.salt,
            priority=call.priority,
            is_kept=is_kept,
            **options,
        )
    if call.retention:
        request.retain(len(request.prompt_token_ids), call.retention)
    return PreparedChat(request, dialect)


@asynccontextmanager
async def _naming_fields(service: Service, call: ChatCall) -> AsyncIterator[None]:
    """Have errors name the fields of the body from which the messages and the tools were read.

    All tools are one grammar, whose error names no tool, so each schema is tried alone.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        refusal = as_api_error(error)
        message = _MESSAGE.fullmatch(refusal.param or "")
        if message is not None and call.places:
            name = call.places[int(message[1])] + message[2]
            text = _MESSAGE_FIELD.sub(name, str(refusal), count=1)
            raise ApiError(refusal.status, text, param=name, code=refusal.code) from error
        if not call.tools.is_forced or not str(error).startswith("structured_outputs"):
            raise
        for place, tool in enumerate(call.tools.tools):
            if call.tools.name in (None, tool.name):
                with naming_form(f"tools[{place}]"):
                    form = StructuredOutputsParams(json=tool.schema)
                    await service.llm.prepare([0], SamplingParams(structured_outputs=form))
        raise


def are_many(count: int) -> bool:
    """Return True if reading this many messages takes too long for the event loop."""
    return count > _MANY


async def read_many(count: int, read: Callable[[], Result]) -> Result:
    """Return the result of `read`; it runs in a thread if it reads many messages or parts."""
    return await asyncio.to_thread(read) if are_many(count) else read()


def _read_dialect(service: Service, call: ChatCall) -> Dialect:
    """Return the format of answers. Raises RequestError for tools if the model can call none."""
    tokenizer = service.llm.tokenizer
    if tokenizer is None:  # the engine reports that
        return Dialect(call.tools)
    template = call.template.get("chat_template") or service.llm.chat_template
    text = template_text(tokenizer, template, bool(call.tools.tools))
    calls = choose_format(text)
    if calls is None and call.tools.may_call and not call.tools.is_forced:
        raise RequestError(
            "tools are set, and the model's chat template shows no known way to call one; "
            'allowed: tool_choice "none", or one that requires a call'
        )
    calls = calls or HERMES
    thought = _read_thought(tokenizer, text, call)
    special = {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    needed = set(calls.markers if call.tools.may_call else ())
    if thought != "none":
        needed.update((THINK_OPEN, THINK_CLOSE))
    hidden = None
    if call.sampling.get("skip_special_tokens") is not False and not needed.isdisjoint(special):
        hidden = tuple(special.keys() - needed)
    return Dialect(call.tools, calls, thought, special, hidden)


def _read_thought(tokenizer: PreTrainedTokenizerBase, text: str, call: ChatCall) -> Thought:
    """Return where reasoning begins, by the template and what it writes before an answer."""
    if not shows_reasoning(text):
        return "none"
    if not call.template.get("add_generation_prompt", True):
        return "possible"
    try:
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}],
            tokenize=False,
            chat_template=text,
            add_generation_prompt=True,
            **(call.template.get("chat_template_kwargs") or {}),
        )
    except Exception:  # whatever a template raises; rendering the conversation reports it
        return "possible"
    return "begun" if str(shown).rstrip().endswith(THINK_OPEN) else "possible"
