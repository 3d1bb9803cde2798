"""From OpenAI's messages to the prompt of a speaking model, and sounds to and from files.

A part of a message is `text`; `input_audio` with a file in base64, or `audio_url` with a data: URL
of one; `image_url` with a data: URL. What the assistant said is its text, or the id of an answer.
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

__all__ = ["FORMATS", "MAX_SECONDS", "read_prompt", "read_sound", "write_sound"]

FORMATS = ("wav", "pcm16", "flac", "mp3", "opus")
"""Formats in which speech is written."""

MAX_SECONDS = 600
"""The longest sound that is read."""

MAX_SAMPLES = 2**26
"""Samples of all channels of a sound: 256 MiB."""

RATES = range(1_000, 768_001)
"""Samples a second of a file. The work of a change of rate grows with the ratio of the two."""

_CONTAINERS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")}


def read_sound(data: str, rate: int) -> NDArray[np.float32]:
    """The samples `[samples]` of a file in base64 (WAV, FLAC, OGG, MP3), in one channel, at `rate`.

    Raises RequestError.
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
            samples = file.read(dtype="float32", always_2d=True).mean(axis=1)
            found: NDArray[np.float32] = soxr.resample(samples, file.samplerate, rate)
    except RequestError:  # which is a ValueError, too
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "error_string", str(error))  # libsndfile's, without our object
        raise RequestError(
            f"a sound cannot be read: {shorten(why)}; allowed: WAV, FLAC, OGG, MP3"
        ) from error
    return found


def write_sound(samples: Tensor, rate: int, form: str) -> bytes:
    """Samples `[samples]` from -1 to 1 as a file of one of `FORMATS`. Raises RequestError."""
    if form == "pcm16":
        return pcm16(samples)
    if form == "wav":
        return wav_bytes(samples, rate)
    container, kind = _CONTAINERS[form]
    file = io.BytesIO()
    heard = samples.detach().float().cpu().clamp(-1, 1).numpy()
    _library("soundfile").write(file, heard, rate, format=container, subtype=kind)
    return file.getvalue()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RequestError(
            f"sounds of this form need {name} at the server: {install('audio')}"
        ) from error


MAX_PIXELS = 2**25
"""Pixels of one image."""

MAX_ITEMS = 32
"""Sounds of a conversation, and images: a model pads the features of all to those of the longest.
A few KiB in a file may be ten minutes of silence, or a hundred MiB of one colour."""

MAX_ALL_PIXELS = 2**26
"""Pixels of all images of a conversation."""

MAX_ALL_SECONDS = 2 * MAX_SECONDS
"""Seconds of all sounds of a conversation."""


def read_prompt(
    omni: Omni, messages: Sequence[Any], transcript: Callable[[str], str]
) -> Mapping[str, Any]:
    """A prompt for `Omni.generate`. `transcript` gives the text of an earlier answer by its id.

    Raises RequestError, and ApiError for a role that nobody knows.
    """
    if omni.tokenizer is None:
        raise RequestError("the model came without a tokenizer, so it takes no conversation")
    media = _Media(omni)
    known = read_roles(omni.tokenizer, messages)
    flat = [media.flatten(place, message, transcript) for place, message in enumerate(known)]
    try:
        text = omni.tokenizer.apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises
        raise RequestError(
            f"the model's chat template refuses the conversation: {shorten(str(error))}"
        ) from error
    found = {"audio": media.sounds, "images": media.images}
    return {"prompt": text, **{name: items for name, items in found.items() if items}}


class _Media:
    """Sounds and images of a conversation, in order."""

    def __init__(self, omni: Omni) -> None:
        self._omni = omni
        self.sounds: list[Any] = []
        self.images: list[Any] = []
        self._num_samples = 0  # at the model's rate
        self._num_pixels = 0

    def flatten(self, place: int, message: Any, transcript: Callable[[str], str]) -> dict[str, str]:
        """Return a message with one text, which has a placeholder for each sound and image."""
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(f"message {place} has the role {describe(role)}; allowed: a text")
        content, said = message.get("content"), message.get("audio")
        if role == "assistant" and content is None and isinstance(said, Mapping):
            content = transcript(str(said.get("id")))
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise RequestError(
                f"message {place} has {describe_content(content)}; allowed: a text or a list "
                "of parts"
            )
        text = "".join(self._read_part(place, part) for part in content)
        return {"role": role, "content": text}

    def _read_part(self, place: int, part: Any) -> str:
        kind = kind_of_part(part)
        if kind == "text" and isinstance(part.get("text"), str):
            check_utf8(f"message {place}", part["text"])
            return str(part["text"])
        given = part.get(kind) if isinstance(part, Mapping) else None
        key = "data" if kind == "input_audio" else "url"
        value = given.get(key) if isinstance(given, Mapping) else None
        if kind in ("input_audio", "audio_url") and isinstance(value, str):
            data = value if kind == "input_audio" else _data_of(value, "audio")
            self._add_sound(data)
            return self._omni.spelling["audio"]
        if kind == "image_url" and isinstance(value, str):
            _data_of(value, "image")
            self._add_image(value)
            return self._omni.spelling["image"]
        raise RequestError(
            f"message {place} has a part of type {describe(kind)} that cannot be read; allowed: "
            "text, input_audio with data, audio_url and image_url with a data: URL"
        )

    def _add_sound(self, data: str) -> None:
        _check_count("sounds", self.sounds)
        rate = self._omni.sound_rate
        self.sounds.append(read_sound(data, rate))
        self._num_samples += len(self.sounds[-1])
        if self._num_samples > MAX_ALL_SECONDS * rate:
            raise RequestError(
                f"the sounds of the conversation have {self._num_samples / rate:,.0f} s together; "
                f"allowed: {MAX_ALL_SECONDS:,}"
            )

    def _add_image(self, url: str) -> None:
        _check_count("images", self.images)
        self.images.append(decode_image(url, MAX_PIXELS))
        width, height = self.images[-1].size
        self._num_pixels += width * height
        if self._num_pixels > MAX_ALL_PIXELS:
            raise RequestError(
                f"the images of the conversation have {self._num_pixels:,} pixels together; "
                f"allowed: {MAX_ALL_PIXELS:,}"
            )


def _check_count(name: str, items: Sequence[Any]) -> None:
    """Refuse one more of these, before it is read. Raises RequestError."""
    if len(items) >= MAX_ITEMS:
        raise RequestError(
            f"the conversation has more than {MAX_ITEMS} {name}; allowed: {MAX_ITEMS}"
        )


def _data_of(url: str, kind: str) -> str:
    """Return the base64 of a `data:` URL."""
    head, _, data = url.partition(",")
    lower = head.lower()
    if not lower.startswith(f"data:{kind}/") or not lower.endswith(";base64"):
        raise RequestError(
            f"a URL begins with {describe(shorten(head))}; allowed: data:{kind}/...;base64,"
        )
    return data
