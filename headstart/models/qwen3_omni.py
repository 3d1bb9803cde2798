"""Qwen3-Omni: what its thinker hands over, and its causal vocoder, as parts of stages.

The thinker gives one row a token, from where the talker takes it: text from before the first
layer, what was heard from after a middle one (`accept_hidden_layer`). The vocoder is causal, so
frames of a code need the codes before it and none after; it looks back over a limited context.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeCode2Wav, Qwen3OmniMoeThinkerForConditionalGeneration

from headstart.models.stage_decoder import PassTensors, StageDecoder, StageParts

__all__ = ["CausalVocoder", "thinker_decoder"]


def thinker_decoder(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    accept_layer: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> StageDecoder:
    """Writes; gives `handed` `[tokens, hidden]`.

    Where a token has its own embedding, that; elsewhere the row after `accept_layer` layers.
    """

    def give(tensors: PassTensors) -> Mapping[str, Tensor]:
        own = tensors.is_own[:, None]
        return {"handed": torch.where(own, tensors.layers[0], tensors.layers[accept_layer])}

    return StageDecoder(
        StageParts(
            text_model=thinker.model.language_model,
            head=thinker.lm_head,
            give=give,
            eos_token_ids=eos_token_ids,
            needs_layers=True,
        )
    )


class CausalVocoder:
    """Frames of codes, by blocks; the function of a `FramesStage`.

    `ratio` samples a code. Its convolutions give `delay` samples less than that at the end of
    whatever they are given, since those need the next code. So all comes that much later: a wave
    begins with `delay` samples of silence, and joins are without a gap.
    """

    def __init__(self, code2wav: Qwen3OmniMoeCode2Wav) -> None:
        self._code2wav: Any = code2wav
        self.ratio = int(code2wav.total_upsample)
        quantizers = int(code2wav.config.num_quantizers)
        self.delay = 2 * self.ratio - len(self._wave(torch.zeros(2, quantizers, dtype=torch.int64)))

    def __call__(self, request: object, codes: Tensor, context: int) -> Tensor:
        """Samples float32 `[(n - context) * ratio]` of codes int64 `[n, quantizers]`.

        The first `context` codes are looked back at alone.
        """
        wave = self._wave(codes)
        if not context:
            return torch.cat([torch.zeros(self.delay), wave])
        return wave[context * self.ratio - self.delay :]

    def _wave(self, codes: Tensor) -> Tensor:
        with torch.inference_mode():
            wave: Tensor = self._code2wav(codes.T[None].to(self._code2wav.device))
        return wave.reshape(-1).float().cpu()
