"""Sounds as clients send and want them: files in, samples for the model; samples, and files out."""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.errors import RequestError
from headstart.frontend.images.files import decode_base64
from headstart.imports import install
from headstart.omni.params import pcm16, wav_bytes
from headstart.validation import shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["FORMATS", "MAX_SECONDS", "read_sound", "write_sound"]

FORMATS = ("wav", "pcm16", "flac", "mp3", "opus")
"""In which speech is written."""

MAX_SECONDS = 600
"""Of a sound that is read."""

MAX_SAMPLES = 2**26
"""Of all its channels together: 256 MiB."""

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
