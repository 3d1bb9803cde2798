"""What becomes of the flags of `vllm serve`: its front end's, and those of `EngineArgs`.

Of the latter the rows of `ENGINE` hold, in the words of a command line; some work on a server.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.frontend.vllm_api.options import ENGINE
from headstart.frontend.vllm_api.rows import Row, accepted, refused, works

__all__ = ["SERVE_ROWS"]

_WORKS: Mapping[str, str] = {
    "host": "others than this machine need a key: `--api-key`, or `headstart keys add NAME`",
    "port": "0 takes a free one",
    "served_model_name": "further names are `--model-alias` of ours",
    "config": "a file of flags in YAML; those of the command line go before",
    "dtype": "also `half`, `float`",
    "max_model_len": "also `4k` and `4K`; `-1`, `auto`: what model and memory allow",
    "api_key": "also in `HEADSTART_API_KEY`; `headstart keys` keeps keys of several tenants",
    "lora_modules": '`NAME=PATH` or `{"name": ..., "path": ...}`; our name: `--adapter`',
    "chat_template": "a template or a file with one",
    "trust_request_chat_template": "",
    "default_chat_template_kwargs": "a request's `chat_template_kwargs` go before them",
    "allowed_origins": "`'[\"https://a.example\"]'`; our name: `--cors-origin`",
    "ssl_keyfile": "our name: `--tls-key`",
    "ssl_certfile": "our name: `--tls-cert`",
    "shutdown_timeout": "our name: `--drain-seconds`, which is 30 unless given",
    "otlp_traces_endpoint": "traces go there as OTLP over HTTP",
    "disable_uvicorn_access_log": "our name: `--log-format off`",
    "kv_cache_memory_bytes": "our name: `--kv-cache-memory`",
    "num_gpu_blocks_override": "our name: `--num-blocks`",
    "limit_mm_per_prompt": '`{"image": n}`; our name: `--max-images`',
}

_ACCEPTED: Mapping[str, Sequence[str]] = {
    "tools work where the model's chat template shows how a call is written": [
        "enable_auto_tool_choice"
    ],
    "reasoning is told apart where the chat template knows `<think>`": ["enable_reasoning"],
    "the template is looked at": ["chat_template_content_format"],
    "`usage.prompt_tokens_details` is in every answer": ["enable_prompt_tokens_details"],
    "every answer has the header": ["enable_request_id_headers"],
    "`/docs` loads nothing from elsewhere": ["enable_offline_docs"],
    "no line of the log has a text of a prompt or an answer": ["max_log_len", "enable_log_deltas"],
    "each request has a line, without its text": ["enable_log_requests", "disable_log_requests"],
    "`/health`, `/ready` and `/metrics` have no lines": ["disable_access_log_for_endpoints"],
    "beside the requests' lines there are warnings alone": ["uvicorn_log_level"],
    "the stack of what failed here is in the log": ["log_error_stack"],
    "answers have no `system_fingerprint`": ["fingerprint_mode", "fingerprint_value"],
    "the engine is a thread of the server": ["disable_frontend_multiprocessing"],
    "there are no scores": ["enable_flash_late_interaction"],
    "there is no API of Cohere's": ["cohere_is_reasoning_model", "cohere_format"],
    "templates that have a switch for reasoning are told so": [
        "anthropic_disabled_thinking_effort"
    ],
    "a head may have 64 KB, however many headers": [
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
    ],
    "there is no supervisor": [
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
    ],
    "`/metrics` has what there is": ["disable_log_stats"],
}

_CALLS = ("hermes", "llama3_json", "llama4_json", "mistral")
_THOUGHTS = ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "minimax_m2", "qwen3")

_REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "the chat template says how a call is written, and these ways are read": {
        "tool_call_parser": _CALLS
    },
    "reasoning is told apart where the chat template knows `<think>`": {
        "reasoning_parser": ("", *_THOUGHTS)
    },
    "no code of others runs in the server": {
        "middleware": (),
        "tool_parser_plugin": ("",),
        "reasoning_parser_plugin": ("",),
        "logits_processors": (),
    },
    "tools run in the program that asks": {"tool_server": ()},
    'a call that is forced (`tool_choice`) follows its schema, one of `"auto"` is the model\'s': {
        "tool_strict_level": ("auto",)
    },
    'leave `tools` out of such a request; with `"none"` the prompt hits the turns before': {
        "exclude_tools_when_tool_choice_none": (False,)
    },
    "answers are the assistant's": {"response_role": ("assistant",)},
    "ask for it in the request": {"return_tokens_as_token_ids": (False,)},
    "clients ask by `stream_options.include_usage`": {"enable_force_include_usage": (False,)},
    "`reasoning_effort` goes to the chat template as it is": {"reasoning_effort_map": ({},)},
    "images are read by the model's own processor": {"trust_request_mm_kwargs": (False,)},
    "no line of the log has a text of a prompt or an answer": {"enable_log_outputs": (False,)},
    "`/metrics` has times of all requests, and traces those of each": {
        "enable_per_request_metrics": (False,)
    },
    "`/metrics` has the requests that run and wait": {"enable_server_load_tracking": (False,)},
    "have the proxy wait longer than a prompt takes to read": {"sse_keep_alive_interval": (0,)},
    "`/tokenize` and `/detokenize` are there": {"enable_tokenizer_info_endpoint": (False,)},
    "have a proxy hide `/docs` and `/openapi.json`": {"disable_fastapi_docs": (False,)},
    "give `--host` and `--port`": {"uds": ("",)},
    "there is HTTP alone": {"grpc": (False,), "grpc_port": ()},
    "have the proxy take the prefix off the path": {"root_path": ("", "/")},
    "keys come in a header, and no cookies": {"allow_credentials": (False,)},
    "pages of `--allowed-origins` may use what the API has": {
        "allowed_methods": (["*"],),
        "allowed_headers": (["*"],),
    },
    "clients show a key, and no certificate": {"ssl_ca_certs": ("",), "ssl_cert_reqs": (0,)},
    "OpenSSL's own are taken": {"ssl_ciphers": ("",)},
    "start the server anew for a new certificate": {"enable_ssl_refresh": (False,)},
    "one process answers; `--replicas N` starts several engines behind it": {
        "api_server_count": (1,),
        "headless": (False,),
    },
    "there are no such paths": {"enable_scale_out": (False,), "tokens_only": (False,)},
    "one adapter is a LoRA adapter: give `--lora-modules`": {"prompt_adapters": ()},
    "give `--max-waiting`": {"max_num_queued_reqs": (), "max_num_queued_tokens": ()},
}

_NOTES: Mapping[str, str] = {
    'a model must fit one device (`weights="int8"` or `"int4"` makes it smaller); several engines '
    "share load by `headstart serve --replicas N`": (
        "a model must fit one device (`--weights int8` or `int4` makes it smaller); `--replicas N` "
        "starts several engines behind one server"
    ),
    "K/V take `kv_cache_fraction` of what is free": "our name: `--kv-cache-fraction`, a share of "
    "what is free",
    "our name: `share_attention=False`": "our name: `--no-share-attention`",
    "our name: `encoder_cache_rows`": "our name: `--encoder-cache-rows`",
    "our name: `max_loras`": "our name: `--max-loras`",
    "up to 1,000 are allowed in any case": "a request may ask for 20 of a token at the most",
    "nothing is logged": "a line for each request is logged",
    "callers tokenise in their own threads": "texts are tokenised beside the event loop",
    "`max_num_batched_tokens` bounds a chunk": "`--max-num-batched-tokens` bounds a chunk",
    "`LLM.get_metrics()` has what there is": "`/metrics` has what there is",
    "leave it out; give `prompt_token_ids` and `detokenize=False`": "answers are texts",
    "leave it out: a quantised checkpoint says itself how; to quantise another one, give "
    '`weights`: `"int8"`, `"int5"` or `"int4"`': (
        "leave it out: a quantised checkpoint says itself how; to quantise another one, give "
        "`--weights int8`, `int5` or `int4`"
    ),
    "images are read by the model's own processor: Pillow images, paths, bytes, data: URLs": (
        "images are read by the model's own processor, from data: URLs"
    ),
    "K/V are shared between engines and processes by `cache_dir` and `remote_cache`": (
        "K/V are shared between engines and processes by `--cache-dir` and `--remote-cache`"
    ),
    "K/V stay where they are: raise `kv_cache_fraction` for more": (
        "give `--cache-dir` or `--remote-cache` for K/V that outlive memory"
    ),
    "there is no sleep mode: `close()` frees the memory": (
        "there is no sleep mode: stop the server to free the memory"
    ),
    "give adapters by name in each request: `lora_request` or `adapter`": (
        "give `--lora-modules NAME=PATH`, and the name as a request's model"
    ),
    "there is one scheduler: `max_num_seqs` and `max_num_batched_tokens` bound a step": (
        "there is one scheduler: `--max-num-seqs` and `--max-num-batched-tokens` bound a step"
    ),
    "profile with torch.profiler or py-spy around the call": (
        "profile with py-spy; `--otlp-traces-endpoint` has the times of requests"
    ),
    "the answer's text holds the reasoning: take it apart in the program": (
        "reasoning ends where the model ends it"
    ),
    "one adapter is a LoRA adapter: give `lora_request`": (
        "one adapter is a LoRA adapter: give `--lora-modules NAME=PATH`"
    ),
    "give `logits_processors` in SamplingParams": "no code of others runs in the server",
    "give them in each request's `StructuredOutputsParams`": (
        "give them in each request's `structured_outputs`"
    ),
    "the name is `num_gpu_blocks_override`, or `num_blocks`": "the name is `--num-blocks`",
}
"""Of notes that speak of Python: what to say of a server."""

SERVE_ROWS: Mapping[str, Row] = (
    {name: row._replace(note=_NOTES.get(row.note, row.note)) for name, row in ENGINE.rows.items()}
    | works(_WORKS)
    | accepted(_ACCEPTED)
    | refused(_REFUSED)
)
