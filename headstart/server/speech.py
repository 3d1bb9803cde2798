"""`POST /v1/chat/completions` of a model with speech output, whole or streamed.

With the modality "audio" an answer has OpenAI's `audio`: the speech in base64, its transcript, and
an id by which later messages may refer to it.

A message has parts of the types `text`, `input_audio` (a file in base64), `audio_url` and
`image_url` (data: URLs). An assistant's message has text, or the id of a spoken answer.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.frontend.chat.messages import describe_content, kind_of_part
from headstart.frontend.images.decoding import decode_base64, decode_image
from headstart.imports import install
from headstart.omni.params import OmniParams, pcm16, wav_bytes
from headstart.server.chats import read_roles
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.monitoring.logs import current_line
from headstart.server.monitoring.watch import SpeechMetrics
from headstart.server.openai.api import Chunks
from headstart.server.openai.schema import ChatCompletionRequest
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService, cancel_on_disconnect
from headstart.server.sse import EventStream, Usage
from headstart.server.stores import Transcripts
from headstart.server.tenants import Tenants
from headstart.validation import check_utf8, describe, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from headstart.frontend.streams import AsyncOutputStream
    from headstart.omni.omni import AsyncOmni, Omni
    from headstart.omni.params import OmniOutput


FORMATS = ("wav", "pcm16", "flac", "mp3", "opus")
"""Formats in which speech is returned."""
MAX_SECONDS = 600
"""Maximum length of a sound, in seconds."""
MAX_SAMPLES = 2**26
"""Maximum number of samples in all channels of a sound. They take 256 MiB."""
RATES = range(1_000, 768_001)
"""Allowed sampling rates of a file. Resampling time grows with the ratio to the model's rate."""
MAX_PIXELS = 2**25
"""Maximum number of pixels of an image."""
MAX_ITEMS = 32
"""Maximum number of sounds, and of images, of a conversation.

Small files may need much memory: a few KiB may contain ten minutes of silence, or an image of
100 MiB in one color. The features of all sounds are padded to the longest sound.
"""
MAX_ALL_PIXELS = 2**26
"""Maximum number of pixels in all images of a conversation."""
MAX_ALL_SECONDS = 2 * MAX_SECONDS
"""Maximum total length of the sounds of a conversation, in seconds."""

_CONTAINERS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")}


def read_sound(data: str, rate: int) -> NDArray[np.float32]:
    """Return a file in base64 (WAV, FLAC, OGG, MP3) as samples `[samples]` of one channel.

    rate: samples per second of the result. Raises RequestError.
    """
    soundfile, soxr = _library("soundfile"), _library("soxr")
    try:
        content = decode_base64(data)
    except ValueError as error:
        raise RequestError(f"the base64 of a sound is broken: {shorten(str(error))}") from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.samplerate not in RATES:
                raise RequestError(
                    f"a sound has {file.samplerate:,} samples a second; allowed: {RATES[0]:,} to "
                    f"{RATES[-1]:,}"
                )
            seconds = file.frames / file.samplerate
            if not 0 < seconds <= MAX_SECONDS or file.frames * file.channels > MAX_SAMPLES:
                raise RequestError(
                    f"a sound has {seconds:g} s in {file.channels} channels; allowed: up to "
                    f"{MAX_SECONDS} s, and {MAX_SAMPLES:,} samples in all channels"
                )
            channels = file.read(dtype="float32", always_2d=True)
            samples: NDArray[np.float32] = soxr.resample(
                channels.mean(axis=1), file.samplerate, rate
            )
    except RequestError:  # it is also a ValueError
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        # soundfile's `error_string` leaves out the name of the file object.
        reason = getattr(error, "error_string", str(error))
        raise RequestError(
            f"a sound cannot be read: {shorten(reason)}; allowed: WAV, FLAC, OGG, MP3"
        ) from error
    return samples


def write_sound(samples: Tensor, rate: int, form: str) -> bytes:
    """Return samples `[samples]` from -1 to 1 as a file of one of `FORMATS`."""
    if form == "pcm16":
        return pcm16(samples)
    if form == "wav":
        return wav_bytes(samples, rate)
    container, kind = _CONTAINERS[form]
    file = io.BytesIO()
    values = samples.detach().float().cpu().clamp(-1, 1).numpy()
    _library("soundfile").write(file, values, rate, format=container, subtype=kind)
    return file.getvalue()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RequestError(
            f"sounds in this format need {name} on the server: {install('audio')}"
        ) from error


def read_prompt(
    omni: Omni, messages: Sequence[Any], transcript: Callable[[str], str]
) -> Mapping[str, Any]:
    """Return a prompt for `Omni.generate`. Raises RequestError, and ApiError for an unknown role.

    transcript: returns the text of a spoken answer by its id.
    """
    if omni.tokenizer is None:
        raise RequestError("the model has no tokenizer; a conversation needs one")
    media = _Media(omni)
    flat = [
        media.flatten(index, message, transcript)
        for index, message in enumerate(read_roles(omni.tokenizer, messages))
    ]
    try:
        text = omni.tokenizer.apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise RequestError(
            f"the model's chat template refuses the conversation: {shorten(str(error))}"
        ) from error
    items = {"audio": media.sounds, "images": media.images}
    return {"prompt": text, **{name: values for name, values in items.items() if values}}


class _Media:
    """Sounds and images of a conversation, in order."""

    def __init__(self, omni: Omni) -> None:
        self._omni = omni
        self.sounds: list[Any] = []
        self.images: list[Any] = []

    def flatten(self, index: int, message: Any, transcript: Callable[[str], str]) -> dict[str, str]:
        """Return a message with one text, which has a placeholder for each sound and image."""
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(f"message {index} has the role {describe(role)}; allowed: a string")
        content, answer = message.get("content"), message.get("audio")
        if role == "assistant" and content is None and isinstance(answer, Mapping):
            content = transcript(str(answer.get("id")))
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise RequestError(
                f"message {index} has {describe_content(content)}; allowed: a string or a list "
                "of parts"
            )
        return {"role": role, "content": "".join(self._read(index, part) for part in content)}

    def _read(self, index: int, part: Any) -> str:
        kind = kind_of_part(part)
        value = part.get(kind) if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(value, str):
            check_utf8(f"message {index}", value)
            return value
        source = None
        if isinstance(value, Mapping):
            source = value.get("data" if kind == "input_audio" else "url")
        if isinstance(source, str):
            match kind:
                case "input_audio":
                    return self._add_sound(source)
                case "audio_url":
                    return self._add_sound(_data_of(source, "audio"))
                case "image_url":
                    return self._add_image(source)
        raise RequestError(
            f"message {index} has a part of type {describe(kind)} that cannot be read; allowed: "
            "text, input_audio with data, audio_url and image_url with a data: URL"
        )

    def _add_sound(self, data: str) -> str:
        _check_count("sounds", self.sounds)
        rate = self._omni.sound_rate
        self.sounds.append(read_sound(data, rate))
        seconds = sum(map(len, self.sounds)) / rate
        if seconds > MAX_ALL_SECONDS:
            raise RequestError(
                f"the sounds of the conversation have {seconds:,.0f} s together; "
                f"allowed: {MAX_ALL_SECONDS:,}"
            )
        return self._omni.placeholder_texts["audio"]

    def _add_image(self, url: str) -> str:
        _check_count("images", self.images)
        _data_of(url, "image")
        self.images.append(decode_image(url, MAX_PIXELS))
        pixels = sum(image.width * image.height for image in self.images)
        if pixels > MAX_ALL_PIXELS:
            raise RequestError(
                f"the images of the conversation have {pixels:,} pixels together; "
                f"allowed: {MAX_ALL_PIXELS:,}"
            )
        return self._omni.placeholder_texts["image"]


def _check_count(name: str, items: Sequence[Any]) -> None:
    if len(items) >= MAX_ITEMS:
        raise RequestError(
            f"the conversation has more than {MAX_ITEMS} {name}; allowed: {MAX_ITEMS}"
        )


def _data_of(url: str, kind: str) -> str:
    """Return the base64 of a `data:` URL."""
    head, _, data = url.partition(",")
    if not head.lower().startswith(f"data:{kind}/") or not head.lower().endswith(";base64"):
        raise RequestError(
            f"a URL begins with {describe(shorten(head))}; allowed: data:{kind}/...;base64,"
        )
    return data


router = APIRouter()

_REFUSED = (
    *("tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "logit_bias"),
    *("bad_words", "allowed_token_ids", "prompt_cache_retention", "no_read", "no_store"),
    *("chat_template", "chat_template_kwargs", "continue_final_message", "reasoning_effort"),
    *("documents", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    *("return_progress", "prediction"),
)
"""Fields of a chat that would have no effect on a model with speech output."""
_UNSET: tuple[Any, ...] = (None, False, [], {}, "none")
_LONG = 2**16
"""Samples of speech whose encoding blocks the event loop for milliseconds."""


class SpeechService(BaseService["AsyncOutputStream[OmniOutput]", "OmniOutput"]):
    """A model with speech output behind the server."""

    def __init__(
        self, omni: AsyncOmni, name: str, options: ServerOptions, tenants: Tenants
    ) -> None:
        most, length = omni.omni.max_num_seqs, omni.omni.max_model_len
        super().__init__(omni, name, options, tenants, max_running=most, max_model_len=length)
        self.omni = omni
        self.transcripts = Transcripts()
        self.metrics = SpeechMetrics(self.name)

    async def read_metrics(self) -> bytes:
        return self.metrics.read(len(self._streams))

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
    params = _read_params(service, body, with_speech=form is not None)
    salt = service.salt(request, body.salt)
    service.check_ready()
    prompt = await asyncio.to_thread(
        read_prompt,
        service.omni.omni,
        body.messages,
        lambda name: service.transcripts.find(salt, name),
    )
    service.check_ready()
    service.calls.count_prompt()
    work = await service.omni.start(prompt, params, cache_salt=salt)
    answer = _Answer(service, body, salt, form)
    if body.stream:
        return EventStream(answer.stream(service.run(work)))
    output = await cancel_on_disconnect(request.receive, service.answer(work))
    return JsonResponse(await asyncio.to_thread(answer.whole, output))


def _check_fields(body: ChatCompletionRequest) -> None:
    """Raise ApiError for fields that would have no effect."""
    fields = [name for name in _REFUSED if getattr(body, name) not in _UNSET]
    if body.response_format is not None and body.response_format.type == "text":
        fields.remove("response_format")
    if fields:
        text = f"{fields[0]} is set, which a model with speech output does not support"
        raise ApiError(400, text, param=fields[0])
    for name, value in (("priority", 0), ("add_generation_prompt", True)):
        actual = getattr(body, name)
        if actual is not None and actual != value:
            text = f"{name} is {actual}; allowed for a model with speech output: {value}"
            raise ApiError(400, text, param=name)


def _read_form(body: ChatCompletionRequest) -> str | None:
    """Return the format of the speech; None for text alone."""
    if "audio" in (body.modalities or ()):
        form = body.audio.format if body.audio is not None else "wav"
        if body.stream and form != "pcm16":
            text = f"audio.format is {form!r}; allowed with stream: pcm16"
            raise ApiError(400, text, param="audio.format")
        return form
    if body.audio is not None:
        text = 'audio is set; allowed with modalities ["text", "audio"]'
        raise ApiError(400, text, param="audio")
    return None


def _read_params(
    service: SpeechService, body: ChatCompletionRequest, *, with_speech: bool
) -> OmniParams:
    omni = service.omni.omni
    voice = body.audio.voice if body.audio is not None else None
    if voice and voice not in omni.voices:
        text = f"there is no voice {voice!r}; allowed: {', '.join(omni.voices)}"
        raise ApiError(400, text, param="audio.voice")
    sampling = {name: v for name, v in body.read_sampling().items() if v is not None}
    speech = omni.speech_params.clone()
    speech.seed = body.seed
    return OmniParams(
        text=replace(omni.text_params, **sampling),
        speech=speech,
        voice=voice,
        audio=with_speech,
        seed=body.seed or 0,
    )


@dataclass(slots=True)
class _Usage(Usage):
    """Tokens of one answer; codes of speech count as tokens."""

    speech: int = 0

    def count(self, output: OmniOutput) -> None:
        cached = output.metrics["thinker"].cached_tokens if output.finished else 0
        self.prompts = {output.request_id: (len(output.prompt_token_ids), cached)}
        self.speech = len(output.codes)
        self.completion = len(output.token_ids) + self.speech

    def for_completions(self) -> dict[str, Any]:
        details = {"text_tokens": self.completion - self.speech, "audio_tokens": self.speech}
        return Usage.for_completions(self) | {"completion_tokens_details": details}


class _Answer(Chunks):
    """One answer. form: the format of the speech; None for text alone."""

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
        self._num_sent = 0  # sent characters of the text
        self._num_chunks = 0  # sent chunks of the speech

    def whole(self, output: OmniOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if self._form is not None:
            spoken = write_sound(output.audio, output.sample_rate, self._form)
            data = base64.b64encode(spoken).decode()
            expires_at = self._transcripts.add(self._salt, self._name, output.text)
            message["content"] = None
            message |= self._audio(data=data, expires_at=expires_at, transcript=output.text)
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
        with_speech = self._form is not None
        self.usage.count(output)
        if text := output.text[self._num_sent :]:
            self._num_sent += len(text)
            yield self._delta(self._audio(transcript=text) if with_speech else {"content": text})
        chunks = output.audio_chunks[self._num_chunks :] if with_speech else ()
        self._num_chunks += len(chunks)
        for chunk in chunks:
            if len(chunk):
                data = base64.b64encode(pcm16(chunk)).decode()
                yield self._delta(self._audio(data=data))
        if output.finished:
            last = {}
            if with_speech:
                expires_at = self._transcripts.add(self._salt, self._name, output.text)
                last = self._audio(expires_at=expires_at)
            yield self._delta(last, output.finish_reason)

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        """Return an event with one delta; the last event has the reason why the answer ended."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.chunk([choice])

    def _audio(self, **fields: Any) -> dict[str, Any]:
        return {"audio": {"id": self._name, **fields}}
