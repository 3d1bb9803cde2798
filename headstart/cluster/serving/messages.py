"""Messages between a server and its replicas, and the conversion of errors from replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.cache import Mark, MissExplanation
from headstart.cluster.events import EventBatch
from headstart.engine.adapter_names import Adapter
from headstart.engine.image_cache import SentImages
from headstart.engine.metrics import Metric
from headstart.engine.outputs import Logprobs, RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.sampling import SampledToken, TokenLogprob
from headstart.errors import EngineError, HeadstartError, ReplicaLostError
from headstart.models.decoder import VisionFacts

try:
    from ray.exceptions import (
        ActorDiedError,
        NodeDiedError,
        ObjectLostError,
        RayActorError,
        RayTaskError,
    )

    # Ray stores large results on the replica's machine. They are lost if the machine dies.
    _LOST: tuple[Any, ...] = (RayActorError, NodeDiedError, ObjectLostError)
except ModuleNotFoundError:  # without Ray nothing raises these
    ActorDiedError = RayTaskError = ()
    _LOST = ()

if TYPE_CHECKING:
    from headstart.engine.request import RequestGroup

RequestKey = tuple[str, int]
"""The id and the attempt of an `AnswerRequest`."""


class EngineFacts(NamedTuple):
    """Properties of a replica's engine that the server needs; they are equal for all replicas.

    model_name: the model's fingerprint in block hashes; "" without tiers. silence: seconds without
    a heartbeat after which a replica considers a server dead.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    model_name: str
    silence: float
    vision: VisionFacts | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A checked and tokenized request.

    owner: the tenant and its weight. server: the name of the server that sends the request and
    follows the replica's reports. every_step: report each step's tokens to the server; otherwise
    send them only at the end. attempt: number of earlier attempts. num_public: number of the
    prompt's first blocks that all tenants share. images: a reference to the images in Ray's object
    store, so that another attempt does not send the pixels again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str | None
    owner: tuple[str, float] | None
    priority: int
    marks: tuple[Mark, ...]
    server: str
    every_step: bool
    attempt: int = 0
    num_public: int = 0
    adapter: Adapter | None = None
    images: Awaitable[SentImages] | None = None

    @property
    def key(self) -> RequestKey:
        """The key of this attempt in reports."""
        return self.request_id, self.attempt

    @property
    def engine_id(self) -> str:
        """The id in the replica's engine, which may still run an earlier attempt."""
        return f"{self.request_id}-{self.attempt}" if self.attempt else self.request_id


class PromptResult(NamedTuple):
    """Results of computing a prompt. queued: seconds until the request was scheduled."""

    num_cached_tokens: int
    loaded_tokens: Mapping[str, int]
    missed: MissExplanation | None
    prompt_logprobs: list[Logprobs | None] | None
    queued: float | None


class OutputDelta(NamedTuple):
    """New tokens of one answer. number: index of the answer. start: position of the first token."""

    number: int
    start: int
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None

    def tokens(self, first: int) -> list[SampledToken]:
        """Return the tokens from `first` on, without their texts."""
        if self.logprobs is None:
            return [SampledToken(token_id, None, ()) for token_id in self.token_ids[first:]]
        tokens = []
        for token_id, entries in zip(self.token_ids[first:], self.logprobs[first:], strict=True):
            top = tuple(TokenLogprob(i, entry.logprob, entry.rank) for i, entry in entries.items())
            tokens.append(SampledToken(token_id, entries[token_id].logprob, top))
        return tokens


class RequestDelta(NamedTuple):
    """New tokens of a request.

    head: results of the prompt, only in the first delta. drafts: numbers of drafted and accepted
    tokens of the request so far. The last delta repeats all tokens after those of the first delta,
    so the deltas between them may be lost.
    """

    head: PromptResult | None
    answers: tuple[OutputDelta, ...]
    finished: bool
    drafts: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, output: RequestOutput, counts: Counter[int], *, is_first: bool) -> RequestDelta:
        """Build a delta from an engine's delta output.

        counts: the number of tokens sent so far, by answer. This method adds the new tokens.
        """
        head = None
        if is_first:
            head = PromptResult(
                output.num_cached_tokens,
                output.loaded_tokens,
                output.why_missed,
                output.prompt_logprobs,
                output.metrics.queue,
            )
        answers = tuple(
            OutputDelta(
                answer.index,
                counts[answer.index],
                answer.token_ids,
                answer.logprobs,
                answer.finish_reason,
            )
            for answer in output.outputs
        )
        counts.update({answer.number: len(answer.token_ids) for answer in answers})
        drafts = output.metrics.num_drafted_tokens, output.metrics.num_accepted_tokens
        return cls(head, answers, output.finished, drafts)

    @classmethod
    def joined(cls, parts: Sequence[RequestDelta]) -> RequestDelta:
        """Return one delta with the tokens of consecutive deltas. Copies each token once."""
        answers: dict[int, OutputDelta] = {}
        for new in (answer for part in parts for answer in part.answers):
            joined = answers.get(new.number) or OutputDelta(new.number, new.start, [], None, None)
            joined.token_ids.extend(new.token_ids)
            logprobs = joined.logprobs
            if new.logprobs is not None:
                logprobs = [] if logprobs is None else logprobs
                logprobs.extend(new.logprobs)
            answers[new.number] = joined._replace(
                logprobs=logprobs, finish_reason=new.finish_reason
            )
        return cls(None, tuple(answers.values()), parts[-1].finished, parts[-1].drafts)

    def add_to(self, group: RequestGroup, sent: float) -> None:
        """Add the tokens to the request, which was sent at `sent` (`time.perf_counter`).

        The times of tokens are measured in this process, so they include network delays.
        """
        now = time.perf_counter()
        if self.head is not None:
            group.start_time = sent + (self.head.queued or 0.0)
            group.loaded_tokens = self.head.loaded_tokens
            if self.head.prompt_logprobs is not None:
                group.prompt_logprobs = self.head.prompt_logprobs
            for request in group.requests:
                request.num_cached_tokens = self.head.num_cached_tokens
                request.missed = self.head.missed
        first = group.requests[0]
        first.num_drafted, first.num_accepted = max(
            self.drafts, (first.num_drafted, first.num_accepted)
        )
        for answer in self.answers:
            request = group.requests[answer.number]
            count = len(request.sampling.output_token_ids)
            if answer.start > count:
                continue  # an earlier delta was lost; the last delta repeats its tokens
            for token in answer.tokens(count - answer.start):
                request.append(token, now)
            if answer.finish_reason is not None:
                request.finish_reason = answer.finish_reason


class Follow(NamedTuple):
    """A server's subscription to a replica's reports.

    replica: its name in Ray Serve. follower: the name of the server.
    """

    replica: str
    follower: str


class Report(NamedTuple):
    """Changes in a replica since its last report to a follower. A field without changes is None.

    progress: new tokens of the follower's requests. process: the replica's process and machine,
    only in the first report.
    """

    batch: EventBatch | None = None
    metrics: list[Metric] | None = None
    progress: Mapping[RequestKey, RequestDelta] | None = None
    process: str | None = None


def has_died(error: Exception) -> bool:
    """Return True if the replica died. A replica that is only unreachable may answer again."""
    return isinstance(error, ActorDiedError)


def read_error(error: Exception) -> HeadstartError:
    """Convert an exception of a call to a replica.

    Return ReplicaLostError if the replica died or cannot be reached.
    """
    if isinstance(error, _LOST):
        return ReplicaLostError(str(error).partition("\n")[0])
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, HeadstartError):
            return cause
        return EngineError(f"a replica failed with {type(cause).__name__}: {cause}")
    if isinstance(error, HeadstartError):
        return error
    # An error of Ray, for example because the application was deleted.
    return EngineError(f"the replicas cannot be called: {type(error).__name__}: {error}")
