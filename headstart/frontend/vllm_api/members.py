"""What becomes of the methods and attributes of vLLM's classes, and of the names it exports."""

from headstart.errors import RequestError
from headstart.frontend.vllm_api.earlier import (
    ASYNC_MEMBERS_REFUSED,
    ENGINE_MEMBERS_REFUSED,
    LLM_MEMBERS_REFUSED,
    METRICS_REFUSED,
)
from headstart.frontend.vllm_api.rows import Names, Verdict, accepted, refused, works

__all__ = [
    "ASYNC_LLM",
    "BEAM",
    "BEAMS",
    "COMPLETION_OUTPUT",
    "ENGINE_VIEW",
    "EXPORTS",
    "LLM",
    "LLM_ENGINE",
    "LOGPROB",
    "PARAMS",
    "REQUEST_METRICS",
    "REQUEST_OUTPUT",
]

_POOLING = "models here generate; for embeddings or scores use transformers"
_SLEEP = "there is no sleep mode: `close()` frees the memory"
_WEIGHTS = "weights do not change: load another model, or a LoRA adapter"
_PROFILE = "profile with torch.profiler or py-spy around the call"
_INSIDE = "`engine` is the engine here; its parts are not vLLM's"
_STEPS = "give all prompts to `generate`, or use `AsyncLLM`"
_EXPERT = "one engine runs in one process on one device"


def _none(text: str) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(text.split(), ())


LLM = Names(
    "LLM",
    works(
        {
            "generate": "",
            "chat": "",
            "beam_search": "",
            "get_tokenizer": "",
            "get_default_sampling_params": "",
            "get_metrics": "",
            "reset_prefix_cache": "",
            "from_engine_args": "",
            "default_sampling_params": "",
            "chat_template": "",
            "get_world_size": "1",
            "llm_engine": "see `LLM.llm_engine`",
            "model_config": "as that of `llm_engine`",
        }
    )
    | refused(
        {
            _POOLING: _none("encode embed classify score pooling_task pooling_io_processors"),
            _SLEEP: _none("sleep wake_up release_kv_cache_memory"),
            _WEIGHTS: _none(
                "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
                "start_draft_weight_update update_weights finish_weight_update "
                "update_weight_version get_weight_version"
            ),
            _PROFILE: _none("start_profile stop_profile"),
            "images are known by their content: nothing becomes stale": _none("reset_mm_cache"),
            _STEPS: _none("enqueue enqueue_chat wait_for_completion abort_request"),
            "give `tokenizer=` when the model is loaded": _none("set_tokenizer"),
            "`load_adapter` loads one": _none("add_lora"),
            "`close()` frees the memory": _none("shutdown"),
            "there are no workers: `engine.model` is the model": _none(
                "collective_rpc apply_model"
            ),
            _INSIDE: _none(
                "engine_class request_counter renderer input_processor "
                "supported_tasks runner_type chat_template_config"
            ),
        }
    )
    | refused(LLM_MEMBERS_REFUSED),
    RequestError,
)

ASYNC_LLM = Names(
    "AsyncLLM",
    works(
        {
            "generate": "",
            "abort": "",
            "get_tokenizer": "",
            "tokenizer": "",
            "shutdown": "the same as `close`",
            "from_engine_args": "",
            "reset_prefix_cache": "",
            "add_lora": "",
            "check_health": "",
            "is_running": "",
            "is_stopped": "",
            "errored": "",
            "vllm_config": "see `vllm_config`; its parts are attributes too",
            "model_config": "",
            "scheduler_config": "",
        }
    )
    | refused(
        {
            _POOLING: _none("encode"),
            _SLEEP: _none("sleep wake_up release_kv_cache_memory is_sleeping"),
            _WEIGHTS: _none(
                "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
                "start_draft_weight_update update_weights finish_weight_update "
                "update_weight_version get_weight_version compute_weight_checksums"
            ),
            _PROFILE: _none("start_profile stop_profile profiler is_tracing_enabled"),
            "adapters go by name: `unload_adapter`": _none("remove_lora list_loras"),
            "the error reaches every caller": _none("dead_error"),
            "an adapter stays while it has a name: `load_adapter`": _none("pin_lora"),
            "`abort` the requests, or do not send any": _none(
                "pause_generation resume_generation is_paused wait_for_requests_to_drain"
            ),
            "iterate over `generate`": _none("add_request output_handler output_processor"),
            "bound the requests in the program": _none(
                "check_admission admission_stats get_num_unfinished_requests get_num_queued_tokens"
            ),
            "images are known by their content: nothing becomes stale": _none(
                "reset_mm_cache reset_encoder_cache"
            ),
            "nothing is logged: read the outputs' `metrics`": _none(
                "do_log_stats log_requests log_stats logger_manager"
            ),
            "a process is started anew": _none("checkpoint_prepare checkpoint_restore"),
            "K/V stay where they are": _none(
                "notify_kv_transfer_request_rejected get_kv_event_sources"
            ),
            _EXPERT: _none(
                "collective_rpc scale_elastic_ep get_external_elastic_ep_status handle_fault "
                "get_status should_keep_api_server_alive"
            ),
            _INSIDE: _none(
                "observability_config renderer input_processor engine_core get_supported_tasks "
                "from_vllm_config"
            ),
        }
    )
    | refused(ASYNC_MEMBERS_REFUSED),
    RequestError,
)

LLM_ENGINE = Names(
    "LLMEngine",
    works(
        {
            "from_engine_args": "",
            "add_request": "",
            "step": "the error of a request that failed is raised, once",
            "has_unfinished_requests": "",
            "get_num_unfinished_requests": "",
            "abort_request": "",
            "get_tokenizer": "",
            "tokenizer": "",
            "get_metrics": "",
            "reset_prefix_cache": "",
            "add_lora": "",
            "vllm_config": "see `vllm_config`; its parts are attributes too",
            "model_config": "",
        }
    )
    | refused(
        {
            _SLEEP: _none("sleep wake_up release_kv_cache_memory is_sleeping"),
            _WEIGHTS: _none("set_weight_version get_weight_version"),
            _PROFILE: _none("start_profile stop_profile"),
            "adapters go by name: see `LLM.unload_adapter`": _none(
                "remove_lora list_loras pin_lora"
            ),
            "images are known by their content: nothing becomes stale": _none(
                "reset_mm_cache reset_encoder_cache"
            ),
            "nothing is logged: read the outputs' `metrics`": _none(
                "do_log_stats do_log_stats_with_interval log_stats logger_manager"
            ),
            _EXPERT: _none(
                "has_unfinished_requests_dp external_launcher_dp should_execute_dummy_batch "
                "dp_group"
            ),
            "there are no workers: `engine.model` is the model": _none(
                "collective_rpc apply_model model_executor"
            ),
            _INSIDE: _none(
                "observability_config renderer input_processor output_processor engine_core "
                "from_vllm_config get_supported_tasks"
            ),
        }
    )
    | refused(ENGINE_MEMBERS_REFUSED),
    RequestError,
)

_OWN_STEPS = "make an `LLMEngine`, whose steps a program makes itself"
ENGINE_VIEW = Names(
    "LLM.llm_engine",
    works(
        {
            "engine": "as `LLM.engine`",
            "get_tokenizer": "",
            "tokenizer": "",
            "vllm_config": "see `vllm_config`; its parts are attributes too",
            "get_metrics": "",
            "has_unfinished_requests": "",
            "add_lora": "",
            "reset_prefix_cache": "",
        }
    )
    | refused(
        {
            _OWN_STEPS: _none(
                "add_request step abort_request get_num_unfinished_requests from_engine_args"
            )
        }
    )
    | {name: row for name, row in LLM_ENGINE.rows.items() if row.verdict is Verdict.REFUSED}
    | refused({"`LLM.close()` frees the memory": _none("close shutdown")}),
    RequestError,
)

PARAMS = Names(
    "SamplingParams",
    works({"from_optional": "", "clone": "", "num_logprobs": "", "sampling_type": ""})
    | refused(
        {
            "the engine checks a request when it is handed over": _none("verify"),
            "the engine knows the model's tokens; see `stop_token_ids` for more": _none(
                "update_from_generation_config update_from_tokenizer eos_token_id "
                "all_stop_token_ids bad_words_token_ids"
            ),
            "there is no warm-up": _none("for_sampler_warmup"),
        }
    ),
    RequestError,
)

REQUEST_OUTPUT = Names(
    "RequestOutput",
    works(
        {
            "request_id": "",
            "prompt": "",
            "prompt_token_ids": "",
            "prompt_logprobs": "",
            "outputs": "",
            "finished": "",
            "num_cached_tokens": "",
            "metrics": "see `RequestOutput.metrics`",
            "lora_request": "",
        }
    )
    | accepted(
        {
            "None": [
                "encoder_prompt",
                "encoder_prompt_token_ids",
                "num_cache_creation_tokens",
                "prompt_token_id_logprobs",
                "kv_transfer_params",
                "ec_transfer_params",
            ]
        }
    ),
    RequestError,
)

COMPLETION_OUTPUT = Names(
    "CompletionOutput",
    works(
        {
            "index": "",
            "text": "",
            "token_ids": "",
            "cumulative_logprob": "",
            "logprobs": "",
            "finish_reason": "",
            "stop_reason": "",
            "lora_request": "",
            "finished": "",
        }
    )
    | accepted(
        {"None": ["routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"]}
    ),
    RequestError,
)

REQUEST_METRICS = Names(
    "RequestOutput.metrics",
    works(
        {
            "queue": "seconds until its first step began",
            "time_to_first_token": "seconds",
            "time_per_token": "mean seconds between later tokens",
            "total": "seconds until its last token so far",
            "num_generation_tokens": "of the first answer",
            "arrival_time": "in seconds of `time.time()`",
            "first_scheduled_time": "in seconds of `time.time()`",
            "first_token_time": "in seconds of `time.time()`",
            "last_token_time": "in seconds of `time.time()`",
            "queued_ts": "in seconds of `time.perf_counter()`",
            "scheduled_ts": "in seconds of `time.perf_counter()`",
            "first_token_ts": "in seconds of `time.perf_counter()`",
            "last_token_ts": "in seconds of `time.perf_counter()`",
            "time_in_queue": "as `queue`",
            "first_token_latency": "as `time_to_first_token`",
        }
    )
    | refused(METRICS_REFUSED),
    RequestError,
)

LOGPROB = Names(
    "Logprob", works(dict.fromkeys(["logprob", "rank", "decoded_token"], "")), RequestError
)

BEAM = Names(
    "BeamSearchSequence",
    refused(
        {
            "the name is `tokens`": _none("token_ids"),
            "the name is `cum_logprob`": _none("cumulative_logprob"),
        }
    ),
    RequestError,
)

BEAMS = Names(
    "BeamSearchOutput",
    refused({"each of `sequences` is an answer": _none("outputs text prompt")}),
    RequestError,
)

EXPORTS = Names(
    "headstart",
    works(
        dict.fromkeys(
            [
                "__version__",
                "LLM",
                "PromptType",
                "TextPrompt",
                "TokensPrompt",
                "SamplingParams",
                "RequestOutput",
                "CompletionOutput",
                "EngineArgs",
                "AsyncEngineArgs",
                "AsyncLLMEngine",
                "LLMEngine",
                "__version_tuple__",
            ],
            "",
        )
    )
    | refused(
        {
            "every decoder that transformers has is tried": _none("ModelRegistry"),
            _EXPERT: _none("initialize_ray_cluster"),
            _POOLING: _none(
                "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput "
                "EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput "
                "ScoringOutput ScoringRequestOutput"
            ),
        }
    ),
    RequestError,
)
