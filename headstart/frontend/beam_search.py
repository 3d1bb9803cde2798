"""Beam search over an engine with a prefix cache: a beam is a prompt of token ids.

Each step extends every live beam by one token and retains the likeliest extensions. The beams of a
step are prompts that differ only in their last tokens, so each hits the cache except for its last
block. A step of k beams thus computes about k tokens instead of k prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from headstart.engine.outputs import Logprobs, RequestOutput
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError
from headstart.validation import Number, check_absent, check_fields, describe, option

if TYPE_CHECKING:
    from headstart.engine.adapter_names import LoRARequest
    from headstart.frontend.frontend import Frontend

MAX_BEAMS = 256


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, named as in vLLM. Raises RequestError.

    length_penalty: a beam's score is the sum of its log-probabilities, divided by its number of
    tokens to the power of this penalty. include_stop_str_in_output: retain the token that ended the
    text. temperature and watermarking have no effect: log-probabilities are computed from the raw
    logits. structured_outputs and allowed_token_ids must be None.
    """

    beam_width: int = option(allowed=Number(int, 1, MAX_BEAMS))
    max_tokens: int = option(allowed=Number(int, 1))
    ignore_eos: bool = False
    temperature: float = option(0.0, allowed=Number(float, 0))
    length_penalty: float = option(1.0, allowed=Number(float, -100, 100))
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    watermarking: object = None
    structured_outputs: object = None
    allowed_token_ids: object = None

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        absent = ("structured_outputs", "allowed_token_ids")
        check_absent({name: getattr(self, name) for name in absent})


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. tokens: the tokens of prompt and answer. text: the text of all tokens."""

    tokens: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def score(self, length_penalty: float) -> float:
        """Return the score of a beam; the token that ends the text counts as a token."""
        count = max(len(self.logprobs), 1)
        return float(self.cum_logprob / count**length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The live and ended beams of one prompt."""

    prompt: Any
    adapter: Any
    priority: int
    live: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    generate: Callable[..., list[RequestOutput]],
    frontend: Frontend,
    prompts: Sequence[Any],
    params: BeamSearchParams,
    options: Sequence[tuple[SamplingParams, str | LoRARequest | None, int]],
    salt: str | None,
) -> list[BeamSearchOutput]:
    """Return the best beams of each prompt. Raises RequestError.

    generate: the method `generate` of the `LLM` that has this frontend. options: the
    sampling parameters (without effect), adapter and priority of each prompt.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params are {describe(params)}; allowed: a BeamSearchParams")
    for prompt in prompts:
        media = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if media is not None and media != {}:
            raise RequestError("beam search does not support images; allowed: text and token ids")
    searches = [
        _Search(prompt, adapter, priority, [BeamSearchSequence([])])
        for prompt, (_, adapter, priority) in zip(prompts, options, strict=True)
    ]
    eos = frozenset() if params.ignore_eos else frontend.facts.eos_token_ids
    next_token = SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        detokenize=False,
        ignore_eos=True,
    )
    for _ in range(params.max_tokens):
        beams = [(search, beam) for search in searches for beam in search.live]
        if not beams:
            break
        outputs = generate(
            [_prompt_of(search, beam, salt) for search, beam in beams],
            next_token,
            use_tqdm=False,
            cache_salt=salt,
            lora_request=[search.adapter for search, _ in beams],
            priority=[search.priority for search, _ in beams],
        )
        rest = iter(outputs)
        for search in searches:
            _extend(search, [next(rest) for _ in search.live], params, eos)
    return [_best(frontend, search, params) for search in searches]


def _prompt_of(search: _Search, beam: BeamSearchSequence, salt: str | None) -> Any:
    if not beam.logprobs:
        return search.prompt
    prompt_salt = search.prompt.get("cache_salt") if isinstance(search.prompt, dict) else None
    cache_salt = salt if prompt_salt is None else prompt_salt
    return {"prompt_token_ids": beam.tokens, "cache_salt": cache_salt}


def _extend(
    search: _Search,
    outputs: Sequence[RequestOutput],
    params: BeamSearchParams,
    eos: frozenset[int],
) -> None:
    """Replace the live beams by the likeliest beams that are one token longer.

    A beam that an end-of-text token ends is added to `ended` instead.
    """
    candidates = []
    for beam, output in zip(search.live, outputs, strict=True):
        [logprobs] = output.outputs[0].logprobs or [{}]
        candidates += [
            (beam.cum_logprob + entry.logprob, token_id, logprobs, output.prompt_token_ids, beam)
            for token_id, entry in logprobs.items()
        ]
    best = nlargest(2 * params.beam_width, candidates, key=lambda candidate: candidate[0])
    search.live = []
    for rank, (total, token_id, logprobs, tokens, beam) in enumerate(best):
        is_end = token_id in eos
        # As in transformers, an end-of-text token counts only among the `beam_width` likeliest.
        if (rank if is_end else len(search.live)) >= params.beam_width:
            continue
        new_tokens = [token_id] if not is_end or params.include_stop_str_in_output else []
        extended = BeamSearchSequence([*tokens, *new_tokens], [*beam.logprobs, logprobs], total)
        if is_end:
            extended.finish_reason, extended.stop_reason = "stop", token_id
        (search.ended if is_end else search.live).append(extended)


def _best(frontend: Frontend, search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    """Return the beams with the best scores, decoded."""
    for beam in search.live:
        beam.finish_reason = "length"
    beams = [*search.ended, *search.live]
    ranked = nlargest(params.beam_width, beams, key=lambda beam: beam.score(params.length_penalty))
    if frontend.tokenizer is not None:
        skip = params.skip_special_tokens
        for beam in ranked:
            beam.text = str(frontend.tokenizer.decode(beam.tokens, skip_special_tokens=skip))
    return BeamSearchOutput(ranked)
