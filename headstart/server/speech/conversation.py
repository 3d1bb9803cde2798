"""OpenAI's messages as the prompt of a speaking model, and sounds read from and written to files.

A part of a message is `text`; `input_audio` with a file in base64, or `audio_url` with a data: URL
of one; `image_url` with a data: URL. An assistant's message has its text, or the id of an answer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.errors import RequestError
from headstart.frontend.chat.messages import describe_content, kind_of_part
from headstart.frontend.images.decoding import decode_base64, decode_image
from headstart.imports import install
from headstart.omni.params import pcm16, wav_bytes
from headstart.server.messages import read_roles
from headstart.validation import check_utf8, describe, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from headstart.omni.omni import Omni

FORMATS = ("wav", "pcm16", "flac", "mp3", "opus")
"""Formats of written speech."""
MAX_SECONDS = 600
"""Length of a sound."""
MAX_SAMPLES = 2**26
"""Samples of all channels of a sound: 256 MiB."""
RATES = range(1_000, 768_001)
"""Samples per second of a file. Resampling takes time in proportion to the ratio of the rates."""
MAX_PIXELS = 2**25
"""Pixels of one image."""
MAX_ITEMS = 32
"""Sounds of a conversation, and images: a model pads the features of all to those of the longest.
A few KiB in a file may be ten minutes of silence, or a hundred MiB of one color."""
MAX_ALL_PIXELS = 2**26
"""Pixels of all images of a conversation."""
MAX_ALL_SECONDS = 2 * MAX_SECONDS
"""Length of all sounds of a conversation."""

_CONTAINERS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")}


def read_sound(data: str, rate: int) -> NDArray[np.float32]:
    """Return a file in base64 (WAV, FLAC, OGG, MP3) as samples `[samples]` of one channel.

    rate: of the samples. Raises RequestError.
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
                    f"{MAX_SECONDS} s, and {MAX_SAMPLES:,} samples of all channels"
                )
            channels = file.read(dtype="float32", always_2d=True)
            samples: NDArray[np.float32] = soxr.resample(
                channels.mean(axis=1), file.samplerate, rate
            )
    except RequestError:  # which is a ValueError, too
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "error_string", str(error))  # libsndfile's, without our object
        raise RequestError(
            f"a sound cannot be read: {shorten(why)}; allowed: WAV, FLAC, OGG, MP3"
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
            f"sounds of this form need {name} at the server: {install('audio')}"
        ) from error


def read_prompt(
    omni: Omni, messages: Sequence[Any], transcript: Callable[[str], str]
) -> Mapping[str, Any]:
    """Return a prompt for `Omni.generate`. `transcript` returns an earlier answer's text by its id.

    Raises RequestError, and ApiError for an unknown role.
    """
    if omni.tokenizer is None:
        raise RequestError("the model came without a tokenizer, so it takes no conversation")
    media = _Media(omni)
    flat = [
        media.flatten(place, message, transcript)
        for place, message in enumerate(read_roles(omni.tokenizer, messages))
    ]
    try:
        text = omni.tokenizer.apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise anything
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

    def flatten(self, place: int, message: Any, transcript: Callable[[str], str]) -> dict[str, str]:
        """Return a message with one text, which has a placeholder for each sound and image."""
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(f"message {place} has the role {describe(role)}; allowed: a text")
        content, answer = message.get("content"), message.get("audio")
        if role == "assistant" and content is None and isinstance(answer, Mapping):
            content = transcript(str(answer.get("id")))
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise RequestError(
                f"message {place} has {describe_content(content)}; allowed: a text or a list "
                "of parts"
            )
        return {"role": role, "content": "".join(self._read(place, part) for part in content)}

    def _read(self, place: int, part: Any) -> str:
        kind = kind_of_part(part)
        value = part.get(kind) if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(value, str):
            check_utf8(f"message {place}", value)
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
            f"message {place} has a part of type {describe(kind)} that cannot be read; allowed: "
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
        return self._omni.spelling["audio"]

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
        return self._omni.spelling["image"]


def _check_count(name: str, items: Sequence[Any]) -> None:
    """Raise RequestError before one item too many is read."""
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
