"""The outputs of a request, in vLLM's names."""

from dataclasses import dataclass

from headstart.cache import MissExplanation
from headstart.engine.sampling.logprobs import TokenLogprob

Logprobs = dict[int, TokenLogprob]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds from its arrival.

    queue: until its first step began. time_to_first_token: until its first token.
    time_per_token: mean seconds between later tokens, None before there are two. total: until
    its last token so far.
    """

    queue: float | None
    time_to_first_token: float | None
    time_per_token: float | None
    total: float | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    finish_reason: None while it runs, "stop" (a stop string or id, or the end of the text),
    "length" or "abort". stop_reason: the stop string or id, None for the end of the text.
    logprobs: for each token its own and the likeliest ones' log-probabilities, by token id.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[Logprobs] | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class ImageUse:
    """An image in a prompt: SHA-256 of what its embeddings are made from, in hex, the position of
    its first placeholder, and how many it has.

    is_similar: it is not the image that was handed over, but an earlier one that looks like it,
    which the request allowed by `similar_images`.
    """

    digest: str
    position: int
    num_tokens: int
    is_similar: bool = False


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answers so far.

    num_cached_tokens: prompt tokens that needed no computing, of the first of the answers.
    why_missed: why it did not hit more. prompt_logprobs: as asked for; None for the first token.
    images: those of the prompt, in order.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None
    num_cached_tokens: int
    why_missed: MissExplanation | None
    metrics: RequestMetrics
    finished: bool
    images: tuple[ImageUse, ...] = ()
