"""`POST /v1/chat/completions` of a model that speaks: text or speech, whole or as they come.

With the modality "audio" an answer is OpenAI's `audio`: the speech in base64, its transcript, and
an id by which later messages may name it.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import EngineError
from headstart.omni.params import OmniParams, pcm16
from headstart.server.errors import ApiError, JsonResponse, as_api_error, body_of
from headstart.server.openai.reading import read_chat_sampling
from headstart.server.openai.schema import ChatCompletionRequest
from headstart.server.service import unless_gone
from headstart.server.speech.conversation import read_prompt, write_sound
from headstart.server.speech.service import SpeechService, speech_service_of
from headstart.server.sse import EventStream, frame

if TYPE_CHECKING:
    from headstart.engine.params import SamplingParams
    from headstart.omni.params import OmniOutput

__all__ = ["router"]

router = APIRouter()

_REFUSED = (
    *("tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "logit_bias"),
    *("bad_words", "allowed_token_ids", "prompt_cache_retention", "no_read", "no_store"),
    *("chat_template", "chat_template_kwargs", "continue_final_message", "reasoning_effort"),
    *("documents", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    "return_progress",
)
"""Fields of a chat that a speaking model has no use for."""

_UNSAID: tuple[Any, ...] = (None, False, [], {}, "none")
"""Values that ask for nothing."""


_LONG = 2**16
"""Samples of speech whose encoding would keep the event loop from others for milliseconds."""


@dataclass(frozen=True)
class _Asked:
    """A request as it was read. form: of the speech; None for text alone."""

    body: ChatCompletionRequest
    name: str
    salt: str | None
    params: OmniParams
    form: str | None
    created: int

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of every answer and event."""
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
        }


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """The server's metrics as Prometheus reads them."""
    text = speech_service_of(request).read_metrics()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = speech_service_of(request)
    body = body.model_copy(update={"model": body.model or service.name})
    asked = _read(service, body, request)
    service.check_ready()
    prompt = await asyncio.to_thread(
        read_prompt,
        service.omni.omni,
        body.messages,
        lambda name: service.transcripts.find(asked.salt, name),
    )
    stream = await service.start(prompt, asked.params, asked.salt)
    if body.stream:
        return EventStream(_events(service, asked, service.run(stream)))
    async with aclosing(service.run(stream)) as outputs:
        output = await unless_gone(request.receive, _last(outputs))
    return JsonResponse(await asyncio.to_thread(_whole, service, asked, output))


def _read(service: SpeechService, body: ChatCompletionRequest, request: Request) -> _Asked:
    service.adapter(body.model)
    _check_fields(body)
    modalities = body.modalities or ["text"]
    form = None
    if "audio" in modalities:
        form = body.audio.format if body.audio is not None else "wav"
        if body.stream and form != "pcm16":
            raise ApiError(
                400,
                f"audio.format is {form!r}; allowed: pcm16 with stream",
                param="audio.format",
            )
    elif body.audio is not None:
        raise ApiError(
            400, 'audio is given; allowed with modalities ["text", "audio"]', param="audio"
        )
    omni = service.omni.omni
    speech = omni.speech_params.clone()
    speech.seed = body.seed
    params = OmniParams(
        text=_sampling(omni.text_params, body),
        speech=speech,
        voice=_voice(service, body),
        audio=form is not None,
        seed=body.seed or 0,
    )
    salt = service.salt(request, body.salt)
    return _Asked(body, service.new_id("chatcmpl"), salt, params, form, int(time.time()))


def _voice(service: SpeechService, body: ChatCompletionRequest) -> str | None:
    """Return the requested voice; None for the model's first."""
    voice = body.audio.voice if body.audio is not None else None
    voices = service.omni.omni.voices
    if voice and voice not in voices:
        raise ApiError(
            400, f"there is no voice {voice!r}; there are {', '.join(voices)}", param="audio.voice"
        )
    return voice


def _check_fields(body: ChatCompletionRequest) -> None:
    """Refuse what would have no effect. Raises ApiError."""
    said = [name for name in _REFUSED if getattr(body, name) not in _UNSAID]
    if body.response_format is not None and body.response_format.type == "text":
        said.remove("response_format")
    if said:
        raise ApiError(400, f"{said[0]} is given; a model that speaks takes none", param=said[0])
    for name, value in (("priority", 0), ("add_generation_prompt", True)):
        given = getattr(body, name)
        if given is not None and given != value:
            raise ApiError(400, f"{name} is {given}; a model that speaks takes {value}", param=name)


def _sampling(defaults: SamplingParams, body: ChatCompletionRequest) -> SamplingParams:
    said = {name: value for name, value in read_chat_sampling(body).items() if value is not None}
    return replace(defaults, **said)


async def _last(outputs: AsyncGenerator[OmniOutput]) -> OmniOutput:
    async for output in outputs:
        if output.finished:
            return output
    raise EngineError("the pipeline ended a request without an answer")


def _whole(service: SpeechService, asked: _Asked, output: OmniOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    if asked.form is not None:
        spoken = write_sound(output.audio, output.sample_rate, asked.form)
        name = service.new_id("audio")
        message["content"] = None
        message["audio"] = {
            "id": name,
            "data": base64.b64encode(spoken).decode(),
            "expires_at": service.transcripts.keep(asked.salt, name, output.text),
            "transcript": output.text,
        }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": output.finish_reason,
    }
    return asked.head("chat.completion") | {"choices": [choice], "usage": _usage(output)}


def _usage(output: OmniOutput) -> dict[str, Any]:
    """Return the usage; codes of speech count as tokens."""
    prompt, text, speech = len(output.prompt_token_ids), len(output.token_ids), len(output.codes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + speech,
        "total_tokens": prompt + text + speech,
        "prompt_tokens_details": {"cached_tokens": output.metrics["thinker"].cached_tokens},
        "completion_tokens_details": {"text_tokens": text, "audio_tokens": speech},
    }


async def _events(
    service: SpeechService, asked: _Asked, outputs: AsyncGenerator[OmniOutput]
) -> AsyncGenerator[bytes]:
    """Yield the events, up to `[DONE]` or an error."""
    teller = _Teller(service, asked)
    options = asked.body.stream_options
    wants_usage = options is not None and options.include_usage
    output = None
    try:
        async with aclosing(outputs):
            yield teller.event({"role": "assistant", "content": ""})
            async for output in outputs:
                told = (
                    await asyncio.to_thread(teller.events, output)
                    if teller.num_new_samples(output) > _LONG
                    else teller.events(output)
                )
                for event in told:
                    yield event
        if output is not None and wants_usage:
            yield frame(
                asked.head("chat.completion.chunk") | {"choices": [], "usage": _usage(output)}
            )
    except Exception as error:
        yield frame(body_of(as_api_error(error)))
        return
    yield frame("[DONE]")


class _Teller:
    """The events of one answer's outputs."""

    def __init__(self, service: SpeechService, asked: _Asked) -> None:
        self._service = service
        self._asked = asked
        self._name = service.new_id("audio")
        self._num_told = 0  # characters of the text
        self._num_chunks = 0  # of the speech

    def event(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        """Return an event with one delta; the last has the reason why the answer ended."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return frame(self._asked.head("chat.completion.chunk") | {"choices": [choice]})

    def num_new_samples(self, output: OmniOutput) -> int:
        """Return the new samples of speech in an output."""
        speaks = self._asked.form is not None
        return sum(map(len, output.audio_chunks[self._num_chunks :])) if speaks else 0

    def events(self, output: OmniOutput) -> list[bytes]:
        """Return the events of an output, which has the whole answer so far."""
        found = [self.event(delta) for delta in self._deltas(output)]
        if output.finished:
            found.append(self.event(self._end(output), output.finish_reason))
        return found

    def _end(self, output: OmniOutput) -> dict[str, Any]:
        if self._asked.form is None:
            return {}
        end = self._service.transcripts.keep(self._asked.salt, self._name, output.text)
        return self._audio(expires_at=end)

    def _deltas(self, output: OmniOutput) -> list[dict[str, Any]]:
        speaks = self._asked.form is not None
        found: list[dict[str, Any]] = []
        text = output.text[self._num_told :]
        if text:
            self._num_told += len(text)
            found.append(self._audio(transcript=text) if speaks else {"content": text})
        chunks = output.audio_chunks[self._num_chunks :] if speaks else ()
        self._num_chunks += len(chunks)
        found += [
            self._audio(data=base64.b64encode(pcm16(chunk)).decode())
            for chunk in chunks
            if len(chunk)
        ]
        return found

    def _audio(self, **told: Any) -> dict[str, Any]:
        return {"audio": {"id": self._name, **told}}
