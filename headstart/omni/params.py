"""Inputs and outputs of omni models: prompts, parameters, answers and their waveforms."""

import io
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.engine.params import SEEDS, SamplingParams
from headstart.engine.request import PreparedPrompt
from headstart.errors import RequestError
from headstart.omni.stage import StageMetrics
from headstart.validation import check_fields, option


def pcm16(samples: Tensor) -> bytes:
    """Return samples, float `[samples]`, as little-endian 16-bit PCM, clipped to -1 .. 1.

    >>> pcm16(torch.tensor([0.0, 1.0, -2.0])).hex()
    '0000ff7f0180'
    """
    scaled = (samples.detach().float().cpu().clamp(-1, 1) * 32767).round()
    return scaled.to(torch.int16).numpy().astype("<i2").tobytes()


def wav_bytes(samples: Tensor, sample_rate: int) -> bytes:
    """Return samples as a mono WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(pcm16(samples))
    return file.getvalue()


OmniPrompt = str | Sequence[int] | Mapping[str, Any]
"""A string, token ids, or a mapping with `prompt` or `prompt_token_ids`. A mapping may also have
`audio` and `images` (one item or a list), or `features` (tensors of transformers' processor).
Sounds are arrays `[samples]`: floats from -1 to 1, int16 or int32. Images are Pillow images or
arrays."""


@dataclass(kw_only=True)
class OmniParams:
    """The parameters of one request.

    text, speech: sampling parameters of the thinker and of the talker; None takes the model's
    defaults. voice: None takes the first voice. audio: False generates only text. seed: seed of a
    vocoder that starts from noise. Raises RequestError for a value outside its range.
    """

    text: SamplingParams | None = None
    speech: SamplingParams | None = None
    voice: str | None = None
    audio: bool = True
    seed: int = option(0, allowed=SEEDS)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)


@dataclass(frozen=True, slots=True, eq=False)
class SpokenPrompt:
    """A tokenized prompt, and the features of its audio and images."""

    prepared: PreparedPrompt
    features: Mapping[str, Tensor]


@dataclass(eq=False)
class OmniOutput:
    """A request and its answer so far.

    token_ids: the token ids of the text. codes: the codes of the speech, int64 `[codes, ...]`.
    metrics: the metrics of the stages that have ended, by name. finish_reason: None while the
    request runs, then "abort" or the reason of the thinker ("stop" or "length").
    prompt_token_ids: the prompt, with one placeholder for each embedding of a sound or image.
    """

    request_id: str
    text: str
    token_ids: list[int]
    codes: Tensor
    audio_chunks: tuple[Tensor, ...]
    sample_rate: int
    finished: bool
    finish_reason: str | None
    metrics: Mapping[str, StageMetrics] = field(default_factory=dict)
    prompt_token_ids: Sequence[int] = ()

    @property
    def audio(self) -> Tensor:
        """The waveform so far, float32 `[samples]`."""
        return torch.cat(self.audio_chunks) if self.audio_chunks else torch.empty(0)

    @property
    def seconds(self) -> float:
        """Duration of the waveform in seconds."""
        return sum(map(len, self.audio_chunks)) / self.sample_rate

    def pcm16(self) -> bytes:
        """Return the waveform as 16-bit PCM."""
        return pcm16(self.audio)

    def wav(self) -> bytes:
        """Return the waveform as a WAV file."""
        return wav_bytes(self.audio, self.sample_rate)

    def save_wav(self, path: str | Path) -> None:
        """Write the waveform to a WAV file. Raises OSError."""
        Path(path).write_bytes(self.wav())
