"""Log-probabilities of tokens, as the model gave them: before temperature and penalties."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprob(NamedTuple):
    """A token's log-probability and its rank among all tokens, 1 being the likeliest."""

    token_id: int
    logprob: float
    rank: int


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: int
) -> list[tuple[TokenLogprob, ...]]:
    """For each row of `logits` `[rows, vocab]` its token's entry, then the `top` likeliest ones'.

    The token's own entry stands first and is not repeated. A `top` of -1 stands for all tokens.
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    width = logprobs.shape[-1]
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(1) + 1
    best = logprobs.topk(min(top, width) if top >= 0 else width, -1)
    rows = zip(
        token_ids,
        own.squeeze(1).tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        (
            TokenLogprob(token_id, logprob, rank),
            *(
                TokenLogprob(other, value, place)
                for place, (other, value) in enumerate(zip(ids, values, strict=True), 1)
                if other != token_id
            ),
        )
        for token_id, logprob, rank, ids, values in rows
    ]
