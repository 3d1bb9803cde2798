"""`POST /v1/completions`: texts that continue prompts, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.server.bodies import read_retention, read_salt
from headstart.server.chats import TokenCount
from headstart.server.errors import as_api_error, body_of, telling_form_as
from headstart.server.openai.reading import form_field, read_completion_sampling
from headstart.server.openai.schema import CompletionRequest
from headstart.server.openai.usage import completion_logprobs, prompt_logprobs, usage_of
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, Frames, frame, tell_event, tell_whole

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, Logprobs, RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.inputs import Prompt

__all__ = ["merge", "router"]

router = APIRouter()
_MAX_PROMPTS = 256


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    body = body.model_copy(update={"model": body.model or service.name})
    adapter = service.adapter(body.model)
    salt = service.salt(request, read_salt(body))
    name = service.new_id("cmpl")
    with telling_form_as(form_field(body)):
        params = service.params(read_completion_sampling(body), stream=bool(body.stream))
        requests = []
        for place, prompt in enumerate(_prompts(body.prompt)):
            if place:
                await asyncio.sleep(0)  # few token ids are read in the loop, where others wait
            prepared = await service.prepare(
                prompt,
                params,
                f"{name}-{place}",
                adapter=adapter,
                cache_salt=salt,
                priority=body.priority,
            )
            requests.append(prepared)
    for prepared in requests if read_retention(body) else ():
        prepared.retain(len(prepared.prompt_token_ids), read_retention(body))
    told = _Told(body, name, service)
    if body.stream:
        return EventStream(told.events(service, requests))
    outputs = await unless_gone(request.receive, _answer_all(service, requests))
    return await tell_whole(outputs, lambda: told.whole(outputs))


def _prompts(given: Any) -> Sequence[Prompt]:
    """Each of one or several prompts, texts or token ids. Raises RequestError."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) > _MAX_PROMPTS:
        raise RequestError(f"prompt has {len(given)} entries; allowed: 1 to {_MAX_PROMPTS}")
    return given  # type: ignore[no-any-return]


class _Told:
    """The answers of one call, as OpenAI's clients read them."""

    def __init__(self, body: CompletionRequest, name: str, service: Service) -> None:
        self._body = body
        self._tokenizer = service.llm.tokenizer
        self._head = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_usage_so_far = options is not None and bool(options.continuous_usage_stats)
        self._has_few_values = body.logprobs is None is body.prompt_logprobs
        self._offsets: dict[int, int] = {}  # of a choice's next token in its text

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All answers at once."""
        counts = [TokenCount() for _ in outputs]
        choices = []
        for place, output in enumerate(outputs):
            counts[place].add(output)
            choices += [self._choice(place, output, answer) for answer in output.outputs]
        return self._head | {"choices": choices, "usage": self._usage(counts)}

    async def events(
        self, service: Service, requests: Sequence[RequestGroup]
    ) -> AsyncGenerator[bytes]:
        """Yield the events, up to `[DONE]` or an error."""
        counts = [TokenCount() for _ in requests]
        places = {request.request_id: place for place, request in enumerate(requests)}
        frames = Frames(self._head)
        try:
            streams = merge([service.run(request) for request in requests])
            async with aclosing(streams):
                async for output in streams:
                    place = places[output.request_id]
                    counts[place].add(output)
                    usage = self._usage(counts) if self._wants_usage_so_far else None
                    for answer in output.outputs:
                        chunk = partial(self._answer_chunk, place, output, answer, usage)
                        if self._has_few_values:
                            yield frames.frame(chunk())
                        else:
                            yield await tell_event(output, frames, chunk)
        except Exception as error:
            yield frame(body_of(as_api_error(error)))
            return
        last = frames.frame(self._chunk([], self._usage(counts))) if self._wants_usage else b""
        yield last + frame("[DONE]")

    def _answer_chunk(
        self,
        place: int,
        output: RequestOutput,
        answer: CompletionOutput,
        usage: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return self._chunk([self._choice(place, output, answer)], usage)

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return the fields of an event after the head."""
        return {"choices": choices, "usage": usage} if self._wants_usage else {"choices": choices}

    def _choice(
        self, place: int, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        index = place * (self._body.n or 1) + answer.index
        is_first = index not in self._offsets
        echoed = self._prompt_text(output) if self._body.echo and is_first else ""
        entries: list[Logprobs | None] = []
        text = ""
        if self._body.max_tokens != 0:
            text, entries = answer.text, list(answer.logprobs or [])
        if self._body.echo and is_first and output.prompt_logprobs is not None:
            entries = [*output.prompt_logprobs, *entries]
        logprobs = None
        start = self._offsets.get(index, 0)
        # Texts of tokens are told at once, and some of the answer's text later, for a stop string.
        end = start + len(echoed + text)
        if self._body.logprobs is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            first = self._first_token(output) if echoed and entries else (0, "")
            start += len(echoed) - _prompt_length(output, first[1]) if first[1] else 0
            logprobs, end = completion_logprobs(
                entries, self._body.logprobs, start, as_ids=as_ids, first=first
            )
        self._offsets[index] = end
        told = {
            "index": index,
            "text": echoed + text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        return told | self._more(output, answer, is_first=is_first)

    def _more(
        self, output: RequestOutput, answer: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """Return fields that vLLM's clients request besides OpenAI's."""
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["token_ids"] = [] if self._body.max_tokens == 0 else list(answer.token_ids)
            if is_first:
                more["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return more

    def _usage(self, counts: Sequence[TokenCount]) -> dict[str, Any]:
        if self._body.max_tokens == 0:  # the engine makes one token at least, which is not told
            for count in counts:
                count.completion = 0
        return usage_of(counts)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return str(self._tokenizer.decode(output.prompt_token_ids))

    def _first_token(self, output: RequestOutput) -> tuple[int, str]:
        """Id and text of a prompt's first token, which has no log-probability."""
        token_id = output.prompt_token_ids[0]
        text = str(self._tokenizer.decode([token_id])) if self._tokenizer is not None else ""
        return token_id, text


def _prompt_length(output: RequestOutput, first: str) -> int:
    """Return the length of all texts of a prompt's tokens.

    The prompt's own text may show less at its beginning: no token that begins every text, no space
    before the first word.
    """
    entries = filter(None, output.prompt_logprobs or ())
    shown = (next(iter(entry.values())).decoded_token or "" for entry in entries)
    return len(first) + sum(map(len, shown))


async def _answer_all(service: Service, requests: Sequence[RequestGroup]) -> list[RequestOutput]:
    """Return all answers; if one fails or the client is gone, cancel the others."""
    tasks = [asyncio.ensure_future(service.answer(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Item = TypeVar("Item")


def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """The items of all streams as they come; all streams are closed at the end.

    A stream is asked for its next item when the last one was taken, so a slow reader holds up all
    of them and nothing piles up here. The first exception ends all.
    """
    if len(streams) == 1:  # a task for each item is as much work as the rest of a small answer
        return streams[0]
    return _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                found = task.result()
                if found:
                    yield found[0]
                    waiting[asyncio.ensure_future(_next(streams[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            async with aclosing(stream):
                pass


async def _next(stream: AsyncGenerator[Item]) -> tuple[Item] | tuple[()]:
    """The next item, or nothing at the end: a task cannot end with StopAsyncIteration."""
    async for item in stream:
        return (item,)
    return ()
