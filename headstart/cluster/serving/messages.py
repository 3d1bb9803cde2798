"""Messages between the server's process and its replicas, and the errors of these calls."""

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

    # Ray stores large parts of an answer on the replica's machine. They are lost if it dies.
    _LOST: tuple[Any, ...] = (RayActorError, NodeDiedError, ObjectLostError)
except ModuleNotFoundError:  # without Ray nothing raises these
    ActorDiedError = RayTaskError = ()
    _LOST = ()

if TYPE_CHECKING:
    from headstart.engine.request import RequestGroup

RequestKey = tuple[str, int]
"""A request's id, and the number of the attempt."""


class EngineFacts(NamedTuple):
    """Properties that all replicas share and the server needs.

    model_name: the model's fingerprint in block hashes; "" without tiers. silence: seconds without
    a heartbeat after which a server counts as dead. vision: None for a model without vision.
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

    owner: the tenant and its weight, if any. follower: the server that gets tokens as they are
    computed; None if they are sent only at the end. server: the sender; the request ends if the
    sender is silent for too long. attempt: how often it was sent before. num_public: first blocks
    of the prompt that all tenants share. adapter: loaded if the replica has no adapter with this
    name and digest. images: a reference to the prompt's images in Ray's store, so that a second
    attempt does not send the pixels again; None without images.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str | None
    owner: tuple[str, float] | None
    priority: int
    marks: tuple[Mark, ...]
    follower: str | None
    server: str
    attempt: int = 0
    num_public: int = 0
    adapter: Adapter | None = None
    images: Awaitable[SentImages] | None = None

    @property
    def key(self) -> RequestKey:
        """The key of the request's tokens, which differs between attempts."""
        return self.request_id, self.attempt

    @property
    def engine_id(self) -> str:
        """The request's id in a replica, in which an earlier attempt may still run."""
        return f"{self.request_id}-{self.attempt}" if self.attempt else self.request_id


class PromptResult(NamedTuple):
    """Results of a computed prompt. queued: seconds until the request ran."""

    num_cached_tokens: int
    loaded_tokens: Mapping[str, int]
    missed: MissExplanation | None
    prompt_logprobs: list[Logprobs | None] | None
    queued: float | None


class OutputDelta(NamedTuple):
    """Tokens of one answer. number: the answer's number. start: position of the first token."""

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
    """New tokens of a request; only the first part has a `head`.

    Parts may overlap. A part can be ignored if tokens before it are missing, because the last part
    has all tokens after those of the first part. drafts: the request's drafted and accepted
    tokens so far.
    """

    head: PromptResult | None
    answers: tuple[OutputDelta, ...]
    finished: bool
    drafts: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, output: RequestOutput, counts: Counter[int], *, is_first: bool) -> RequestDelta:
        """Build a part from one delta output, and add its tokens to the counts by answer."""
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
        """Join consecutive parts to one; copies each token once."""
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

        Times are measured in this process, so they include network delays, as for a client.
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
                continue  # earlier tokens are missing: the last part has them
            for token in answer.tokens(count - answer.start):
                request.append(token, now)
            if answer.finish_reason is not None:
                request.finish_reason = answer.finish_reason


class Follow(NamedTuple):
    """A subscription of the server `follower` to a replica, which has its name in Ray Serve."""

    replica: str
    follower: str


class Report(NamedTuple):
    """Changes in a replica: its cache, the engine's counts, tokens of the follower's requests.

    A field is None without news. process: the replica's process and machine, in the first report.
    """

    batch: EventBatch | None = None
    metrics: list[Metric] | None = None
    progress: Mapping[RequestKey, RequestDelta] | None = None
    process: str | None = None


def has_died(error: Exception) -> bool:
    """Return True if the replica died. A replica that is only unreachable may answer again."""
    return isinstance(error, ActorDiedError)


def read_error(error: Exception) -> HeadstartError:
    """Return the error that a call of a replica raised, as if it had been raised here.

    ReplicaLostError: the replica died, or cannot be reached.
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
