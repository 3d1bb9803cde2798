"""Waveforms as bytes: 16-bit PCM, and WAV files of it."""

import io
import wave
from pathlib import Path

import torch
from torch import Tensor

from headstart.errors import RequestError
from headstart.validation import describe

__all__ = ["pcm16", "save_wav", "wav_bytes"]


def pcm16(samples: Tensor) -> bytes:
    """Samples in -1 .. 1, float `[samples]`, as little-endian 16-bit PCM; louder ones are cut.

    >>> pcm16(torch.tensor([0.0, 1.0, -2.0])).hex()
    '0000ff7f0180'
    """
    scaled = (samples.detach().float().cpu().clamp(-1, 1) * 32767).round()
    return scaled.to(torch.int16).numpy().astype("<i2").tobytes()


def wav_bytes(samples: Tensor, sample_rate: int) -> bytes:
    """A mono WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(pcm16(samples))
    return file.getvalue()


def save_wav(path: str | Path, samples: Tensor, sample_rate: int) -> None:
    """Write a mono WAV file. Raises RequestError for what is no path; OSError."""
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise RequestError(f"path is {describe(path)}; allowed: the path of a file to write")
    Path(path).write_bytes(wav_bytes(samples, sample_rate))
