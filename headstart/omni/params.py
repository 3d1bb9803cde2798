"""Inputs and outputs of an omni model: prompts, parameters, answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.engine.params import SEEDS, SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError
from headstart.frontend.vllm_api.signatures import check_calls
from headstart.omni.audio import pcm16, save_wav, wav_bytes
from headstart.omni.stage import StageMetrics
from headstart.validation import check_fields, option

__all__ = ["OmniOutput", "OmniParams", "OmniPrompt", "SpokenPrompt"]

OmniPrompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping: `prompt` or `prompt_token_ids`, and optionally `audio` and
`images`, one or a list, or `features` (tensors of transformers' processor). Sounds are arrays
`[samples]`: floats from -1 to 1, int16 or int32. Images are Pillow's."""


@check_calls(RequestError)
@dataclass(kw_only=True)
class OmniParams:
    """The parameters of one request.

    text, speech: sampling of the thinker and of the talker; None takes the model's defaults. voice:
    None takes the first. audio: False gives only text. seed: of a vocoder that begins with noise.
    Raises RequestError for a value outside its range; of one that was set later, the call does.
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
    """A prompt, ready for the thinker, and the tensors of its audio and images."""

    prepared: PreparedPrompt
    features: Mapping[str, Tensor]


@dataclass(eq=False)
class OmniOutput:
    """A request and its answer so far.

    token_ids: of the text. codes: of the speech, int64 `[codes, ...]`. metrics: those of
    the stages that have ended, by name. finish_reason: None while it runs, else the thinker's
    ("stop", "length") or "abort". prompt_token_ids: with a token for each embedding of a sound or
    an image.
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
        """The waveform as 16-bit PCM."""
        return pcm16(self.audio)

    def wav(self) -> bytes:
        """The waveform as a WAV file."""
        return wav_bytes(self.audio, self.sample_rate)

    def save_wav(self, path: str | Path) -> None:
        """Write the waveform to a WAV file."""
        save_wav(path, self.audio, self.sample_rate)
