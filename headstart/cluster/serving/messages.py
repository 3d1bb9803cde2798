"""What the server's process and its replicas send each other; Ray carries it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.cache import Mark, MissExplanation
from headstart.cluster.events import EventBatch
from headstart.engine.adapter_names import Adapter
from headstart.engine.image_cache import SentImages
from headstart.engine.metrics import Metric
from headstart.engine.outputs import Logprobs, RequestOutput
from headstart.engine.params import SamplingParams
from headstart.models.decoder import VisionFacts

__all__ = ["AnswerPart", "AnswerRequest", "EngineFacts", "Follow", "Head", "Part", "Report"]

RequestKey = tuple[str, int]
"""A request's id and the number of the attempt to have it answered."""


class EngineFacts(NamedTuple):
    """What all replicas have in common, and the server must know of them.

    model_name: the fingerprint that the names of blocks begin with, "" without tiers. silence:
    seconds without a sign of life after which a server is dead. vision: None for a model that takes
    text alone.
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
    """A request that is checked and tokenised.

    owner: whose it is, and with what weight; None for nobody's. follower: the server that is told
    its tokens as they come, None if they are wanted at the end alone. server: the one that asks;
    the request ends when that is silent for long. attempt: how often it was sent before.
    num_public: blocks at the prompt's head that all tenants share; a replica that does not know
    them shares them from then on. adapter: is read by a replica that has none of this name and
    digest. images: what to await for those of the prompt, checked; None for a prompt without
    any. They lie in Ray's store, so that a second attempt sends no pixels again.
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
        """What its tokens go by: those of an earlier attempt are not to be taken for this one's."""
        return self.request_id, self.attempt

    @property
    def engine_id(self) -> str:
        """The request's id in a replica, where an attempt that was given up may still run."""
        return f"{self.request_id}-{self.attempt}" if self.attempt else self.request_id


class Head(NamedTuple):
    """What is known of a request once its prompt is computed. queued: seconds until it ran."""

    num_cached_tokens: int
    loaded_tokens: Mapping[str, int]
    missed: MissExplanation | None
    prompt_logprobs: list[Logprobs | None] | None
    queued: float | None


class AnswerPart(NamedTuple):
    """Tokens from `start` on of one of a request's answers, that with index `at`."""

    at: int
    start: int
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None


class Part(NamedTuple):
    """New tokens of a request; `head` comes with the first part alone.

    Of two parts with the same tokens either will do, and a part before which tokens are missing
    can be left out: the last one has all but the first's.
    """

    head: Head | None
    answers: tuple[AnswerPart, ...]
    finished: bool

    @classmethod
    def of(cls, output: RequestOutput, told: Counter[int], *, is_first: bool) -> Part:
        """What is new in an output of a stream of what is new.

        told: tokens of each answer before; those of the output are added.
        """
        head = None
        if is_first:
            head = Head(
                output.num_cached_tokens,
                output.loaded_tokens,
                output.why_missed,
                output.prompt_logprobs,
                output.metrics.queue,
            )
        answers = tuple(
            AnswerPart(one.index, told[one.index], one.token_ids, one.logprobs, one.finish_reason)
            for one in output.outputs
        )
        told.update({one.at: len(one.token_ids) for one in answers})
        return cls(head, answers, output.finished)

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """All tokens of some parts, one behind the other, as one. Copies each token once."""
        answers: dict[int, AnswerPart] = {}
        for one in (answer for part in parts for answer in part.answers):
            whole = answers.get(one.at) or AnswerPart(one.at, one.start, [], None, None)
            whole.token_ids.extend(one.token_ids)
            logprobs = whole.logprobs
            if one.logprobs is not None:
                logprobs = [] if logprobs is None else logprobs
                logprobs.extend(one.logprobs)
            answers[one.at] = whole._replace(logprobs=logprobs, finish_reason=one.finish_reason)
        return cls(None, tuple(answers.values()), parts[-1].finished)


class Follow(NamedTuple):
    """Asks one replica to tell what its cache holds, and the tokens of the asker's requests.

    replica: Ray Serve's name of it. follower: the server that asks.
    """

    replica: str
    follower: str


class Report(NamedTuple):
    """What changed in a replica: its cache, the engine's counts, tokens of the follower's requests.

    None is nothing new. process: the id of the replica's process and its machine, with the first.
    """

    batch: EventBatch | None = None
    metrics: list[Metric] | None = None
    progress: Mapping[RequestKey, Part] | None = None
    process: str | None = None
