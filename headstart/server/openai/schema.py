"""Request bodies of OpenAI's completions and chat completions, with the fields that vLLM adds.

A field that is not declared here is refused. Fields without meaning for a server of one model
(`user`, `metadata`, `store`, ...) are accepted without effect.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from headstart.engine.params import SamplingParams
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.server.bodies import (
    Body,
    CacheFields,
    ClientTool,
    Flag,
    Many,
    Real,
    Whole,
    at_most,
    refusals,
    refuse,
)
from headstart.server.chats import ChatCall, ChatFields
from headstart.server.errors import ApiError
from headstart.server.tools import Tool, ToolUse, make_tools
from headstart.validation import describe, shorten

ACCEPTED = frozenset(
    [
        *("session_id", "request_id", "return_token_offsets", "mm_payload", "return_mm_kwargs"),
        *("vllm_xargs", "extra_args", "skip_clone", "spaces_between_special_tokens"),
        *("output_text_buffer_length", "flat_logprobs", "watermarking", "truncation_side"),
    ]
)
"""Fields of vLLM's requests that are accepted without effect."""

_REFUSED = refusals(
    {
        "there is no beam search over HTTP: sample with `n`, or call `LLM.beam_search` in Python": (
            "use_beam_search=false length_penalty=1 early_stopping=false beam_width=1 num_beams=1"
        ),
        'use `structured_outputs`, such as {"json": ...}': (
            "guided_json guided_regex guided_choice guided_grammar guided_json_object=false "
            "guided_whitespace_pattern guided_decoding"
        ),
        "there is one backend for structured outputs": "guided_decoding_backend",
        "send token ids as prompt; `POST /tokenize` makes them": "add_special_tokens=true",
        "send fewer tokens: `POST /tokenize` counts them": "truncate_prompt_tokens",
        "`--remote-cache` shares K/V between machines": "kv_transfer_params ec_transfer_params",
        "prompts are strings, token ids and images": "prompt_embeds",
        "the server does not run code from clients": "logits_processors=[]",
        "weights do not change": "return_weight_versions=false",
        "expert routing is not returned": "routed_experts_prompt_start=0",
        "use `logprobs` and select tokens from them": "logprob_token_ids=[]",
        "use `prompt_logprobs` and select tokens from them": (
            "prompt_logprob_token_ids prompt_logprob_start=0 trace_decode_token_ids"
        ),
        "limit the answer with `max_tokens` or a stop string": (
            "thinking_token_budget repetition_detection"
        ),
        "use `frequency_penalty` or `repetition_penalty`": "no_repeat_ngram_size=0",
        "use `temperature`: 0 is greedy, any other value samples": "do_sample",
        "the server chooses the interval of a stream's events": "stream_interval=1",
        "use `max_tokens`": "max_new_tokens max_length",
        "put its fields into the body, as the Python client does": "extra_body",
        "use `n`": "best_of=1 num_return_sequences=1",
    }
)
CHAT_REFUSED = _REFUSED | refusals(
    {
        "the chat template adds the special tokens": "add_special_tokens=false",
        "a chat's answer cannot repeat the prompt": "echo=false",
        "ignore the answer's field `reasoning`": "include_reasoning=true",
        "`POST /tokenize` and `/detokenize` return the prompt": "return_prompt_text=false",
        "the model's own settings apply to images": "mm_processor_kwargs={} media_io_kwargs={}",
        'use `chat_template_kwargs`, such as {"enable_thinking": false}': (
            "enable_thinking thinking"
        ),
        "use `messages`, or call `/v1/completions`": "prompt",
    }
)
COMPLETION_REFUSED = _REFUSED | refusals(
    {
        "use `prompt`, or call `/v1/chat/completions`": "messages",
        "use `max_tokens`": "max_completion_tokens",
        "call `/v1/chat/completions`": (
            'tools tool_choice="none" chat_template chat_template_kwargs prediction'
        ),
        "use `logprobs`": "top_logprobs",
    }
)


class StreamOptions(Body):
    """Options of a stream.

    include_usage: the last event has the usage. continuous_usage_stats: with `include_usage`, all
    events have the usage.
    """

    include_usage: Flag = False
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None


class JsonSchema(Body):
    """A named JSON schema. It is always enforced; `strict` has no effect."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """The format of an answer. structures and triggers belong to type `structural_tag`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[str] | None = None

    def read(self) -> StructuredOutputsParams | None:
        """Return the constraints on the answer; None for text.

        Optional white space is not allowed, as a model could write it endlessly.
        """
        form: dict[str, Any] = {"json_object": True}
        needed: dict[str, Any] = {}
        match self.type:
            case "text":
                return None
            case "structural_tag":
                needed = {"structures": self.structures, "triggers": self.triggers}
                form = {"structural_tag": needed}
            case "json_schema":
                needed = {"json_schema": self.json_schema}
                form = {"json": (self.json_schema and self.json_schema.schema_) or {}}
        if missing := [name for name, value in needed.items() if value is None]:
            text = f"response_format.{missing[0]} is missing"
            raise ApiError(400, text, param="response_format")
        return StructuredOutputsParams(**form, disable_any_whitespace=True)


class StructuredOutputs(Body):
    """vLLM's field: see `headstart.StructuredOutputsParams`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: Flag | None = None
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False
    whitespace_pattern: str | None = None
    structural_tag: dict[str, Any] | str | None = None


_MAX_ENTRIES = 16_384  # entries to check; each takes half a microsecond of the event loop


def _read_bias(value: Any) -> Any:
    """Return the value. Raise an error for the first wrong entry; pydantic would list all."""
    for token, bias in value.items() if isinstance(value, dict) else ():
        if not (token.isascii() and token.isdigit()) or len(token) > 12:
            raise refuse("logit_bias: allowed keys are token ids as strings")
        if type(bias) not in (int, float):
            text = f"the bias of {shorten(token)} is {describe(bias)}; allowed: numbers"
            raise refuse(f"logit_bias: {text}")
    return value


Logprobs = Annotated[int, Field(strict=True, ge=0, le=20)]
"""The number of likeliest tokens to return, limited to bound the size of an answer."""


class SamplingFields(CacheFields):
    """Sampling fields of completions and chats."""

    model: str | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    min_p: Real | None = None
    n: Whole | None = None
    seed: Whole | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Annotated[Many[Whole], at_most("stop_token_ids", _MAX_ENTRIES)] | None = None
    min_tokens: Whole | None = None
    ignore_eos: Flag | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    logit_bias: (
        Annotated[dict[int, Real], BeforeValidator(_read_bias), at_most("logit_bias", _MAX_ENTRIES)]
        | None
    ) = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[Whole] | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    priority: Whole = 0
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        """Refuse `stream_options` without a stream, and `prompt_logprobs` with a stream."""
        if self.stream_options is not None and not self.stream:
            text = 'stream_options is set without a stream; allowed: only with "stream": true'
            raise refuse(text, "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            text = f"prompt_logprobs is {self.prompt_logprobs} and stream is true"
            raise refuse(f"{text}; allowed: one of them", "prompt_logprobs")
        return self

    def read_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams`. Raises RequestError for unsupported values."""
        names = {f.name for f in fields(SamplingParams)} & type(self).model_fields.keys()
        params = {name: getattr(self, name) for name in names}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params["stop"] = [text for text in stop if text] or None  # an empty text stops nothing
        form = None if self.response_format is None else self.response_format.read()
        if self.structured_outputs is not None:
            if form is not None:
                text = "response_format and structured_outputs are both set; allowed: one of them"
                raise RequestError(text)
            form = StructuredOutputsParams(**self.structured_outputs.model_dump(by_alias=True))
        return params | {"structured_outputs": form} | self.cache_sampling

    @property
    def names(self) -> dict[str, str]:
        """This API's names of `SamplingParams` fields, for the fields whose names differ."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. prompt: a string, token ids, or a list of either."""

    accepted = ACCEPTED
    refused = COMPLETION_REFUSED
    prompt: str | Many[str] | Many[Whole] | Many[Many[Whole]]
    max_tokens: Whole | None = 16
    logprobs: Logprobs | None = None
    echo: Flag | None = False
    best_of: Whole | None = None
    suffix: str | None = None

    def read_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams`. Raises RequestError for unsupported values."""
        if self.suffix:
            raise RequestError("suffix is set; allowed: none, as models only append to text")
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise RequestError(f"best_of is {self.best_of}; allowed: null, or {n} (the value of n)")
        params = super().read_sampling()
        if self.max_tokens == 0 and self.echo:
            params["max_tokens"] = 1  # `_TextAnswers` leaves this token out
        if self.echo and self.logprobs is not None:
            params["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return params


class Function(Body):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None

    def as_tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters)


class FunctionTool(ClientTool):
    """A function as a tool."""

    types = ("function",)
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The answer must call this function."""

    type: Literal["function"]
    function: FunctionName


class Speech(Body):
    """The voice and format of a spoken answer. The model defines the allowed voices."""

    voice: str | None = None
    format: Literal["wav", "pcm16", "flac", "mp3", "opus"] = "wav"


class TextPart(Body):
    """A text part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The expected answer, from which drafts are taken."""

    type: Literal["content"]
    content: str | Many[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


_TEMPLATE = (
    *("chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


class TemplateFields(Body):
    """Fields that determine how a conversation is rendered to a prompt."""

    tools: Many[FunctionTool] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    documents: Many[dict[str, Any]] | None = None

    def as_tools(self) -> tuple[Tool, ...]:
        return make_tools([tool.function for tool in self.tools or ()], Function.as_tool)

    def read_template(self) -> dict[str, Any]:
        """Return the template options, without the tools."""
        options = {key: value for key in _TEMPLATE if (value := getattr(self, key)) is not None}
        if options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", False)
        named = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        extra = {key: value for key, value in named.items() if value is not None}
        if extra:
            options["chat_template_kwargs"] = extra | options.get("chat_template_kwargs", {})
        return options


class PromptFields(TemplateFields):
    """A conversation that is rendered like a chat but not answered."""

    model: str | None = None
    messages: Many[dict[str, Any]] | None = None

    def as_call(self, salt: str | None, sampling: dict[str, Any], **template: Any) -> ChatCall:
        """Return a call that shows the tools to the model but does not let it call them.

        template: defaults of the template options.
        """
        return ChatCall(
            model=self.model,
            messages=self.messages or [],
            sampling=sampling,
            salt=salt,
            tools=ToolUse(self.as_tools(), "none"),
            template=template | self.read_template(),
        )


class ChatCompletionRequest(SamplingFields, TemplateFields, ChatFields):
    """`POST /v1/chat/completions`.

    functions, function_call: the older forms of tools and tool_choice. The answer then has
    `function_call` instead of `tool_calls`. return_progress: while the prompt is computed, the
    stream has events with `prompt_progress`, as in llama.cpp.
    """

    accepted = ACCEPTED
    refused = CHAT_REFUSED
    messages: Many[dict[str, Any]]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = False
    top_logprobs: Logprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    functions: Many[Function] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    return_progress: Flag | None = None
    verbosity: str | None = None
    modalities: Many[Literal["text", "audio"]] | None = None
    audio: Speech | None = None
    prediction: Prediction | None = None

    @property
    def names(self) -> dict[str, str]:
        if self.max_completion_tokens is None:
            return super().names
        return super().names | {"max_tokens": "max_completion_tokens"}

    def read_sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams`. Raises ApiError, RequestError.

        If `max_tokens` is None, only the context limits the answer.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        params = super().read_sampling()
        params["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        if self.prediction is not None:
            params["prediction"] = self.prediction.text
        return params

    def read_tools(self) -> ToolUse:
        choice: Literal["none", "auto", "required"] | ToolChoice | FunctionName | None
        tools, choice = self.as_tools(), self.tool_choice
        parallel = self.parallel_tool_calls is not False
        if self.functions is not None or self.function_call is not None:
            if self.tools is not None or self.tool_choice is not None:
                raise RequestError("tools and functions are both set; allowed: one of them")
            tools = make_tools(self.functions or (), Function.as_tool)
            choice, parallel = self.function_call, False
        if isinstance(choice, ToolChoice):
            choice = choice.function
        if isinstance(choice, FunctionName):
            return ToolUse(tools, "required", choice.name, parallel)
        return ToolUse(tools, choice or "auto", None, parallel)
