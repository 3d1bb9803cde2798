"""How vLLM's options are written on a command line."""

from collections.abc import Mapping, Sequence

__all__ = ["LISTS", "SHORT", "SWITCHES", "TEXTS"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _names(
    "enable_auto_tool_choice enable_reasoning enable_prompt_tokens_details "
    "enable_request_id_headers enable_offline_docs enable_log_deltas log_error_stack "
    "disable_uvicorn_access_log enable_flash_late_interaction cohere_is_reasoning_model "
    "trust_request_chat_template disable_frontend_multiprocessing disable_mm_preprocessor_cache "
    "multi_step_stream_outputs "
    "enable_prefix_caching enable_lora enforce_eager specialize_active_lora cudagraph_metrics "
    "disable_log_stats aggregate_engine_logging enable_logging_iteration_details "
    "enable_chunked_prefill disable_chunked_mm_input trust_remote_code disable_custom_all_reduce "
    "fully_sharded_loras jit_monitor_verbose async_scheduling use_tqdm_on_load "
    "disable_cascade_attn enable_flashinfer_autotune ray_workers_use_nsight numa_bind "
    "enable_shm_tensor_arena skip_mm_profiling scheduler_reserve_full_isl kv_cache_metrics "
    "long_prefill_token_threshold_adaptive enable_mfu_metrics enable_mm_processor_stats "
    "disable_hybrid_kv_cache_manager fail_on_environ_validation swa_bounded_replay "
    "use_fp64_gumbel sleep_mode_offload_cudagraph allow_deprecated_quantization dcp_q_replicate "
    "enable_batch_sharded_sampling disable_nccl_for_dp_synchronization "
    "use_v2_block_manager disable_log_requests enable_log_requests "
    "disable_async_output_proc"
)
"""Options that are True or False, besides those whose row names such a value."""

LISTS = _names(
    "api_key lora_modules middleware prompt_adapters "
    "served_model_name cudagraph_capture_sizes allowed_media_domains numa_bind_nodes "
    "numa_bind_cpus device_ids cpu_offload_params offload_params lora_target_modules "
    "collect_detailed_traces sleep_preserve_parameter_names kv_cache_dtype_skip_layers "
    "logits_processors ignore_patterns"
)
"""Options that take several values on a command line."""

TEXTS = _names(
    "model tokenizer dtype generation_config served_model_name chat_template host api_key "
    "lora_modules ssl_keyfile ssl_certfile default_chat_template_kwargs tool_call_parser "
    "reasoning_parser config otlp_traces_endpoint root_path"
)
"""Options whose value is a text, even one that spells a number."""

SHORT: Mapping[str, Sequence[str]] = {
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "quantization": ["-q"],
    "nnodes": ["-n"],
    "node_rank": ["-r"],
    "decode_context_parallel_size": ["-dcp"],
    "prefill_context_parallel_size": ["-pcp"],
    "data_parallel_size": ["-dp"],
    "data_parallel_rank": ["-dpn"],
    "data_parallel_start_rank": ["-dpr"],
    "data_parallel_size_local": ["-dpl"],
    "data_parallel_address": ["-dpa"],
    "data_parallel_rpc_port": ["-dpp"],
    "data_parallel_backend": ["-dpb"],
    "data_parallel_hybrid_lb": ["-dph"],
    "data_parallel_external_lb": ["-dpe"],
    "data_parallel_multi_port_external_lb": ["-dpm"],
    "enable_expert_parallel": ["-ep"],
    "speculative_config": ["-sc"],
    "diffusion_config": ["-dc"],
    "compilation_config": ["-cc"],
    "attention_config": ["-ac"],
    "gpu_memory_utilization": ["--device-memory-utilization"],
    "api_server_count": ["-asc"],
}
"""Further flags of a command line beside an option's own."""
