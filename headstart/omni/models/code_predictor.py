"""The code predictor of a talker with several codebooks: a frame's codes after the first.

A small decoder predicts them one after another from the talker's hidden row and the first code. It
keeps no state from one frame to the next:

    position   0             1              2              3 ...
    input      talker's row  first code     second code    third code
    predicts                 second code    third code     ...
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

__all__ = ["Choose", "CodePredictor"]

Choose = Callable[[Tensor], Sequence[int]]
"""Chooses one code for each row of logits float32 `[rows, codes]`."""


class CodePredictor:
    """transformers' predictor for many frames at once. `others`: codes after a frame's first."""

    def __init__(
        self, predictor: Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration
    ) -> None:
        self._predictor: Any = predictor
        self.others = int(predictor.config.num_code_groups) - 1
        self.vocab_size = int(predictor.config.vocab_size)

    def embed(self, codes: Tensor) -> Tensor:
        """Embeddings `[n, others, hidden]` of codes int64 `[n, others]`."""
        tables = self._predictor.get_input_embeddings()
        return torch.stack([table(codes[:, at]) for at, table in enumerate(tables)], dim=1)

    def predict(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """The other codes int64 `[n, others]` of frames, on the host.

        `hidden` are the talker's rows `[n, hidden]` that gave the first codes, `first` those
        codes' embeddings `[n, hidden]`.
        """
        tables = self._predictor.get_input_embeddings()
        past, found = None, []
        with torch.inference_mode():
            inputs = torch.stack([hidden.to(first), first], dim=1)
            for table, head in zip(tables, self._predictor.lm_head, strict=True):
                output = self._predictor.model(
                    inputs_embeds=inputs, past_key_values=past, use_cache=True
                )
                past = output.past_key_values
                codes = torch.tensor(choose(head(output.last_hidden_state[:, -1]).float()))
                found.append(codes)
                inputs = table(codes.to(first.device))[:, None]
        return torch.stack(found, dim=1)
