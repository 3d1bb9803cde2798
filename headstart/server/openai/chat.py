"""`POST /v1/chat/completions`: answers to a conversation, whole or as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.frontend.streams import PromptProgress, prompt_progress
from headstart.server.answers.parser import Call, CallBegin, Content, Part, Reasoning, gather
from headstart.server.bodies import read_retention, read_salt
from headstart.server.chats import ChatCall, PreparedChat, TokenCount, prepare_chat
from headstart.server.errors import ApiError, as_api_error, body_of, telling_form_as
from headstart.server.openai.reading import (
    form_field,
    read_chat_sampling,
    read_template,
    read_tools,
)
from headstart.server.openai.schema import ChatCompletionRequest
from headstart.server.openai.usage import chat_logprobs, prompt_logprobs, usage_of
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, Frames, frame, read_whole, tell_event, tell_whole

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput
    from headstart.server.answers.parser import AnswerParser

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    if body.audio is not None or "audio" in (body.modalities or ()):
        raise ApiError(
            400, 'the model answers in text alone; allowed: modalities ["text"]', param="modalities"
        )
    body = body.model_copy(update={"model": body.model or service.name})
    tools = read_tools(body)
    named = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with telling_form_as(form_field(body, tools), named):
        call = ChatCall(
            model=body.model,
            messages=body.messages,
            sampling=read_chat_sampling(body),
            salt=service.salt(request, read_salt(body)),
            retention=read_retention(body),
            priority=body.priority,
            tools=tools,
            template=read_template(body),
        )
        name = service.new_id("chatcmpl")
        prepared = await prepare_chat(service, call, name, stream=bool(body.stream))
    if body.stream:
        return EventStream(_Chunks(body, prepared).events(service))
    output = await unless_gone(request.receive, service.answer(prepared.request))
    return await tell_whole([output], lambda: _whole(body, prepared, output))


def _head(body: ChatCompletionRequest, name: str, kind: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": body.model}


def _whole(
    body: ChatCompletionRequest, prepared: PreparedChat, output: RequestOutput
) -> dict[str, Any]:
    count = TokenCount()
    count.add(output)
    choices = []
    for answer in output.outputs:
        parser = prepared.parser()
        parts = [*parser.feed(answer.text), *parser.finish()]
        choice = {
            "index": answer.index,
            "message": _message(body, prepared, parts),
            "logprobs": _logprobs(body, answer),
            "finish_reason": _reason(body, answer.finish_reason, calls=_has_call(parts)),
            "stop_reason": answer.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(answer.token_ids)
        choices.append(choice)
    told = _head(body, output.request_id, "chat.completion", int(time.time()))
    told |= {"choices": choices, "usage": usage_of([count])}
    if body.return_token_ids:
        told["prompt_token_ids"] = list(output.prompt_token_ids)
    if body.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(output, body.prompt_logprobs)
    return told


def _logprobs(body: ChatCompletionRequest, answer: CompletionOutput) -> dict[str, Any] | None:
    as_ids = bool(body.return_tokens_as_token_ids)
    return chat_logprobs(answer, body.top_logprobs or 0, as_ids=as_ids)


def _message(
    body: ChatCompletionRequest, prepared: PreparedChat, parts: Iterable[Part]
) -> dict[str, Any]:
    gathered = gather(parts)
    content = "".join(part.text for part in gathered if isinstance(part, Content))
    calls = [
        {
            "id": prepared.calls.new_id("call_"),
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }
        for part in gathered
        if isinstance(part, Call)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    reasoning = "".join(part.text for part in gathered if isinstance(part, Reasoning))
    if reasoning:
        message |= _reasoning(reasoning)
    if calls and body.functions is not None:
        message |= {"content": content or None, "function_call": calls[0]["function"]}
    elif calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under vLLM's former name, which clients read, and its present one."""
    return {"reasoning_content": text, "reasoning": text}


def _has_call(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, CallBegin) for part in parts)


def _reason(body: ChatCompletionRequest, reason: str | None, *, calls: bool) -> str | None:
    if not calls or reason != "stop":
        return reason
    return "tool_calls" if body.functions is None else "function_call"


_PROGRESS_SECONDS = 0.4  # between two events of `return_progress`


def _progress_chunk(progress: PromptProgress) -> dict[str, Any]:
    """Return llama.cpp's `prompt_progress`, without its times."""
    total, processed, cached = progress
    counts = {"total": total, "cache": cached, "processed": processed}
    return {"choices": [], "prompt_progress": counts}


class _Chunks:
    """The events of one streamed answer."""

    def __init__(self, body: ChatCompletionRequest, prepared: PreparedChat) -> None:
        self._body = body
        self._prepared = prepared
        name = prepared.request.request_id
        self._frames = Frames(_head(body, name, "chat.completion.chunk", int(time.time())))
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_usage_so_far = options is not None and bool(options.continuous_usage_stats)
        self._first: dict[str, Any] = {}  # what the first chunk tells beside its choice
        if body.return_token_ids:
            self._first = {"prompt_token_ids": list(prepared.request.prompt_token_ids)}
        self._parsers: dict[int, AnswerParser] = {}  # of the answers that have begun
        self._calling: set[int] = set()  # answers with a call

    async def events(self, service: Service) -> AsyncGenerator[bytes]:
        """Yield the events, up to `[DONE]` or an error."""
        count = TokenCount()
        try:
            async with (
                aclosing(service.run(self._prepared.request)) as outputs,
                aclosing(self._with_progress(outputs)) as items,
            ):
                async for output in items:
                    if isinstance(output, PromptProgress):
                        yield self._frames.frame(_progress_chunk(output))
                        continue
                    count.add(output)
                    usage = usage_of([count]) if self._wants_usage_so_far else None
                    for answer in output.outputs:
                        for choice in await read_whole([output], partial(self._choices, answer)):
                            chunk = partial(self._chunk, [choice], usage)
                            yield await tell_event(output, self._frames, chunk)
        except Exception as error:
            yield frame(body_of(as_api_error(error)))
            return
        last = b""
        if self._wants_usage:
            last = self._frames.frame(self._chunk([], usage_of([count])))
        yield last + frame("[DONE]")

    async def _with_progress(
        self, outputs: AsyncGenerator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput | PromptProgress]:
        """Yield the outputs; before the first, if asked for, how far the prompt is read."""
        if self._body.return_progress:
            first = asyncio.ensure_future(anext(outputs, None))
            try:
                num_shown = 0
                while not (await asyncio.wait({first}, timeout=_PROGRESS_SECONDS))[0]:
                    progress = prompt_progress(self._prepared.request)
                    if progress.read > num_shown:
                        num_shown = progress.read
                        yield progress
                if (output := first.result()) is not None:
                    yield output
            finally:
                if not first.done():
                    first.cancel()
                    await asyncio.wait({first})
        async for output in outputs:
            yield output

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return the fields of an event after the head."""
        told = {"choices": choices, **self._first}
        self._first = {}
        return told | {"usage": usage} if self._wants_usage else told

    def _choices(self, answer: CompletionOutput) -> list[dict[str, Any]]:
        """Return a choice for each new part; clients merge no two pieces of a call within one."""
        deltas: list[dict[str, Any]] = []
        if answer.index not in self._parsers:
            self._parsers[answer.index] = self._prepared.parser()
            deltas.append({"role": "assistant", "content": ""})
        parser = self._parsers[answer.index]
        parts = parser.feed(answer.text)
        if answer.finish_reason is not None:
            parts += parser.finish()
        if _has_call(parts):
            self._calling.add(answer.index)
        deltas += map(self._delta, parts)
        logprobs = _logprobs(self._body, answer)
        told: dict[str, Any] = {"logprobs": logprobs}
        if self._body.return_token_ids:
            told["token_ids"] = list(answer.token_ids)
        if not deltas and (any(told.values()) or answer.finish_reason is not None):
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if choices:
            is_calling = answer.index in self._calling
            choices[0] |= told
            choices[-1]["finish_reason"] = _reason(
                self._body, answer.finish_reason, calls=is_calling
            )
            if answer.finish_reason is not None:
                choices[-1]["stop_reason"] = answer.stop_reason
        return choices

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return _reasoning(part.text)
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
        else:
            function = {"arguments": part.text}
        if self._body.functions is not None:
            return {"function_call": function}
        piece: dict[str, Any] = {"index": part.index, "function": function}
        if isinstance(part, CallBegin):
            piece |= {"id": self._prepared.calls.new_id("call_"), "type": "function"}
        return {"tool_calls": [piece]}
