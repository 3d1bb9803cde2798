"""The outputs of a request, with vLLM's names."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from headstart.cache import MissExplanation
from headstart.engine.adapter_names import LoRARequest
from headstart.engine.params import RequestOutputKind


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its rank (1 is the likeliest), and its text.

    decoded_token: None without a tokenizer, or with `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


_EPOCH = time.time() - time.perf_counter()


def _add(start: float | None, seconds: float | None) -> float | None:
    return None if start is None or seconds is None else start + seconds


Logprobs = dict[int, Logprob]
"""Entries by token id: the chosen token first, then the likeliest tokens."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds from its arrival.

    queue: until its first step began. time_to_first_token: until its first token.
    time_per_token: mean seconds between tokens; None before the second token. total: until its last
    token so far. queued_ts: its arrival on the clock of `time.perf_counter`. num_generation_tokens:
    tokens of its first answer so far. num_drafted_tokens: number of tokens drafted for its answers
    so far. num_accepted_tokens: number of drafted tokens that are in the answers.
    """

    queue: float | None
    time_to_first_token: float | None
    time_per_token: float | None
    total: float | None
    queued_ts: float | None = None
    num_generation_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        return self.queue

    @property
    def first_token_latency(self) -> float | None:
        return self.time_to_first_token

    # Times on the clock of `queued_ts`, then times on the clock of `time.time`.

    @property
    def scheduled_ts(self) -> float | None:
        return _add(self.queued_ts, self.queue)

    @property
    def first_token_ts(self) -> float | None:
        return _add(self.queued_ts, self.time_to_first_token)

    @property
    def last_token_ts(self) -> float | None:
        return _add(self.queued_ts, self.total)

    @property
    def arrival_time(self) -> float | None:
        return _add(_EPOCH, self.queued_ts)

    @property
    def first_scheduled_time(self) -> float | None:
        return _add(_EPOCH, self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        return _add(_EPOCH, self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        return _add(_EPOCH, self.last_token_ts)


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    finish_reason: None before the end, then "stop" (a stop string or id, or the end of the text),
    "length" or "abort". stop_reason: the stop string or id; None for the end of the text.
    logprobs: for each token, log-probabilities of this token and of the likeliest tokens, by id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: LoRARequest | None = None

    # Fields of vLLM that are always None.
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        """Return True if the answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class ImageUse:
    """An image in a prompt.

    digest: SHA-256 of everything that determines its embeddings, in hex. position: the position of
    its first placeholder. num_tokens: number of placeholders. is_similar: it was replaced by an
    earlier, similar image, which the request allowed by `similar_images`.
    """

    digest: str
    position: int
    num_tokens: int
    is_similar: bool = False


@dataclass
class RequestOutput:
    """A request and its answers so far; in a stream with `output_kind=DELTA`, the new part.

    num_cached_tokens: number of prompt tokens that hit, for the first answer. loaded_tokens: number
    of these tokens that were loaded for this request, by tier ("disk", "remote"). why_missed: the
    reason why no more tokens hit. prompt_logprobs: log-probabilities of the prompt's tokens, with
    None for the first token. images: the prompt's images, in order.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(None, None, None, None))
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    why_missed: MissExplanation | None = None
    images: tuple[ImageUse, ...] = ()
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)

    # Fields of vLLM that are always None.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    @property
    def num_loaded_tokens(self) -> int:
        """Cached prompt tokens that came from disk or another machine for this request."""
        return sum(self.loaded_tokens.values())

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Number of prompt tokens by their source: "pool", tiers, "computed"."""
        pool = self.num_cached_tokens - self.num_loaded_tokens
        computed = len(self.prompt_token_ids) - self.num_cached_tokens
        return {"pool": pool, **self.loaded_tokens, "computed": computed}


Output = TypeVar("Output", CompletionOutput, RequestOutput)


def _changed(output: Output, **fields: Any) -> Output:
    """Return a copy with these fields, faster than `dataclasses.replace`."""
    changed = object.__new__(type(output))
    changed.__dict__.update(output.__dict__, **fields)
    return changed


class OutputConverter:
    """Converter of a request's cumulative outputs to the `output_kind` of its stream."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._last: dict[int, CompletionOutput] = {}  # the last converted outputs
        self._is_first = True

    @property
    def wants_every_step(self) -> bool:
        """True if the stream has outputs before the last."""
        return self._kind is not RequestOutputKind.FINAL_ONLY

    def next(self, output: RequestOutput) -> RequestOutput | None:
        """Return the stream's next output, or None if it has nothing new."""
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return output if output.finished else None
        if self._kind is RequestOutputKind.CUMULATIVE:
            return output
        rows = output.prompt_logprobs
        lacks_rows = rows is not None and len(rows) < len(output.prompt_token_ids)
        if lacks_rows and self._is_first and not output.finished:
            return None  # the first output has all prompt log-probabilities, so wait for them
        new = [part for part in map(self._new_part, output.outputs) if part is not None]
        if not new and not output.finished:
            return None
        self._last = {answer.index: answer for answer in output.outputs}
        first, self._is_first = self._is_first, False
        return _changed(output, outputs=new, prompt_logprobs=rows if first else None)

    def _new_part(self, output: CompletionOutput) -> CompletionOutput | None:
        last = self._last.get(output.index)
        if last is None:
            return _changed(output)  # a copy that the caller may change
        done = len(last.token_ids)
        is_same = last.finished() or done == len(output.token_ids)
        if is_same and last.finish_reason == output.finish_reason:
            return None
        return _changed(
            output,
            text=output.text[len(last.text) :],
            token_ids=output.token_ids[done:],
            logprobs=output.logprobs[done:] if output.logprobs is not None else None,
        )
