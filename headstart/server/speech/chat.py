"""`POST /v1/chat/completions` of a model that speaks: text or speech, whole or streamed.

With the modality "audio" an answer is OpenAI's `audio`: the speech in base64, its transcript, and
an id by which later messages may refer to it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.omni.params import OmniParams, pcm16
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.monitoring.logs import current_line
from headstart.server.monitoring.metrics import SpeechMetrics
from headstart.server.openai.answers import Chunks
from headstart.server.openai.schema import ChatCompletionRequest
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService, unless_gone
from headstart.server.speech.conversation import read_prompt, write_sound
from headstart.server.sse import EventStream, Usage
from headstart.server.stores import Transcripts
from headstart.server.tenants import Tenants

if TYPE_CHECKING:
    from headstart.frontend.streams import AsyncOutputStream
    from headstart.omni.omni import AsyncOmni
    from headstart.omni.params import OmniOutput, OmniPrompt

router = APIRouter()

_REFUSED = (
    *("tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "logit_bias"),
    *("bad_words", "allowed_token_ids", "prompt_cache_retention", "no_read", "no_store"),
    *("chat_template", "chat_template_kwargs", "continue_final_message", "reasoning_effort"),
    *("documents", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    "return_progress",
)
"""Fields of a chat without effect on a speaking model."""
_UNSET: tuple[Any, ...] = (None, False, [], {}, "none")
_LONG = 2**16
"""Samples of speech whose encoding would block the event loop for milliseconds."""


class SpeechService(BaseService["AsyncOutputStream[OmniOutput]", "OmniOutput"]):
    """A speaking model behind the server."""

    def __init__(
        self, omni: AsyncOmni, name: str, options: ServerOptions, tenants: Tenants
    ) -> None:
        super().__init__(name, options, tenants, omni.omni.max_num_seqs)
        self.omni = omni
        self.transcripts = Transcripts()
        self.metrics = SpeechMetrics(self.name)

    @property
    def is_running(self) -> bool:
        return self.omni.is_running

    @property
    def max_model_len(self) -> int:
        return self.omni.omni.max_model_len

    async def read_metrics(self) -> bytes:
        return self.metrics.read(len(self._read))

    async def start(
        self, prompt: OmniPrompt, params: OmniParams, salt: str | None
    ) -> AsyncOutputStream[OmniOutput]:
        """Begin an answer. Raises RequestError."""
        self.check_ready()
        self.calls.count_prompt()
        return await self.omni.start(prompt, params, cache_salt=salt)

    def _open(self, work: AsyncOutputStream[OmniOutput]) -> AsyncOutputStream[OmniOutput]:
        return work

    async def _finish(self, work: AsyncOutputStream[OmniOutput], output: OmniOutput) -> None:
        thinker = output.metrics["thinker"]
        current_line().add_answer(
            prompt=len(output.prompt_token_ids),
            cached=thinker.cached_tokens,
            generated=len(output.token_ids) + len(output.codes),
            first=thinker.first_output,
        )
        self.metrics.add(output)
        self.metrics.end(output.finish_reason or "stop")

    def _end(self, work: AsyncOutputStream[OmniOutput], reason: str) -> None:
        if reason != "answered":
            self.metrics.end(reason)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service: SpeechService = request.app.state.service
    body = body.model_copy(update={"model": body.model or service.name})
    service.adapter(body.model)
    _check_fields(body)
    form = _read_form(body)
    params = _read_params(service, body, speaks=form is not None)
    salt = service.salt(request, body.salt)
    service.check_ready()
    prompt = await asyncio.to_thread(
        read_prompt,
        service.omni.omni,
        body.messages,
        lambda name: service.transcripts.find(salt, name),
    )
    work = await service.start(prompt, params, salt)
    answer = _Answer(service, body, salt, form)
    if body.stream:
        return EventStream(answer.stream(service.run(work)))
    output = await unless_gone(request.receive, service.answer(work))
    return JsonResponse(await asyncio.to_thread(answer.whole, output))


def _check_fields(body: ChatCompletionRequest) -> None:
    """Raise ApiError for fields that would have no effect."""
    fields = [name for name in _REFUSED if getattr(body, name) not in _UNSET]
    if body.response_format is not None and body.response_format.type == "text":
        fields.remove("response_format")
    if fields:
        text = f"{fields[0]} is given; a model that speaks takes none"
        raise ApiError(400, text, param=fields[0])
    for name, value in (("priority", 0), ("add_generation_prompt", True)):
        given = getattr(body, name)
        if given is not None and given != value:
            raise ApiError(400, f"{name} is {given}; a model that speaks takes {value}", param=name)


def _read_form(body: ChatCompletionRequest) -> str | None:
    """Return the format of the speech; None for text alone."""
    if "audio" in (body.modalities or ()):
        form = body.audio.format if body.audio is not None else "wav"
        if body.stream and form != "pcm16":
            text = f"audio.format is {form!r}; allowed: pcm16 with stream"
            raise ApiError(400, text, param="audio.format")
        return form
    if body.audio is not None:
        text = 'audio is given; allowed with modalities ["text", "audio"]'
        raise ApiError(400, text, param="audio")
    return None


def _read_params(
    service: SpeechService, body: ChatCompletionRequest, *, speaks: bool
) -> OmniParams:
    omni = service.omni.omni
    voice = body.audio.voice if body.audio is not None else None
    if voice and voice not in omni.voices:
        text = f"there is no voice {voice!r}; there are {', '.join(omni.voices)}"
        raise ApiError(400, text, param="audio.voice")
    sampling = {name: v for name, v in body.read_sampling().items() if v is not None}
    speech = omni.speech_params.clone()
    speech.seed = body.seed
    return OmniParams(
        text=replace(omni.text_params, **sampling),
        speech=speech,
        voice=voice,
        audio=speaks,
        seed=body.seed or 0,
    )


@dataclass(slots=True)
class _Usage(Usage):
    """Tokens of one answer; codes of speech count as tokens."""

    speech: int = 0

    def count(self, output: OmniOutput) -> None:
        """Replace the counts by those of a later output."""
        cached = output.metrics["thinker"].cached_tokens if output.finished else 0
        self.prompts = {output.request_id: (len(output.prompt_token_ids), cached)}
        self.speech = len(output.codes)
        self.completion = len(output.token_ids) + self.speech

    def for_completions(self) -> dict[str, Any]:
        details = {"text_tokens": self.completion - self.speech, "audio_tokens": self.speech}
        return Usage.for_completions(self) | {"completion_tokens_details": details}


class _Answer(Chunks):
    """One answer. form: of the speech; None for text alone."""

    usage: _Usage

    def __init__(
        self,
        service: SpeechService,
        body: ChatCompletionRequest,
        salt: str | None,
        form: str | None,
    ) -> None:
        name = service.new_id("chatcmpl")
        super().__init__(body, name, "chat.completion", "chat.completion.chunk")
        self.usage = _Usage()
        self._transcripts = service.transcripts
        self._salt = salt
        self._form = form
        self._name = service.new_id("audio")
        self._num_sent = 0  # characters of the text
        self._num_chunks = 0  # of the speech

    def whole(self, output: OmniOutput) -> dict[str, Any]:
        """Return the whole answer at once."""
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if self._form is not None:
            spoken = write_sound(output.audio, output.sample_rate, self._form)
            data = base64.b64encode(spoken).decode()
            end = self._transcripts.keep(self._salt, self._name, output.text)
            message["content"] = None
            message |= self._audio(data=data, expires_at=end, transcript=output.text)
        self.usage.count(output)
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        choice["finish_reason"] = output.finish_reason
        return self.head | {"choices": [choice], "usage": self.usage.for_completions()}

    def begin(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    async def read_all(self, output: OmniOutput) -> list[bytes]:
        chunks = output.audio_chunks[self._num_chunks :] if self._form is not None else ()
        if sum(map(len, chunks)) > _LONG:
            return await asyncio.to_thread(list, self.read(output))
        return list(self.read(output))

    def read(self, output: Any) -> Iterable[bytes]:
        """Yield the events of an output, which has the whole answer so far."""
        speaks = self._form is not None
        self.usage.count(output)
        if text := output.text[self._num_sent :]:
            self._num_sent += len(text)
            yield self._delta(self._audio(transcript=text) if speaks else {"content": text})
        chunks = output.audio_chunks[self._num_chunks :] if speaks else ()
        self._num_chunks += len(chunks)
        for chunk in chunks:
            if len(chunk):
                data = base64.b64encode(pcm16(chunk)).decode()
                yield self._delta(self._audio(data=data))
        if output.finished:
            last = {}
            if speaks:
                end = self._transcripts.keep(self._salt, self._name, output.text)
                last = self._audio(expires_at=end)
            yield self._delta(last, output.finish_reason)

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        """Return an event with one delta; the last has the reason why the answer ended."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.chunk([choice])

    def _audio(self, **fields: Any) -> dict[str, Any]:
        return {"audio": {"id": self._name, **fields}}
