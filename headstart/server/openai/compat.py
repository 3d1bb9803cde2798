"""Names of vLLM's and OpenAI's APIs that do not work here: fields of bodies, and paths.

The rows of `SAMPLING` hold for fields that are parameters of `SamplingParams` too.
"""

from collections.abc import Mapping
from typing import Any

from headstart.server.field_rows import Row, accepted, refused, works
from headstart.validation import in_one_line

__all__ = ["CHAT_ROWS", "COMPLETION_ROWS", "tell_missing"]

_NONE: tuple[Any, ...] = ()


def _plain(text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), "")


# The schema has these as fields and checks them: the notes are for readers.
_WORKS = _plain(
    "model frequency_penalty logit_bias max_tokens n presence_penalty response_format seed stop "
    "stream stream_options temperature top_p user top_k min_p repetition_penalty stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens allowed_token_ids "
    "bad_words structured_outputs priority cache_salt logprobs prompt_logprobs return_token_ids "
    "return_tokens_as_token_ids"
) | {
    "model": "may be left out",
    "stream_options": "with `stream`: `include_usage`, `continuous_usage_stats`",
    "response_format": "`json_object`, `json_schema`, `structural_tag`; without white space",
    "structured_outputs": "as `StructuredOutputsParams`",
    "logit_bias": "-100 to 100",
    "user": "says nothing to one model",
    "priority": "lower values run first; below 0 is for administrators",
    "prompt_logprobs": "not in streams",
    "return_tokens_as_token_ids": "`token_id:5` in log-probabilities",
}

_CHAT_WORKS = _plain(
    "messages max_completion_tokens top_logprobs tools tool_choice reasoning_effort "
    "parallel_tool_calls add_generation_prompt continue_final_message documents chat_template "
    "chat_template_kwargs functions function_call"
) | {
    "top_logprobs": "0 to 20",
    "chat_template": "with `--trust-request-chat-template`",
    "documents": "for templates that read them",
    "reasoning_effort": "for templates that read it",
}

_COMPLETION_WORKS = {
    "prompt": "texts or token ids, one or several",
    "echo": "",
    "suffix": "none: models here continue a text",
    "best_of": "none, or `n`",
}

_ACCEPTED = {
    "requests have no sessions": ["session_id"],
    "the header `X-Request-Id` names a request": ["request_id"],
    "there are no `/render` endpoints": ["return_token_offsets", "mm_payload", "return_mm_kwargs"],
    "no plugin reads them": ["vllm_xargs", "extra_args"],
    "parameters of Python's `SamplingParams`": [
        "skip_clone",
        "spaces_between_special_tokens",
        "output_text_buffer_length",
        "flat_logprobs",
        "watermarking",
    ],
    "nothing is truncated": ["truncation_side"],
}

_BEAMS = "there is no beam search over HTTP: draw with `n`, or call `LLM.beam_search` in Python"

_REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    _BEAMS: {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "beam_width": (1,),
        "num_beams": (1,),
    },
    'give `structured_outputs`: {"json": ...}': {"guided_json": _NONE},
    'give `structured_outputs`: {"regex": ...}': {"guided_regex": _NONE},
    'give `structured_outputs`: {"choice": [...]}': {"guided_choice": _NONE},
    'give `structured_outputs`: {"grammar": ...}': {"guided_grammar": _NONE},
    'give `structured_outputs`: {"json_object": true}': {"guided_json_object": (False,)},
    'give `structured_outputs`: {"json": ..., "whitespace_pattern": ...}': {
        "guided_whitespace_pattern": _NONE
    },
    "give `structured_outputs`": {"guided_decoding": _NONE},
    "there is one backend for structured outputs": {"guided_decoding_backend": _NONE},
    "`POST /tokenize` makes token ids, and they are a prompt": {"add_special_tokens": (True,)},
    "give fewer tokens: `POST /tokenize` counts them": {"truncate_prompt_tokens": _NONE},
    "K/V of other machines come by `--remote-cache`": {
        "kv_transfer_params": _NONE,
        "ec_transfer_params": _NONE,
    },
    "prompts are texts, token ids and images": {"prompt_embeds": _NONE},
    "no code of others runs in the server": {"logits_processors": ([],)},
    "weights do not change": {"return_weight_versions": (False,)},
    "no routing data are returned": {"routed_experts_prompt_start": (0,)},
    "ask for `logprobs` and read those you want": {"logprob_token_ids": ([],)},
    "ask for `prompt_logprobs` and read those you want": {
        "prompt_logprob_token_ids": _NONE,
        "prompt_logprob_start": (0,),
        "trace_decode_token_ids": _NONE,
    },
    "bound the answer by `max_tokens`, or by a stop string": {
        "thinking_token_budget": _NONE,
        "repetition_detection": _NONE,
    },
    "give `frequency_penalty` or `repetition_penalty`": {"no_repeat_ngram_size": (0,)},
    "`temperature=0` is greedy, any other draws": {"do_sample": _NONE},
    "every step is told": {"stream_interval": (1,)},
    "the name is `max_tokens`": {"max_new_tokens": _NONE, "max_length": _NONE},
    "there is no speculative decoding": {"prediction": _NONE},
    "its fields stand beside the others; it is a name of Python's client": {"extra_body": _NONE},
    "give `n`": {"best_of": (1,), "num_return_sequences": (1,)},
}

_CHAT_REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "the chat template spells the special tokens": {"add_special_tokens": (False,)},
    "the answer has its own text alone": {"echo": (False,)},
    "reasoning is told apart, as `reasoning`; leave it unread": {"include_reasoning": (True,)},
    "`POST /tokenize` and `/detokenize` tell the prompt": {"return_prompt_text": (False,)},
    "images are read by the model's own processor": {
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
    },
    'give `chat_template_kwargs`, such as {"enable_thinking": false}': {
        "enable_thinking": _NONE,
        "thinking": _NONE,
    },
    "the name is `messages`, or ask `/v1/completions`": {"prompt": _NONE},
}

_COMPLETION_REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "the name is `prompt`, or ask `/v1/chat/completions`": {"messages": _NONE},
    "the name is `max_tokens`": {"max_completion_tokens": _NONE},
    "ask `/v1/chat/completions`": {
        "tools": _NONE,
        "tool_choice": ("none",),
        "chat_template": _NONE,
        "chat_template_kwargs": _NONE,
    },
    "the name is `logprobs`": {"top_logprobs": _NONE},
}

_COMMON: dict[str, Row] = works(_WORKS) | accepted(_ACCEPTED) | refused(_REFUSED)
CHAT_ROWS: Mapping[str, Row] = _COMMON | works(_CHAT_WORKS) | refused(_CHAT_REFUSED)
COMPLETION_ROWS: Mapping[str, Row] = (
    _COMMON | works(_COMPLETION_WORKS) | refused(_COMPLETION_REFUSED)
)


def _none(text: str) -> dict[str, tuple[()]]:
    return dict.fromkeys(text.split(), ())


_ROWS = refused(
    {
        "models here generate; for embeddings or scores use transformers or "
        "sentence-transformers": _none(
            "/v1/embeddings /v2/embed /pooling /score /v1/score /rerank /v1/rerank /v2/rerank "
            "/classify /generative_scoring"
        ),
        "a model that speaks hears and answers in `/v1/chat/completions`": _none(
            "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech"
        ),
        "adapters are given at the start, by `--lora-modules NAME=PATH`": _none(
            "/v1/load_lora_adapter /v1/unload_lora_adapter"
        ),
        "ask `POST /cache/reset`": _none(
            "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache"
        ),
        "ask `GET /health`": _none("/ping"),
        "ask `GET /metrics`": _none("/load"),
        "`GET /openapi.json` has the version": _none("/version /server_info"),
        "`POST /tokenize` and `/detokenize` are there": _none(
            "/tokenizer_info /v1/completions/render /v1/chat/completions/render"
        ),
        "ask `/v1/chat/completions` or `/v1/completions`": _none(
            "/invocations /inference/v1/generate /generate /v1/chat/completions/batch "
            "/v1/engines /chat/completions /completions"
        ),
        "there is no sleep mode: stop the server to free the memory": _none(
            "/sleep /wake_up /is_sleeping /pause /resume"
        ),
        "profile with py-spy": _none("/start_profile /stop_profile"),
    }
)


def tell_missing(path: str) -> str:
    """What to say of a path that is not there."""
    row = _ROWS.get(path.rstrip("/"))
    instead = row.note if row is not None else "GET /docs shows what there is"
    return f"there is no {in_one_line(path)}: {instead}"
