"""vLLM's engine options and server flags, and the options of headstart that they stand for.

Of vLLM's names those in `WORKS` are read, those in `IGNORED` have no effect whatever their value,
and those in `ABSENT` must be None or one of the values listed here. docs/vllm.md explains them.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.models.files import find_folder, read_json
from headstart.validation import NOT_AN_OPTION, describe


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORKS = _names(
    """
    model tokenizer dtype seed max_model_len block_size enable_prefix_caching
    max_num_batched_tokens max_num_seqs kv_cache_memory_bytes kv_cache_dtype
    num_gpu_blocks_override enable_lora max_loras max_lora_rank limit_mm_per_prompt
    generation_config override_generation_config chat_template scheduling_policy
    """
)

_IGNORED_SWITCHES = _names(
    """
    aggregate_engine_logging allow_deprecated_quantization async_scheduling cudagraph_metrics
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests
    disable_log_stats enable_chunked_prefill enable_flashinfer_autotune enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats
    enable_shm_tensor_arena enforce_eager fail_on_environ_validation fully_sharded_loras
    jit_monitor_verbose kv_cache_metrics long_prefill_token_threshold_adaptive numa_bind
    ray_workers_use_nsight scheduler_reserve_full_isl skip_mm_profiling
    sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay trust_remote_code
    use_fp64_gumbel use_tqdm_on_load use_v2_block_manager
    """
)
_IGNORED_VALUES = _names(
    """
    allowed_media_domains attention_backend attention_config compilation_config
    cpu_distributed_timeout_seconds cudagraph_capture_sizes dbo_decode_token_threshold
    dbo_prefill_token_threshold distributed_executor_backend distributed_timeout_seconds
    dp_sync_interval gpu_memory_utilization guided_decoding_backend hf_token ir_op_priority
    jit_monitor_mode kernel_config kv_cache_metrics_sample kv_offloading_backend linear_backend
    log_config_file log_level logging_config long_prefill_token_threshold lora_dtype
    mamba_backend mamba_cache_philox_rounds master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_logprobs max_parallel_loading_workers max_seq_len_to_capture
    mm_encoder_fp8_scale_save_margin mm_hasher_algorithm mm_ipc_gpu_memory_gb
    mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
    model_impl moe_backend numa_bind_cpus numa_bind_nodes optimization_level performance_mode
    prefill_schedule_interval prefix_caching_hash_algo pt_load_map_location renderer_num_workers
    replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads served_model_name show_hidden_metrics_for_version
    shutdown_timeout sleep_mode_backend sleep_preserve_parameter_names structured_outputs_config
    swap_space video_pruning_method watchdog_config watermark
    """
)
IGNORED = frozenset(_IGNORED_SWITCHES + _IGNORED_VALUES)


def _each(names: str, *values: object) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of names; the first value is the default."""
    return dict.fromkeys(_names(names), values)


ABSENT: Mapping[str, tuple[Any, ...]] = {
    **_each(
        """
        aux_output_config code_revision collect_detailed_traces cp_kv_cache_interleave_size
        custom_histogram_buckets data_parallel_address data_parallel_rank data_parallel_rpc_port
        data_parallel_size_local data_parallel_start_rank dcp_comm_backend dcp_q_replicate
        default_mm_loras device_ids diffusion_config disable_nccl_for_dp_synchronization
        download_dir ec_manager_config ec_transfer_config elastic_ep_max_dp_size
        enable_batch_sharded_sampling engram_config eplb_config fault_tolerance_config
        gdn_prefill_backend hf_config_path ignore_patterns io_processor_plugin kda_decode_backend
        kda_prefill_backend kv_events_config kv_offloading_size kv_transfer_config
        logits_processors lora_target_modules mamba_block_size mamba_cache_mode mamba_config
        mamba_ssu_algorithm max_lora_cls_labels max_num_active_seqs max_num_queued_reqs
        max_num_queued_tokens max_num_scheduled_tokens mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_processor_kwargs otlp_traces_endpoint pooler_config prefix_match_unit profiler_config
        quantization quantization_config reasoning_config reasoning_parser_plugin revision
        scheduler_cls spec_method spec_model spec_tokens speculative_config tokenizer_revision
        video_pruning_rate watermark_config weight_transfer_config
        """
    ),
    **_each(
        """
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        disable_sliding_window enable_cumem_allocator enable_dbo enable_elastic_ep
        enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
        enable_hc_sp enable_layerwise_nvtx_tracing enable_mamba_cache_stochastic_rounding
        enable_mamba_shared_prefix_checkpoint enable_mixed_moe_lora_format enable_mm_embeds
        enable_moe_shared_loras enable_nccl_comm_suspend enable_prompt_embeds
        enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora
        enable_trace_replay interleave_mm_strings kv_sharing_fast_prefill language_model_only
        mm_encoder_only monokernel return_sampling_mask skip_tokenizer_init tokens_only
        use_replayssm
        """,
        False,
    ),
    **_each(
        """
        data_parallel_size dcp_kv_cache_interleave_size decode_context_parallel_size nnodes
        offload_num_in_group offload_prefetch_step pipeline_parallel_size
        prefill_context_parallel_size stream_interval tensor_parallel_size
        """,
        1,
    ),
    **_each(
        """
        cpu_offload_gb node_rank offload_group_size prefix_cache_retention_interval ubatch_size
        """,
        0,
    ),
    **_each(
        """
        config_format mamba_cache_dtype mamba_ssm_cache_dtype mm_processor_device offload_backend
        sparse_indexer_topk_backend worker_cls
        """,
        "auto",
    ),
    **_each("allowed_local_media_path model_weights reasoning_parser worker_extension_cls", ""),
    **_each(
        """
        additional_config hf_overrides media_io_kwargs model_class_overrides
        model_loader_extra_config
        """,
        {},
    ),
    "kv_cache_dtype_skip_layers": ([],),
    "cpu_offload_params": (set(),),
    "offload_params": (set(), []),
    "all2all_backend": ("allgather_reducescatter",),
    "convert": ("auto", "none"),
    "data_parallel_backend": ("mp",),
    "expert_placement_strategy": ("linear",),
    "load_format": ("auto", "safetensors", "hf"),
    "logprobs_mode": ("raw_logprobs",),
    "mm_device_do_normalize": (True, False),
    "mm_encoder_tp_mode": ("weights",),
    "per_request_spec_decode_metrics": ("none",),
    "runner": ("auto", "generate"),
    "tokenizer_mode": ("auto", "slow", "hf", "fast"),
}

# Flags of `vllm serve`. They take precedence over the names above.
SERVE_WORKS = frozenset(
    _names(
        """
    host port served_model_name config api_key lora_modules trust_request_chat_template
    default_chat_template_kwargs allowed_origins ssl_keyfile ssl_certfile shutdown_timeout
    otlp_traces_endpoint disable_uvicorn_access_log
    """
    )
)

_SERVE_IGNORED_SWITCHES = _names(
    """
    cohere_is_reasoning_model disable_frontend_multiprocessing enable_auto_tool_choice
    enable_flash_late_interaction enable_log_deltas enable_offline_docs
    enable_prompt_tokens_details enable_reasoning enable_request_id_headers log_error_stack
    """
)
SERVE_IGNORED = frozenset(_SERVE_IGNORED_SWITCHES) | {
    *_names(
        """
    anthropic_disabled_thinking_effort chat_template_content_format cohere_format
    data_parallel_supervisor_port disable_access_log_for_endpoints
    dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s fingerprint_mode fingerprint_value h11_max_header_count
    h11_max_incomplete_event_size max_log_len uvicorn_log_level
    """
    )
}

SERVE_ABSENT: Mapping[str, tuple[Any, ...]] = {
    **_each("grpc_port middleware prompt_adapters tool_server"),
    **_each(
        """
        allow_credentials disable_fastapi_docs enable_force_include_usage enable_log_outputs
        enable_per_request_metrics enable_scale_out enable_server_load_tracking enable_ssl_refresh
        enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none grpc headless
        return_tokens_as_token_ids trust_request_mm_kwargs
        """,
        False,
    ),
    **_each("reasoning_parser_plugin ssl_ca_certs ssl_ciphers tool_parser_plugin uds", ""),
    **_each("sse_keep_alive_interval ssl_cert_reqs", 0),
    **_each("allowed_headers allowed_methods", ["*"]),
    "api_server_count": (1,),
    "reasoning_effort_map": ({},),
    "reasoning_parser": (
        *("", "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "minimax_m2", "qwen3"),
    ),
    "response_role": ("assistant",),
    "root_path": ("", "/"),
    "tool_call_parser": ("hermes", "llama3_json", "llama4_json", "mistral"),
    "tool_strict_level": ("auto",),
}

SWITCHES = frozenset(_IGNORED_SWITCHES + _SERVE_IGNORED_SWITCHES) | {
    *_names(
        """
    dcp_q_replicate disable_nccl_for_dp_synchronization disable_uvicorn_access_log
    enable_batch_sharded_sampling enable_lora enable_prefix_caching trust_request_chat_template
    """
    )
}
"""Options that are True or False, apart from those that `ABSENT` has such a value of."""

_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_GENERATION = _names("temperature top_p top_k min_p repetition_penalty max_tokens")
"""Sampling parameters that are read from a generation_config.json, as in vLLM."""


class EngineOptions(NamedTuple):
    """Options of an engine and its calls.

    config: fields of `EngineConfig`. tokenizer: its folder, None for the model's own. sampling:
    for calls without parameters. chat_template: for chats without one, None for the tokenizer's.
    """

    config: dict[str, Any]
    tokenizer: Path | None
    sampling: SamplingParams
    chat_template: str | None


def read_options(model: str | Path, options: Mapping[str, Any]) -> EngineOptions:
    """Sort the options of `LLM(...)`. Raises ConfigError, ModelError."""
    options = _read(options)
    source = options.get("generation_config", "auto")
    return EngineOptions(
        _as_config(options),
        _read_tokenizer(options.get("tokenizer"), model),
        _read_sampling(model, source, options.get("override_generation_config", {})),
        _read_template(options.get("chat_template")),
    )


def read_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` among the options, before there is a model.

    Raises ConfigError, also for a chat template that cannot be read.
    """
    options = _read(options)
    _read_template(options.get("chat_template"))
    return _as_config(options)


def read_names(
    options: Mapping[str, Any],
    works: frozenset[str],
    ignored: frozenset[str],
    absent: Mapping[str, tuple[Any, ...]],
    spell: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Return the values of names that work. Raises ConfigError for an option that is not here."""
    read = {}
    for name, value in options.items():
        if name in works:
            read[name] = value
        elif name not in ignored and not (
            name in absent
            and any(
                value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                for allowed in (None, *absent[name])
            )
        ):
            raise ConfigError(f"{spell(name)} is {describe(value)}; {NOT_AN_OPTION}")
    return read


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    read = read_names(options, frozenset([*WORKS, *_DEFAULTS]), IGNORED, ABSENT)
    return {name: value for name, value in read.items() if value is not None or name not in WORKS}


_ALIASES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "limit_mm_per_prompt": "max_images",
}
"""Fields of `EngineConfig` by vLLM's names for them."""


def _as_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` with the values of vLLM's options."""
    policy = options.get("scheduling_policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy is {describe(policy)}; allowed: fcfs, priority")
    config = {name: value for name, value in options.items() if name in _DEFAULTS}
    dtype = config.get("dtype")
    if type(dtype).__name__ in ("str", "dtype"):  # torch's dtypes, and vLLM's two further names
        name = str(dtype).removeprefix("torch.")
        config["dtype"] = {"half": "float16", "float": "float32"}.get(name, name)
    for name, values in (("device", ["auto"]), ("max_model_len", [-1, "auto"])):
        if config.get(name) in values:
            del config[name]
    for name, field_name in _ALIASES.items():
        value = options.get(name)
        if name == "limit_mm_per_prompt":
            value = _count_images(value)
        if value is None:
            continue
        other = config.get(field_name, _DEFAULTS[field_name])
        if other not in (None, _DEFAULTS[field_name], value):
            raise ConfigError(
                f"{field_name} is {describe(other)}, and {describe(value)} by {name}; allowed: one "
                "of the two"
            )
        config[field_name] = value
    return config


def _count_images(limits: object) -> Any:
    """Read `{"image": 4}` or `{"image": {"count": 4}}`; prompts have no other media."""
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'limit_mm_per_prompt is {describe(limits)}; allowed: a dict such as {{"image": 4}}'
        )
    images = limits.get("image")
    return images.get("count") if isinstance(images, Mapping) else images


def _read_tokenizer(path: object, model: str | Path) -> Path | None:
    """Return the folder of a tokenizer, None for the model's own. Raises ConfigError."""
    if path is None or str(path) == str(model):
        return None
    if isinstance(path, str | Path) and str(path) and Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    raise ConfigError(f"tokenizer is {describe(path)}; allowed: the path of a folder with one")


def _read_sampling(model: str | Path, source: object, changes: object) -> SamplingParams:
    """Return the sampling of a model's generation_config.json, with changes."""
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(
            f'generation_config is {describe(source)}; allowed: "auto", "vllm" or a folder'
        )
    if not isinstance(changes, Mapping):
        raise ConfigError(f"override_generation_config is {describe(changes)}; allowed: a dict")
    config: dict[str, Any] = {}
    if source != "vllm":
        path = find_folder(model if source == "auto" else source) / "generation_config.json"
        if path.is_file():
            config = read_json(path)
        elif source != "auto":
            raise ConfigError(f"generation_config is {describe(source)}; there is no {path}")
    config |= changes
    config["max_tokens"] = config.get("max_new_tokens")
    sampling = {name: config[name] for name in _GENERATION if config.get(name) is not None}
    try:
        return SamplingParams(**sampling)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error


def _read_template(source: object) -> str | None:
    """Return a template, or the text of the file with this path. Raises ConfigError."""
    if source is None:
        return None
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"chat_template is {describe(source)}; allowed: a template or a file")
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"chat_template is {describe(source)}, no template, and no file: {error}"
        ) from error
