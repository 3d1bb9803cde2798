"""`POST /v1/completions`: texts that continue prompts, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.server.errors import JsonResponse, naming_form
from headstart.server.openai.answers import Chunks, completion_logprobs, prompt_logprobs
from headstart.server.openai.schema import CompletionRequest
from headstart.server.service import service_of, unless_gone
from headstart.server.sse import EventStream, read_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.outputs import CompletionOutput, Logprobs, RequestOutput
    from headstart.frontend.frontend import Prompt

router = APIRouter()
_MAX_PROMPTS = 256


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    body = body.model_copy(update={"model": body.model or service.name})
    adapter = service.adapter(body.model)
    salt = service.salt(request, body.salt)
    name = service.new_id("cmpl")
    with naming_form(body.form_field):
        params = service.params(body.read_sampling(), stream=bool(body.stream))
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
            if body.retention:
                prepared.retain(len(prepared.prompt_token_ids), body.retention)
            requests.append(prepared)
    ids = [prepared.request_id for prepared in requests]
    answers = _Answers(body, name, ids, service.llm.tokenizer)
    outputs = merge([service.run(prepared) for prepared in requests])
    if body.stream:
        return EventStream(answers.stream(outputs))
    whole = await unless_gone(request.receive, _gather(outputs, ids))
    return await read_whole(whole, lambda: JsonResponse(answers.whole(whole)))


def _prompts(given: Any) -> Sequence[Prompt]:
    """Return one or several prompts, texts or token ids, as a list. Raises RequestError."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) > _MAX_PROMPTS:
        raise RequestError(f"prompt has {len(given)} entries; allowed: 1 to {_MAX_PROMPTS}")
    return given  # type: ignore[no-any-return]


class _Answers(Chunks):
    """The answers of one call."""

    def __init__(
        self,
        body: CompletionRequest,
        name: str,
        ids: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        super().__init__(body, name, "text_completion", "text_completion")
        self._body = body
        self._places = {request_id: place for place, request_id in enumerate(ids)}
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # of a choice's next token in its text

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return all answers at once."""
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
        if self._body.max_tokens == 0:  # the engine makes one token at least, which is not shown
            self.usage.completion = 0

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        body = self._body
        index = self._places[output.request_id] * (body.n or 1) + answer.index
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
        # Texts of tokens come at once, and some of the answer's text later, for a stop string.
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
        """Return id and text of a prompt's first token, which has no log-probability."""
        token_id = output.prompt_token_ids[0]
        text = str(self._tokenizer.decode([token_id])) if self._tokenizer is not None else ""
        return token_id, text

    def _prompt_start(self, output: RequestOutput, first: str) -> int:
        """Return where the texts of a prompt's tokens begin, counted in the prompt's own text.

        That may show less at its beginning: no token that begins every text, no space before the
        first word.
        """
        if not first:
            return 0
        entries = filter(None, output.prompt_logprobs or ())
        shown = (next(iter(entry.values())).decoded_token or "" for entry in entries)
        return len(self._prompt_text(output)) - len(first) - sum(map(len, shown))


async def _gather(
    outputs: AsyncGenerator[RequestOutput], ids: Sequence[str]
) -> list[RequestOutput]:
    """Return the finished outputs in order; if one fails or the client is gone, cancel the rest."""
    async with aclosing(outputs):
        finished = {output.request_id: output async for output in outputs if output.finished}
    return [finished[request_id] for request_id in ids]


Item = TypeVar("Item")


def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Return the items of all streams as they come; all streams are closed at the end.

    A stream computes its next item when the last one was taken, so a slow reader holds up all
    of them and nothing piles up here. The first exception ends all.
    """
    if len(streams) == 1:  # a task for each item is as much work as the rest of a small answer
        return streams[0]
    return _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
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
