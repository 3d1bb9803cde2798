"""The sampler: the next token of each request, from its logits and its parameters.

Warpers of temperature sampling cut off unlikely tokens; log-probabilities are of the raw logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.engine.logits import ALL_BANNED, TokenMask, change_logits
from headstart.engine.logits import LogitsProcessor as RowProcessor
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, NoTokenError
from headstart.weights.greedy_head import greedy_tokens

LIKELIEST = 1024  # tokens that top-p looks at before it sorts all
_OUT = float("-inf")


def penalise_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative scores of tokens `seen`, int64 `[rows, any]` (CTRL)."""
    width = scores.shape[-1]
    # Ids that the LM head does not have share a column, which is dropped.
    seen = seen.clamp(max=width)
    padded = torch.nn.functional.pad(scores, (0, 1))
    changed = padded.gather(1, seen)
    changed = torch.where(changed < 0, changed * penalty, changed / penalty)
    return padded.scatter(1, seen, changed)[..., :width]


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Leave out tokens of less than `min_p` times the probability of the likeliest one."""
    likely = scores.softmax(-1)
    out = likely < min_p * likely.amax(-1, keepdim=True)
    out.scatter_(-1, likely.topk(1).indices, False)
    return scores.masked_fill(out, _OUT)


def keep_top_k(scores: Tensor, count: int) -> Tensor:
    """Keep the `count` likeliest tokens, and those that are as likely as the last of them."""
    least = scores.topk(min(count, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < least, _OUT)


def keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens that have the probability `top_p` together, one at least.

    From the top: mostly a few tokens have it. Sorting all of a vocabulary of 152,000 takes 11 ms a
    row, finding its 1,024 likeliest 1 ms. Where those are not enough, all is sorted.
    """
    best = scores.softmax(-1).topk(min(LIKELIEST, scores.shape[-1]))
    before = best.values.cumsum(-1) - best.values
    if not bool((before[:, -1] >= top_p).all()):
        return _sort_top_p(scores, top_p)
    chosen = best.indices.masked_fill(before >= top_p, -1)
    chosen = torch.where(chosen < 0, best.indices[:, :1], chosen)
    kept = torch.full_like(scores, _OUT)
    return kept.scatter(-1, chosen, scores.gather(-1, chosen))


def _sort_top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, places = scores.sort(descending=False)
    out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    out[..., -1:] = False
    return scores.masked_fill(out.scatter(1, places, out), _OUT)


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


class SampledToken(NamedTuple):
    """A token, and its log-probabilities if asked for: its own entry first in `top`."""

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
    processors: tuple[RowProcessor, ...] = ()
    _is_greedy: bool = field(init=False)
    _is_raw: bool = field(init=False)
    masks: tuple[TokenMask, ...] = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self._is_greedy = params.is_greedy and params.logprobs is None and not params.has_penalties
        self._is_raw = self._is_greedy and not self.processors
        self.masks = tuple(one for one in self.processors if isinstance(one, TokenMask))

    @property
    def is_plain(self) -> bool:
        """True if the argmax of the raw logits is all that is wanted."""
        return self._is_raw and len(self.output_token_ids) >= self.params.min_tokens

    @property
    def is_masked_argmax(self) -> bool:
        """True if the argmax of the raw logits of allowed tokens is all that is wanted."""
        return self.takes_argmax and len(self.masks) == len(self.processors)

    @property
    def takes_argmax(self) -> bool:
        """True if the argmax is taken, once the processors have changed the logits."""
        return self._is_greedy and len(self.output_token_ids) >= self.params.min_tokens

    @property
    def is_complete(self) -> bool:
        """Whether a processor lets nothing follow but the end."""
        return any(processor.complete for processor in self.processors)

    def accept(self, token_id: int) -> bool:
        """Tell the processors of a token that the answer took; whether it is complete with it."""
        for processor in self.processors:
            processor.accept(token_id)
        return self.is_complete

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that would end the answer before it has `min_tokens`."""
        if len(self.output_token_ids) >= self.params.min_tokens or self.is_complete:
            return frozenset()
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.params.stop_token_ids or ())


class Sampler:
    """Chooses tokens. `vocab_size` is the width of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: Tensor, states: Sequence[SamplingState]
    ) -> list[SampledToken | EngineError]:
        """The next token of each row of `logits` float32 `[rows, vocab]`, or why there is none.

        Requests that only want the likeliest token cost one argmax together. A row that cannot be
        sampled changes no other row, nor what another is drawn with. Rows of requests with
        processors are changed in place.
        """
        if any(state.processors for state in states):
            return self._sample_changed(logits, states)
        return [
            self.accept(token_id)
            if state.is_plain or token_id < 0
            else self._choose_safely(logits[row : row + 1], state)
            for row, (token_id, state) in enumerate(zip(greedy_tokens(logits), states, strict=True))
        ]

    def _sample_changed(
        self, logits: Tensor, states: Sequence[SamplingState]
    ) -> list[SampledToken | EngineError]:
        """As `sample`, for rows of which some have processors. Log-probabilities are raw."""
        raw = {
            row: logits[row : row + 1].clone()
            for row, state in enumerate(states)
            if state.processors and state.params.logprobs is not None
        }
        failed = change_logits(logits, [state.processors for state in states])
        chosen: list[SampledToken | EngineError] = []
        for row, (token_id, state) in enumerate(zip(greedy_tokens(logits), states, strict=True)):
            one = logits[row : row + 1]
            if row in failed:
                chosen.append(failed[row])
            elif token_id < 0 and state.processors and bool((one == float("-inf")).all()):
                chosen.append(NoTokenError(ALL_BANNED))
            elif state.takes_argmax or token_id < 0:
                chosen.append(self.accept(token_id))
            else:
                chosen.append(self._choose_safely(one, state, raw.get(row)))
        return chosen

    def accept(self, token_id: int) -> SampledToken | EngineError:
        """The choice from a greedy token; -1 stands for logits that are not finite."""
        if token_id < 0:
            return EngineError(
                "the request's logits are not finite: the model's weights are damaged, or "
                "overflow in this dtype"
            )
        return SampledToken(token_id, None, ())

    def _choose_safely(
        self, logits: Tensor, state: SamplingState, raw: Tensor | None = None
    ) -> SampledToken | EngineError:
        try:
            return self._choose(logits, state, logits if raw is None else raw)
        except EngineError as error:
            return error
        except Exception as error:  # whatever torch says of such numbers
            failed = EngineError(f"sampling failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed

    def _choose(self, logits: Tensor, state: SamplingState, raw: Tensor) -> SampledToken:
        """One row `[1, vocab]` that wants more than its largest logit.

        raw: the logits of its log-probabilities.
        """
        params = state.params
        scores = self.process(logits, state)
        if params.is_greedy:
            [token_id] = greedy_tokens(scores)
            if token_id < 0:
                raise NoTokenError(ALL_BANNED)
        else:
            if state.banned_token_ids and bool((scores == float("-inf")).all()):
                raise NoTokenError(ALL_BANNED)
            weights = scores.softmax(-1).cpu()
            token_id = int(torch.multinomial(weights, 1, generator=state.generator))
        if params.logprobs is None:
            return SampledToken(token_id, None, ())
        [entries] = token_logprobs(raw, [token_id], params.logprobs)
        return SampledToken(token_id, entries[0].logprob, entries)

    def process(self, logits: Tensor, state: SamplingState) -> Tensor:
        """The scores `[1, vocab]` whose softmax is drawn from, or whose largest is taken."""
        params = state.params
        scores = logits
        banned = [token_id for token_id in state.banned_token_ids if token_id < self._vocab_size]
        if banned:
            scores = scores.clone()
            scores[:, banned] = float("-inf")
        if params.has_penalties:
            scores = self._penalise(scores, state)
        if params.is_greedy:
            return scores
        if params.temperature != 1:
            scores = scores / float(params.temperature)
        if params.min_p > 0:
            scores = keep_min_p(scores, float(params.min_p))
        if params.top_k > 0:
            scores = keep_top_k(scores, params.top_k)
        if params.top_p < 1:
            scores = keep_top_p(scores, float(params.top_p))
        return scores

    def _penalise(self, scores: Tensor, state: SamplingState) -> Tensor:
        """Repetition over prompt and answer (CTRL), presence and frequency over the answer."""
        params = state.params
        if params.repetition_penalty != 1:
            seen = torch.tensor([[*state.prompt_token_ids, *state.output_token_ids]])
            # Beyond this range float32 logits overflow, and the draw would fail the whole step.
            factor = min(max(float(params.repetition_penalty), 1e-9), 1e9)
            scores = penalise_repetition(scores, seen.to(scores.device), factor)
        if state.output_token_ids and (params.presence_penalty or params.frequency_penalty):
            answer = torch.tensor(state.output_token_ids, device=scores.device)
            counts = torch.bincount(answer, minlength=self._vocab_size).to(scores.dtype)
            scores = scores - params.frequency_penalty * counts
            scores = scores - params.presence_penalty * (counts > 0)
        return scores
