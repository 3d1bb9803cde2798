"""`POST /v1/chat/completions`: answers to a conversation, whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.frontend.streams import prompt_progress
from headstart.server.answers import Part, join
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat
from headstart.server.errors import ApiError, JsonResponse, naming_form
from headstart.server.openai.answers import Chunks, chat_logprobs, prompt_logprobs
from headstart.server.openai.schema import ChatCompletionRequest
from headstart.server.service import service_of, unless_gone
from headstart.server.sse import EventStream, read_whole

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput
    from headstart.server.answers import AnswerParser

router = APIRouter()
_PROGRESS_SECONDS = 0.4  # between two events of `return_progress`


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    if body.audio is not None or "audio" in (body.modalities or ()):
        raise ApiError(
            400, 'the model answers in text alone; allowed: modalities ["text"]', param="modalities"
        )
    body = body.model_copy(update={"model": body.model or service.name})
    tools = body.read_tools()
    named = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with naming_form("tools" if tools.is_forced else body.form_field, named):
        call = ChatCall(
            model=body.model,
            messages=body.messages,
            sampling=body.read_sampling(),
            salt=service.salt(request, body.salt),
            retention=body.retention,
            priority=body.priority,
            tools=tools,
            template=body.read_template(),
        )
        name = service.new_id("chatcmpl")
        prepared = await prepare_chat(service, call, name, stream=bool(body.stream))
    answers = _Answers(body, prepared)
    if body.stream:
        outputs = service.run(prepared.request)
        return EventStream(answers.stream(answers.with_progress(outputs)))
    output = await unless_gone(request.receive, service.answer(prepared.request))
    return await read_whole([output], lambda: JsonResponse(answers.whole(output)))


class _Answers(Chunks):
    """The answers to one conversation."""

    def __init__(self, body: ChatCompletionRequest, prepared: PreparedChat) -> None:
        name = prepared.request.request_id
        super().__init__(body, name, "chat.completion", "chat.completion.chunk")
        self._body = body
        self._prepared = prepared
        self._parsers: dict[int, AnswerParser] = {}  # of the answers that have begun
        self._first: dict[str, Any] = {}  # fields of the first chunk alone
        if body.return_token_ids:
            self._first = {"prompt_token_ids": list(prepared.request.prompt_token_ids)}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return all answers at once."""
        self.usage.add(output)
        choices = []
        for answer in output.outputs:
            parser = self._prepared.dialect.parser()
            parts = join(parser.feed(answer.text, is_last=True), whole_calls=True)
            choice = {
                "index": answer.index,
                "message": self._message(parts),
                **self._details(answer),
                "finish_reason": self._reason(answer, has_call=parser.has_call),
                "stop_reason": answer.stop_reason,
            }
            choices.append(choice)
        more: dict[str, Any] = dict(self._first)
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return self.head | {"choices": choices, "usage": self.usage.for_completions()} | more

    def _message(self, parts: list[Part]) -> dict[str, Any]:
        texts = {"content": "", "reasoning": ""}
        calls = []
        for part in parts:
            if part.kind == "call":
                function = {"name": part.name, "arguments": part.text}
                name = self._prepared.dialect.calls.new_id("call_")
                calls.append({"id": name, "type": "function", "function": function})
            else:
                texts[part.kind] += part.text
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"]}
        message["refusal"] = None
        if texts["reasoning"]:
            message |= _reasoning(texts["reasoning"])
        if calls:
            is_old = self._body.functions is not None
            message["content"] = texts["content"] or None
            message |= {"function_call": calls[0]["function"]} if is_old else {"tool_calls": calls}
        return message

    def _details(self, answer: CompletionOutput) -> dict[str, Any]:
        """Return the log-probabilities of new tokens, and their ids where they are wanted."""
        as_ids = bool(self._body.return_tokens_as_token_ids)
        logprobs = chat_logprobs(answer, self._body.top_logprobs or 0, as_ids=as_ids)
        ids = {"token_ids": list(answer.token_ids)} if self._body.return_token_ids else {}
        return {"logprobs": logprobs, **ids}

    def _reason(self, answer: CompletionOutput, *, has_call: bool) -> str | None:
        if not has_call or answer.finish_reason != "stop":
            return answer.finish_reason
        return "tool_calls" if self._body.functions is None else "function_call"

    async def with_progress(
        self, outputs: AsyncGenerator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput | bytes]:
        """Yield the outputs; before the first, where it is wanted, how far the prompt is read.

        Progress has llama.cpp's form, without its times.
        """
        if self._body.return_progress:
            first = asyncio.ensure_future(anext(outputs, None))
            try:
                num_shown = 0
                while not (await asyncio.wait({first}, timeout=_PROGRESS_SECONDS))[0]:
                    total, processed, cached = prompt_progress(self._prepared.request)
                    if processed > num_shown:
                        num_shown = processed
                        counts = {"total": total, "cache": cached, "processed": processed}
                        yield self.chunk([], prompt_progress=counts)
                if (output := first.result()) is not None:
                    yield output
            finally:
                if not first.done():
                    first.cancel()
                    await asyncio.wait({first})
        async for output in outputs:
            yield output

    def read(self, output: RequestOutput) -> list[bytes]:
        """Return a chunk for each new part: clients join no two pieces of a call within one."""
        self.usage.add(output)
        chunks = []
        for answer in output.outputs:
            for choice in self._choices(answer):
                chunks.append(self.chunk([choice], **self._first))
                self._first = {}
        return chunks

    def _choices(self, answer: CompletionOutput) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if answer.index not in self._parsers:
            self._parsers[answer.index] = self._prepared.dialect.parser()
            deltas.append({"role": "assistant", "content": ""})
        parser = self._parsers[answer.index]
        is_last = answer.finish_reason is not None
        deltas += map(self._delta, parser.feed(answer.text, is_last=is_last))
        details = self._details(answer)
        if not deltas and (any(details.values()) or is_last):
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if choices:
            choices[0] |= details
        if is_last:
            choices[-1]["finish_reason"] = self._reason(answer, has_call=parser.has_call)
            choices[-1]["stop_reason"] = answer.stop_reason
        return choices

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return _reasoning(part.text)
        function = {"name": part.name} if part.name else {}
        function["arguments"] = part.text
        if self._body.functions is not None:
            return {"function_call": function}
        piece: dict[str, Any] = {"index": part.number, "function": function}
        if part.name:
            piece |= {"id": self._prepared.dialect.calls.new_id("call_"), "type": "function"}
        return {"tool_calls": [piece]}


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under vLLM's former name, which clients read, and its present one."""
    return {"reasoning_content": text, "reasoning": text}
