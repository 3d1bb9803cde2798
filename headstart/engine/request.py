"""A request: its prepared prompt, and its progress to the last token.

Most prompts are only token ids. A prompt may also have embeddings for some positions, such as the
placeholders of an image. It may have special position ids, such as the three ids per token of
M-RoPE. The `items` of a prompt identify this content, so that a prompt with other content does not
hit its K/V.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.cache import Mark, MissExplanation, MultiModalItem, Namespace, TokenSequence
from headstart.engine.adapter_names import Adapter, LoRARequest
from headstart.engine.drafts.drafters import DraftSource, StoredReply
from headstart.engine.outputs import (
    CompletionOutput,
    ImageUse,
    Logprob,
    Logprobs,
    RequestMetrics,
    RequestOutput,
)
from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.engine.sampling import SampledToken, SamplingState, TokenLogprob


class PlacedRows(NamedTuple):
    """Embeddings `[tokens, hidden]` of the positions from `position` on."""

    position: int
    rows: Tensor


class EmbeddingSource(Protocol):
    """Embeddings for some positions of a sequence; other positions use their token ids."""

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Return the rows within positions `start` to `stop - 1`.

        May be called several times for the same positions: after a preemption, and in deterministic
        mode, where a step that decodes computes its whole block again.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedEmbeddings:
    """An `EmbeddingSource` with all its rows in memory."""

    parts: Sequence[PlacedRows]

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        for position, rows in self.parts:
            first, last = max(start, position), min(stop, position + len(rows))
            if first < last:
                yield PlacedRows(first, rows[first - position : last - position])


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPositions:
    """Special position ids of a prompt: `table` int64 `[axes, prompt tokens]`.

    A later token, at index p, has the position `p + delta` on every axis.
    """

    table: NDArray[np.int64]
    delta: int

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return position ids int64 `[axes, stop - start]`."""
        in_prompt = self.table[:, start:stop]
        generated = np.arange(start + in_prompt.shape[1], stop) + self.delta
        return np.concatenate([in_prompt, np.tile(generated, (len(self.table), 1))], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class PromptExtras:
    """The parts of a prompt beyond its token ids.

    items: content that is part of the prefix's identity. Their digests must cover all that
    determines embeddings and positions. An item must span all tokens that it affects. embeddings:
    used instead of the token ids. positions: used instead of 0, 1, 2, ...
    """

    items: tuple[MultiModalItem, ...] = ()
    embeddings: EmbeddingSource | None = None
    positions: RotaryPositions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A prompt that needs no more processing.

    text: None if the prompt consists of token ids. images: the prompt's images, for the output.
    """

    token_ids: Sequence[int]
    text: str | None = None
    extras: PromptExtras | None = None
    images: tuple[ImageUse, ...] = ()


TokenText = Callable[[int], str]
"""Returns the text of one token."""


class AnswerText(Protocol):
    """The text of an answer, built in the engine's thread; the engine does not read it."""

    @property
    def text(self) -> str: ...

    @property
    def stop_reason(self) -> str | int | None: ...

    def push(self, token_id: int, total_tokens: int) -> str | None:
        """Add a token; return the finish reason if it is the last."""

    def end(self) -> None:
        """Complete the text: no token follows."""


@dataclass(slots=True, eq=False)
class Request:
    """The progress of one answer: the unit of scheduling.

    group: the user's request, with a `Request` for each of its `n` answers, which share the prompt
    by prefix caching. turn: see `headstart.engine.fair_share`. token_gaps: seconds from each token
    to the next. awaits_writer: at the last admission attempt, another request was computing the
    next block of this prompt. num_read: number of tokens with K/V from earlier steps. num_drafted,
    num_accepted: numbers of drafted and of accepted tokens.
    """

    group: "RequestGroup"
    index: int
    sequence: TokenSequence
    sampling: SamplingState
    text: AnswerText
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_read: int = 0
    missed: MissExplanation | None = None
    num_preemptions: int = 0
    times_bypassed: int = 0
    awaits_writer: bool = False
    turn: float = 0.0
    first_token_time: float | None = None
    last_token_time: float | None = None
    drafts: list[DraftSource] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    token_gaps: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def rank(self) -> tuple[int, float]:
        """The order of scheduling: by priority, and then by the owners' turns."""
        return self.group.priority, self.turn

    @property
    def reads_cache(self) -> bool:
        """True if the prompt may hit cached blocks."""
        return not (self.needs_prompt_logits or self.group.params.skip_reading_prefix_cache)

    @property
    def needs_prompt_logits(self) -> bool:
        """True while log-probabilities of prompt tokens are missing."""
        group = self.group
        if self.index or group.prompt_logprobs is None:
            return False
        return len(group.prompt_logprobs) < len(group.prompt_token_ids)

    def admitted(self, num_cached_tokens: int, missed: MissExplanation) -> None:
        """Record the first admission."""
        if self.missed is None:
            self.num_cached_tokens = num_cached_tokens
            self.missed = missed
            if self.index == 0:
                counts: Counter[str] = Counter()
                for tier, tokens in self.group.loaded:
                    counts[tier] += max(0, min(tokens.stop, num_cached_tokens) - tokens.start)
                self.group.loaded_tokens = dict(+counts)

    def undo_admission(self, start: int) -> None:
        """Undo the first admission, since its step failed. start: number of cached tokens."""
        if start == self.num_cached_tokens and not self.num_preemptions:
            self.missed = None

    def append(self, token: SampledToken, now: float) -> None:
        """Append a token; set `finish_reason` if it is the last. now: the time in seconds."""
        self.sequence.append(token.token_id)
        self.sampling.output_token_ids.append(token.token_id)
        if self.last_token_time is None:
            self.first_token_time = now
        else:
            self.token_gaps.append(now - self.last_token_time)
        self.last_token_time = now
        if self.logprobs is not None and token.logprob is not None:
            self.logprobs.append(self.group.show_logprobs(token.top))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + token.logprob
        reason = self.text.push(token.token_id, len(self.sequence.token_ids))
        if self.sampling.processors and reason != "stop" and self.sampling.accept(token.token_id):
            self.text.end()
            reason = "stop"
        self.finish_reason = reason

    def completion(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=list(self.sampling.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.text.stop_reason,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            cumulative_logprob=self.cumulative_logprob,
            lora_request=self.group.lora_request,
        )

    def metrics(self) -> RequestMetrics:
        arrival, started = self.group.arrival_time, self.group.start_time
        first, last = self.first_token_time, self.last_token_time
        tokens = len(self.sampling.output_token_ids)
        time_per_token = None
        if first is not None and last is not None and tokens > 1:
            time_per_token = (last - first) / (tokens - 1)
        return RequestMetrics(
            queue=None if started is None else started - arrival,
            time_to_first_token=None if first is None else first - arrival,
            time_per_token=time_per_token,
            total=None if last is None else last - arrival,
            queued_ts=arrival,
            num_generation_tokens=tokens,
            num_drafted_tokens=sum(request.num_drafted for request in self.group.requests),
            num_accepted_tokens=sum(request.num_accepted for request in self.group.requests),
        )


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A user's request: a prompt, and the parameters of its `n` answers.

    extras: the parts of the prompt beyond its token ids; None for most prompts. adapter: resolved
    when the request was created. chat: the frontend's data for the next message of a chat. loaded:
    ranges of prompt tokens that a load has written to the pool, with their tiers; the request may
    hit fewer tokens. loaded_tokens: number of loaded tokens that the request hits, by tier.
    token_text: returns the text of a token; None if not needed. prediction: tokens of the answer
    that the client expects. reply: the stored reply to the prompt, if the tiers have one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    extras: PromptExtras | None = None
    images: tuple[ImageUse, ...] = ()
    priority: int = 0
    token_text: TokenText | None = None
    adapter: Adapter | None = None
    chat: Any = None
    requests: list[Request] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    start_time: float | None = None
    loaded: Sequence[tuple[str, range]] = ()
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    prediction: Sequence[int] = ()
    reply: StoredReply | None = None

    @property
    def output_kind(self) -> RequestOutputKind:
        return self.params.output_kind

    @property
    def namespace(self) -> Namespace:
        """The namespace of its K/V. A chat reuses token ids of answers only within a namespace."""
        return self.requests[0].sequence.namespace

    def retain(self, num_tokens: int, seconds: float) -> None:
        """Retain the K/V of the first `num_tokens` tokens for `seconds` after the request ends.

        Call before the request is submitted. Does nothing for a request that stores no blocks,
        since the blocks that it hits belong to other requests.
        """
        for request in self.requests if self.params.is_stored else ():
            request.sequence.marks = [*request.sequence.marks, Mark(num_tokens, seconds)]

    @property
    def finished(self) -> bool:
        return None not in [request.finish_reason for request in self.requests]

    def add_prompt_logprobs(self, start: int, rows: list[tuple[TokenLogprob, ...]]) -> None:
        """Add log-probabilities of prompt tokens from `start` on, unless they exist."""
        assert self.prompt_logprobs is not None
        for position, entries in enumerate(rows, start):
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(self.show_logprobs(entries))

    def show_logprobs(self, entries: Iterable[TokenLogprob]) -> Logprobs:
        """Return log-probabilities in the form of an output."""
        text = self.token_text
        return {
            token_id: Logprob(logprob, rank, None if text is None else text(token_id))
            for token_id, logprob, rank in entries
        }

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter as a `LoRARequest`, as in vLLM; its `lora_int_id` is always 1."""
        return LoRARequest(self.adapter.name, 1, self.adapter.path) if self.adapter else None

    def output(self) -> RequestOutput:
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[request.completion() for request in self.requests],
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            loaded_tokens=self.loaded_tokens,
            why_missed=first.missed,
            metrics=first.metrics(),
            finished=self.finished,
            images=self.images,
            lora_request=self.lora_request,
        )
