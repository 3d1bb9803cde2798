"""Names of vLLM's and OpenAI's APIs that do not work here: fields of bodies, and paths."""

from headstart.server.bodies import refusals
from headstart.validation import in_one_line

ACCEPTED = frozenset(
    [
        *("session_id", "request_id", "return_token_offsets", "mm_payload", "return_mm_kwargs"),
        *("vllm_xargs", "extra_args", "skip_clone", "spaces_between_special_tokens"),
        *("output_text_buffer_length", "flat_logprobs", "watermarking", "truncation_side"),
    ]
)
"""Fields of vLLM's requests without effect."""

_REFUSED = refusals(
    {
        "there is no beam search over HTTP: draw with `n`, or call `LLM.beam_search` in Python": (
            "use_beam_search=false length_penalty=1 early_stopping=false beam_width=1 num_beams=1"
        ),
        'give `structured_outputs`: {"json": ...}': "guided_json",
        'give `structured_outputs`: {"regex": ...}': "guided_regex",
        'give `structured_outputs`: {"choice": [...]}': "guided_choice",
        'give `structured_outputs`: {"grammar": ...}': "guided_grammar",
        'give `structured_outputs`: {"json_object": true}': "guided_json_object=false",
        'give `structured_outputs`: {"json": ..., "whitespace_pattern": ...}': (
            "guided_whitespace_pattern"
        ),
        "give `structured_outputs`": "guided_decoding",
        "there is one backend for structured outputs": "guided_decoding_backend",
        "`POST /tokenize` makes token ids, and they are a prompt": "add_special_tokens=true",
        "give fewer tokens: `POST /tokenize` counts them": "truncate_prompt_tokens",
        "K/V of other machines come by `--remote-cache`": "kv_transfer_params ec_transfer_params",
        "prompts are texts, token ids and images": "prompt_embeds",
        "no code of others runs in the server": "logits_processors=[]",
        "weights do not change": "return_weight_versions=false",
        "no routing data are returned": "routed_experts_prompt_start=0",
        "request `logprobs` and read those you want": "logprob_token_ids=[]",
        "request `prompt_logprobs` and read those you want": (
            "prompt_logprob_token_ids prompt_logprob_start=0 trace_decode_token_ids"
        ),
        "bound the answer by `max_tokens`, or by a stop string": (
            "thinking_token_budget repetition_detection"
        ),
        "give `frequency_penalty` or `repetition_penalty`": "no_repeat_ngram_size=0",
        "`temperature=0` is greedy, any other draws": "do_sample",
        "every step is sent": "stream_interval=1",
        "the name is `max_tokens`": "max_new_tokens max_length",
        "there is no speculative decoding": "prediction",
        "give its fields next to the others; it is an argument of Python's client": "extra_body",
        "give `n`": "best_of=1 num_return_sequences=1",
    }
)
CHAT_REFUSED = _REFUSED | refusals(
    {
        "the chat template spells the special tokens": "add_special_tokens=false",
        "the answer has its own text alone": "echo=false",
        "reasoning is a field of its own, `reasoning`; leave it unread": "include_reasoning=true",
        "`POST /tokenize` and `/detokenize` return the prompt": "return_prompt_text=false",
        "images are read by the model's own processor": "mm_processor_kwargs={} media_io_kwargs={}",
        'give `chat_template_kwargs`, such as {"enable_thinking": false}': (
            "enable_thinking thinking"
        ),
        "the name is `messages`, or call `/v1/completions`": "prompt",
    }
)
COMPLETION_REFUSED = _REFUSED | refusals(
    {
        "the name is `prompt`, or call `/v1/chat/completions`": "messages",
        "the name is `max_tokens`": "max_completion_tokens",
        "call `/v1/chat/completions`": (
            'tools tool_choice="none" chat_template chat_template_kwargs'
        ),
        "the name is `logprobs`": "top_logprobs",
    }
)
_PATHS = refusals(
    {
        "models here generate; for embeddings or scores use transformers or "
        "sentence-transformers": (
            "/v1/embeddings /v2/embed /pooling /score /v1/score /rerank /v1/rerank /v2/rerank "
            "/classify /generative_scoring"
        ),
        "a model that speaks hears and answers in `/v1/chat/completions`": (
            "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech"
        ),
        "adapters are given at the start, by `--lora-modules NAME=PATH`": (
            "/v1/load_lora_adapter /v1/unload_lora_adapter"
        ),
        "call `POST /cache/reset`": "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache",
        "call `GET /health`": "/ping",
        "call `GET /metrics`": "/load",
        "`GET /openapi.json` has the version": "/version /server_info",
        "`POST /tokenize` and `/detokenize` are there": (
            "/tokenizer_info /v1/completions/render /v1/chat/completions/render"
        ),
        "call `/v1/chat/completions` or `/v1/completions`": (
            "/invocations /inference/v1/generate /generate /v1/chat/completions/batch "
            "/v1/engines /chat/completions /completions"
        ),
        "there is no sleep mode: stop the server to free the memory": (
            "/sleep /wake_up /is_sleeping /pause /resume"
        ),
        "profile with py-spy": "/start_profile /stop_profile",
    }
)


def describe_missing(path: str) -> str:
    """Return the error text for a path that does not exist."""
    refusal = _PATHS.get(path.rstrip("/"))
    instead = refusal.note if refusal is not None else "GET /docs shows what there is"
    return f"there is no {in_one_line(path)}: {instead}"
