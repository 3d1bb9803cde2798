"""`POST /v1/chat/completions` and `/v1/completions`, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.frontend.streams import prompt_progress
from headstart.server.answers import Part, join
from headstart.server.bodies import encode
from headstart.server.chats import PreparedChat, prepare_chat
from headstart.server.errors import ApiError, JsonResponse, body_of, naming
from headstart.server.openai.schema import ChatCompletionRequest, CompletionRequest, SamplingFields
from headstart.server.service import cancel_on_disconnect, service_of
from headstart.server.sse import AnswerEvents, EventStream, Usage, frame, read_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
    from headstart.frontend.frontend import Prompt
    from headstart.server.answers import AnswerParser


class Chunks(AnswerEvents):
    """The chunks of the answers to one call.

    If the request wants the usage, the last chunk has it. With `continuous_usage_stats`, all chunks
    have it.
    """

    def __init__(self, body: SamplingFields, answer_id: str, kind: str, chunk_kind: str) -> None:
        """Encode the fields that all chunks share.

        kind: the field `object` of a whole answer. chunk_kind: the field `object` of a chunk.
        """
        created = int(time.time())
        self.head = {"id": answer_id, "object": kind, "created": created, "model": body.model}
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_usage_so_far = options is not None and bool(options.continuous_usage_stats)
        self._begin = encode(self.head | {"object": chunk_kind})[:-1]
        self.usage = Usage()

    def chunk(self, choices: list[Any], **fields: Any) -> bytes:
        """Return an event with choices and further fields; `choices` may be empty."""
        if self._wants_usage and choices:
            fields["usage"] = self.usage.for_completions() if self._wants_usage_so_far else None
        return b"data: %s,%s\n\n" % (self._begin, encode({"choices": choices, **fields})[1:])

    async def end(self) -> bytes:
        last = self.chunk([], usage=self.usage.for_completions()) if self._wants_usage else b""
        return last + frame("[DONE]")

    async def fail(self, error: ApiError) -> bytes:
        return frame(body_of(error))


def chat_logprobs(
    answer: CompletionOutput, num_top: int, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens in the format of chat completions.

    num_top: how many of the likeliest tokens to add to each token. as_ids: show tokens as
    `token_id:5`, since a token alone may have no valid text.
    """
    if answer.logprobs is None:
        return None

    def show(token_id: int, entry: Logprob) -> dict[str, Any]:
        text = _text(token_id, entry, as_ids)
        raw = list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": _bounded(entry), "bytes": raw}

    content = [
        show(*next(iter(entry.items())))
        | {"top_logprobs": [show(*likely) for likely in _likeliest(entry, num_top)]}
        for entry in answer.logprobs
    ]
    return {"content": content}


def _likeliest(entry: Logprobs, num_top: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]


def _text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _bounded(entry: Logprob) -> float:
    return max(entry.logprob, -9999.0)


def completion_logprobs(
    entries: Iterable[Logprobs | None],
    num_top: int,
    offset: int = 0,
    *,
    as_ids: bool = False,
    first: tuple[int, str] = (0, ""),
) -> tuple[dict[str, Any], int]:
    """Return log-probabilities in the format of completions, and the end of the last token's text.

    num_top: how many of the likeliest tokens to add to each token. offset: the position of the
    first token in the choice's text; may be negative, see `_prompt_start`. first: the id and text
    of a prompt's first token, whose entry is None.
    """
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for entry in entries:
        (token_id, text), logprob, top = first, None, None
        if entry:
            token_id, token_logprob = next(iter(entry.items()))
            text, logprob = token_logprob.decoded_token or "", _bounded(token_logprob)
            likeliest = _likeliest(entry, num_top)
            top = {_text(*likely, as_ids): _bounded(likely[1]) for likely in likeliest}
        token = f"token_id:{token_id}" if as_ids else text
        for name, value in zip(names, (token, logprob, top, max(0, offset)), strict=True):
            columns[name].append(value)
        offset += len(text)
    return columns, offset


def prompt_logprobs(output: RequestOutput, num_top: int) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt's tokens in vLLM's form, if there are any.

    The first token's entry is None. num_top: how many of the likeliest tokens to add to each token.
    """
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _bounded(logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for index, (token_id, logprob) in enumerate(entry.items())
            if index == 0 or logprob.rank <= num_top
        }
        for entry in output.prompt_logprobs
    ]


router = APIRouter()
_PROGRESS_SECONDS = 0.4  # between two events with `prompt_progress`


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    if body.audio is not None or "audio" in (body.modalities or ()):
        raise ApiError(
            400, 'the model returns only text; allowed: modalities ["text"]', param="modalities"
        )
    body = body.model_copy(update={"model": body.model or service.name})
    call = body.as_call(body.messages, service.salt(request, body.salt))
    answer_id = service.new_id("chatcmpl")
    prepared = await prepare_chat(service, call, answer_id, stream=bool(body.stream))
    answers = _ChatAnswers(body, prepared)
    if body.stream:
        outputs = service.run(prepared.request)
        return EventStream(answers.stream(answers.with_progress(outputs)))
    output = await cancel_on_disconnect(request.receive, service.answer(prepared.request))
    return await read_whole([output], lambda: JsonResponse(answers.whole(output)))


class _ChatAnswers(Chunks):
    """The answers to one conversation."""

    def __init__(self, body: ChatCompletionRequest, prepared: PreparedChat) -> None:
        answer_id = prepared.request.request_id
        super().__init__(body, answer_id, "chat.completion", "chat.completion.chunk")
        self._body = body
        self._prepared = prepared
        self._parsers: dict[int, AnswerParser] = {}  # by the answer's index
        self._first: dict[str, Any] = {}  # fields of the first chunk only
        if body.return_token_ids:
            self._first = {"prompt_token_ids": list(prepared.request.prompt_token_ids)}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
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
        fields: dict[str, Any] = dict(self._first)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return self.head | {"choices": choices, "usage": self.usage.for_completions()} | fields

    def _message(self, parts: list[Part]) -> dict[str, Any]:
        texts = {"content": "", "reasoning": ""}
        calls = []
        for part in parts:
            if part.kind == "call":
                function = {"name": part.name, "arguments": part.text}
                call_id = self._prepared.dialect.calls.new_id("call_")
                calls.append({"id": call_id, "type": "function", "function": function})
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
        """Return the log-probabilities of new tokens and their ids, if the request wants them."""
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
        """Yield the outputs. If requested, first yield events with the progress of the prompt.

        These events have the format of llama.cpp, but without the field `time_ms`.
        """
        if self._body.return_progress:
            first = asyncio.ensure_future(anext(outputs, None))
            try:
                num_reported = 0
                while not (await asyncio.wait({first}, timeout=_PROGRESS_SECONDS))[0]:
                    total, processed, cached = prompt_progress(self._prepared.request)
                    if processed > num_reported:
                        num_reported = processed
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
        """Return a chunk for each part: some clients read only the first tool call of a chunk."""
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
        delta: dict[str, Any] = {"index": part.number, "function": function}
        if part.name:
            delta |= {"id": self._prepared.dialect.calls.new_id("call_"), "type": "function"}
        return {"tool_calls": [delta]}


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under vLLM's former and current names; clients read one of the two."""
    return {"reasoning_content": text, "reasoning": text}


_MAX_PROMPTS = 256


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    body = body.model_copy(update={"model": body.model or service.name})
    adapter = service.adapter(body.model)
    salt = service.salt(request, body.salt)
    answer_id = service.new_id("cmpl")
    with naming(body.names):
        params = service.params(body.read_sampling(), stream=bool(body.stream))
        requests = []
        for index, prompt in enumerate(_prompts(body.prompt)):
            if index:
                await asyncio.sleep(0)  # let other tasks run: `prepare` may never suspend
            prepared = await service.prepare(
                prompt,
                params,
                f"{answer_id}-{index}",
                adapter=adapter,
                cache_salt=salt,
                priority=body.priority,
            )
            if body.retention:
                prepared.retain(len(prepared.prompt_token_ids), body.retention)
            requests.append(prepared)
    ids = [prepared.request_id for prepared in requests]
    answers = _TextAnswers(body, answer_id, ids, service.llm.tokenizer)
    streams = [service.run(prepared) for prepared in requests]
    # `merge` makes a task per item, which would double the cost of a small answer.
    outputs = merge(streams) if len(streams) > 1 else streams[0]
    if body.stream:
        return EventStream(answers.stream(outputs))
    gathered = await cancel_on_disconnect(request.receive, _gather(outputs, ids))
    return await read_whole(gathered, lambda: JsonResponse(answers.whole(gathered)))


def _prompts(prompts: Any) -> Sequence[Prompt]:
    """Return one or several prompts, strings or token ids, as a list. Raises RequestError."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not prompts or len(prompts) > _MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} entries; allowed: 1 to {_MAX_PROMPTS}")
    return prompts  # type: ignore[no-any-return]


class _TextAnswers(Chunks):
    """The completions of the prompts of one call."""

    def __init__(
        self,
        body: CompletionRequest,
        answer_id: str,
        ids: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        super().__init__(body, answer_id, "text_completion", "text_completion")
        self._body = body
        self._prompt_indices = {request_id: index for index, request_id in enumerate(ids)}
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # position of a choice's next token in its text

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for output in outputs:
            self._count(output)
            choices += [self._choice(output, answer) for answer in output.outputs]
        return self.head | {"choices": choices, "usage": self.usage.for_completions()}

    def read(self, output: RequestOutput) -> list[bytes]:
        self._count(output)
        return [self.chunk([self._choice(output, answer)]) for answer in output.outputs]

    def _count(self, output: RequestOutput) -> None:
        self.usage.add(output)
        if self._body.max_tokens == 0:  # the engine generates one token, which is not shown
            self.usage.completion = 0

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        body = self._body
        index = self._prompt_indices[output.request_id] * (body.n or 1) + answer.index
        is_first = index not in self._offsets
        is_echoed = bool(body.echo) and is_first
        text = answer.text
        entries: list[Logprobs | None] = list(answer.logprobs or [])
        if body.max_tokens == 0:
            text, entries = "", []
        if is_echoed:
            text = self._prompt_text(output) + text
            entries = [*(output.prompt_logprobs or ()), *entries]
        logprobs = None
        start = self._offsets.get(index, 0)
        # With log-probabilities, `end` is the end of the texts of all tokens so far. The sent text
        # may end earlier: text that may be the beginning of a stop string is held back.
        end = start + len(text)
        if body.logprobs is not None:
            first = (0, "")
            if is_echoed and entries:
                first = self._first_token(output)
                start = self._prompt_start(output, first[1])
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs, end = completion_logprobs(
                entries, body.logprobs, start, as_ids=as_ids, first=first
            )
        self._offsets[index] = end
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = [] if body.max_tokens == 0 else list(answer.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, body.prompt_logprobs)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return str(self._tokenizer.decode(output.prompt_token_ids))

    def _first_token(self, output: RequestOutput) -> tuple[int, str]:
        """Return the id and text of a prompt's first token, which has no log-probability."""
        token_id = output.prompt_token_ids[0]
        text = str(self._tokenizer.decode([token_id])) if self._tokenizer is not None else ""
        return token_id, text

    def _prompt_start(self, output: RequestOutput, first: str) -> int:
        """Return the position of the first token's text in the prompt's text.

        The position is negative if the prompt's text lacks the beginning of the first token's text:
        decoding may drop a BOS token, or the space before the first word.
        """
        if not first:
            return 0
        entries = filter(None, output.prompt_logprobs or ())
        texts = (next(iter(entry.values())).decoded_token or "" for entry in entries)
        return len(self._prompt_text(output)) - len(first) - sum(map(len, texts))


async def _gather(
    outputs: AsyncGenerator[RequestOutput], ids: Sequence[str]
) -> list[RequestOutput]:
    """Return the finished outputs in order. Cancel all requests if one fails."""
    async with aclosing(outputs):
        finished = {output.request_id: output async for output in outputs if output.finished}
    return [finished[request_id] for request_id in ids]


Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Yield the items of all streams as they arrive. Close all streams at the end or on an error.

    The next item of a stream is requested only after the reader has taken the previous item. So a
    slow reader delays all streams, and no items are buffered.
    """
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                if (item := task.result()) is not None:
                    yield item
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
