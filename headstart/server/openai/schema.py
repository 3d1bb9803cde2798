"""The bodies of OpenAI's requests for completions and chats, with vLLM's fields beside them.

A field that is not here is an error: nothing is dropped in silence. Fields that say nothing to a
server of one model (`user`, `metadata`, `store`, ...) are taken and have no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ChatRequest", "CompletionRequest", "SamplingFields", "StreamOptions"]

# What a number may be is for `SamplingParams` to say; here it is kept from being none at all.
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]


class Body(BaseModel):
    """A body of JSON whose every field is known."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    """include_usage: a last event tells the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema by name; `strict` is always so here."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field: see `headstart.StructuredOutputsParams`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class CacheFields(Body):
    """What a request says of the cache.

    cache_salt: only requests of the same salt share K/V. prompt_cache_key: the same, in OpenAI's
    words a hint. no_read: compute the whole prompt.
    """

    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    no_read: bool = False


class SamplingFields(CacheFields):
    """How answers are chosen, for completions and chats alike."""

    model: str
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    min_p: Real | None = None
    n: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    logit_bias: dict[str, Real] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Whole] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Whole = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. prompt: a text, token ids, or a list of either."""

    prompt: str | list[str] | list[Whole] | list[list[Whole]]
    max_tokens: Whole | None = 16
    logprobs: Whole | None = None
    echo: bool | None = False
    best_of: Whole | None = None
    suffix: str | None = None


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = False
    top_logprobs: Whole | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
