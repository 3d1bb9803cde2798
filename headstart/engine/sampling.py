"""The sampler, which chooses the next token of each request by its logits and parameters.

Top-k, top-p and min-p change only the sampling; log-probabilities are computed from the raw logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.engine.logits import ALL_BANNED, LogitsProcessor, TokenMask, apply_processors
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, NoTokenError, engine_error
from headstart.weights.greedy_head import greedy_tokens

LIKELIEST = 1024  # tokens that top-p examines before it sorts all
NOT_FINITE = "are not finite: the model's weights are damaged, or overflow in this dtype"
_REMOVED = float("-inf")


def apply_repetition_penalty(scores: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty of CTRL to the scores of `token_ids` int64 `[rows, any]`.

    Divide positive scores by the penalty, and multiply negative scores by it.
    """
    width = scores.shape[-1]
    # Ids beyond the logits share an extra column, which is dropped at the end.
    columns = token_ids.clamp(max=width)
    padded = torch.nn.functional.pad(scores, (0, 1))
    changed = padded.gather(1, columns)
    changed = torch.where(changed < 0, changed * penalty, changed / penalty)
    return padded.scatter(1, columns, changed)[..., :width]


def apply_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Remove tokens with less than `min_p` times the probability of the likeliest token."""
    probabilities = scores.softmax(-1)
    is_removed = probabilities < min_p * probabilities.amax(-1, keepdim=True)
    is_removed.scatter_(-1, probabilities.topk(1).indices, False)
    return scores.masked_fill(is_removed, _REMOVED)


def apply_top_k(scores: Tensor, count: int) -> Tensor:
    """Remove all tokens less likely than the `count` likeliest."""
    threshold = scores.topk(min(count, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < threshold, _REMOVED)


def apply_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Remove all tokens outside the smallest set whose probabilities sum to `top_p`.

    At least one token stays. The set is usually small. So all tokens are sorted only if the set is
    not within the first `LIKELIEST` tokens.
    """
    best = scores.softmax(-1).topk(min(LIKELIEST, scores.shape[-1]))
    sum_before = best.values.cumsum(-1) - best.values
    if not bool((sum_before[:, -1] >= top_p).all()):
        ordered, columns = scores.sort(descending=False)
        is_removed = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        is_removed[..., -1:] = False
        return scores.masked_fill(is_removed.scatter(1, columns, is_removed), _REMOVED)
    columns = best.indices.masked_fill(sum_before >= top_p, -1)
    columns = torch.where(columns < 0, best.indices[:, :1], columns)
    scores_of_best = torch.full_like(scores, _REMOVED)
    return scores_of_best.scatter(-1, columns, scores.gather(-1, columns))


class TokenLogprob(NamedTuple):
    """A token's log-probability and its rank among all tokens, 1 being the likeliest."""

    token_id: int
    logprob: float
    rank: int


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: int
) -> list[tuple[TokenLogprob, ...]]:
    """Return the log-probabilities of each row's token, then those of its `top` likeliest tokens.

    `logits` is `[rows, vocab]`. If the row's token is among the likeliest, it is not
    repeated. A `top` of -1 means all tokens.
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    width = logprobs.shape[-1]
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    token_values = logprobs.gather(1, tokens)
    ranks = (logprobs > token_values).sum(1) + 1
    best = logprobs.topk(min(top, width) if top >= 0 else width, -1)
    entries = []
    columns = (token_values.squeeze(1), ranks, best.indices, best.values)
    rows = zip(token_ids, *(column.tolist() for column in columns), strict=True)
    for token_id, logprob, rank, ids, values in rows:
        best_entries = map(TokenLogprob, ids, values, range(1, len(ids) + 1))
        likeliest = (entry for entry in best_entries if entry.token_id != token_id)
        entries.append((TokenLogprob(token_id, logprob, rank), *likeliest))
    return entries


class SampledToken(NamedTuple):
    """A token, and its log-probabilities if requested; `top` begins with the token's entry."""

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True, eq=False)
class SamplingState:
    """The sampling state of one request; `output_token_ids` grows with the answer."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    generator: torch.Generator | None
    eos_token_ids: frozenset[int]
    processors: tuple[LogitsProcessor, ...] = ()
    masks: tuple[TokenMask, ...] = field(init=False)
    _is_greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self._is_greedy = params.is_greedy and params.logprobs is None and not params.has_penalties
        self.masks = tuple(p for p in self.processors if isinstance(p, TokenMask))

    @property
    def takes_argmax(self) -> bool:
        """True if the next token is the argmax of the processed logits."""
        return self._is_greedy and len(self.output_token_ids) >= self.params.min_tokens

    @property
    def is_masked_argmax(self) -> bool:
        """True if the next token is the allowed token with the largest raw logit."""
        return self.takes_argmax and len(self.masks) == len(self.processors)

    @property
    def is_complete(self) -> bool:
        """True if a processor allows only the end of the answer."""
        return any(processor.complete for processor in self.processors)

    def accept(self, token_id: int) -> bool:
        """Pass a token of the answer to the processors; return True if it completes the answer."""
        for processor in self.processors:
            processor.accept(token_id)
        return self.is_complete

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """The tokens that end the answer, until it has `min_tokens`."""
        if len(self.output_token_ids) >= self.params.min_tokens or self.is_complete:
            return frozenset()
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.params.stop_token_ids or ())


class Sampler:
    """Sampler of tokens. `vocab_size` is the width of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: Tensor, states: Sequence[SamplingState]
    ) -> list[SampledToken | EngineError]:
        """Return the next token of each row of `logits` float32 `[rows, vocab]`, or its error.

        Requests that only need the likeliest token share one argmax. A row that cannot be sampled
        does not affect other rows or their random numbers. Processors change their rows in place;
        log-probabilities are those of the raw logits.
        """
        raw: dict[int, Tensor] = {}
        failed: dict[int, EngineError] = {}
        if any(state.processors for state in states):
            raw = {
                row: logits[row : row + 1].clone()
                for row, state in enumerate(states)
                if state.processors and state.params.logprobs is not None
            }
            failed = apply_processors(logits, [state.processors for state in states])
        results: list[SampledToken | EngineError] = []
        for row, (token_id, state) in enumerate(zip(greedy_tokens(logits), states, strict=True)):
            if row in failed:
                results.append(failed[row])
            elif token_id < 0 and state.processors and bool((logits[row] == _REMOVED).all()):
                results.append(NoTokenError(ALL_BANNED))
            elif state.takes_argmax or token_id < 0:
                results.append(self.accept(token_id))
            else:
                scores = logits[row : row + 1]
                results.append(self._choose(scores, state, raw.get(row, scores)))
        return results

    def accept(self, token_id: int) -> SampledToken | EngineError:
        """Return the result for a greedy token; -1 means that the logits are not finite."""
        if token_id < 0:
            return EngineError(f"the request's logits {NOT_FINITE}")
        return SampledToken(token_id, None, ())

    def _choose(
        self, logits: Tensor, state: SamplingState, raw: Tensor
    ) -> SampledToken | EngineError:
        """Choose a token from a row `[1, vocab]` that needs more than its argmax.

        raw: the unprocessed logits, for log-probabilities.
        """
        params = state.params
        try:
            scores = self.process(logits, state)
            if params.is_greedy:
                [token_id] = greedy_tokens(scores)
                if token_id < 0:
                    return NoTokenError(ALL_BANNED)
            else:
                if state.banned_token_ids and bool((scores == _REMOVED).all()):
                    return NoTokenError(ALL_BANNED)
                weights = scores.softmax(-1).cpu()
                token_id = int(torch.multinomial(weights, 1, generator=state.generator))
            if params.logprobs is None:
                return SampledToken(token_id, None, ())
            [entries] = token_logprobs(raw, [token_id], params.logprobs)
            return SampledToken(token_id, entries[0].logprob, entries)
        except Exception as error:  # torch raises for some logits
            return engine_error("sampling failed", error)

    def process(self, logits: Tensor, state: SamplingState) -> Tensor:
        """Return the scores `[1, vocab]` for drawing a token or taking the argmax."""
        params, scores = state.params, logits
        banned = [token_id for token_id in state.banned_token_ids if token_id < self._vocab_size]
        if banned:
            scores = scores.clone()
            scores[:, banned] = _REMOVED
        if params.has_penalties:
            scores = self._apply_penalties(scores, state)
        if params.is_greedy:
            return scores
        if params.temperature != 1:
            scores = scores / float(params.temperature)
        if params.min_p > 0:
            scores = apply_min_p(scores, float(params.min_p))
        if params.top_k > 0:
            scores = apply_top_k(scores, params.top_k)
        if params.top_p < 1:
            scores = apply_top_p(scores, float(params.top_p))
        return scores

    def _apply_penalties(self, scores: Tensor, state: SamplingState) -> Tensor:
        """Apply the repetition penalty to prompt and answer, the other penalties to the answer."""
        params = state.params
        if params.repetition_penalty != 1:
            token_ids = torch.tensor([[*state.prompt_token_ids, *state.output_token_ids]])
            # Beyond this range float32 logits overflow, and the draw would fail the whole step.
            factor = min(max(float(params.repetition_penalty), 1e-9), 1e9)
            scores = apply_repetition_penalty(scores, token_ids.to(scores.device), factor)
        if state.output_token_ids and (params.presence_penalty or params.frequency_penalty):
            answer = torch.tensor(state.output_token_ids, device=scores.device)
            counts = torch.bincount(answer, minlength=self._vocab_size).to(scores.dtype)
            scores = scores - params.frequency_penalty * counts
            scores = scores - params.presence_penalty * (counts > 0)
        return scores
