"""What becomes of vLLM's engine options: parameters of its `LLM` and fields of its `EngineArgs`."""

from collections.abc import Mapping, Sequence
from typing import Any

WORKS: Mapping[str, str] = {
    "model": "a folder or a name on the Hugging Face hub",
    "tokenizer": "a folder with one, in place of the model's own",
    "dtype": 'also `torch.bfloat16`, `"half"`, `"float"`',
    "seed": "seed of requests that bring none",
    "max_model_len": '`None`, `-1` and `"auto"`: what model and memory allow',
    "block_size": "1, 2, 4, ... 128",
    "enable_prefix_caching": "on unless `False`",
    "max_num_batched_tokens": "tokens of a step",
    "max_num_seqs": "requests that run at once",
    "kv_cache_memory_bytes": "our name: `kv_cache_memory`",
    "kv_cache_dtype": '`"auto"`, the model\'s dtype, or `"int8"`',
    "num_gpu_blocks_override": "our name: `num_blocks`",
    "enable_lora": "on unless `False`",
    "max_loras": "adapters in memory at once",
    "max_lora_rank": "the highest rank",
    "limit_mm_per_prompt": '`{"image": n}`; our name: `max_images`',
    "generation_config": '`"auto"`, `"vllm"` or a folder: the sampling of calls that bring none',
    "override_generation_config": "changes to it",
    "chat_template": "a template or a file with one",
    "scheduling_policy": "`priority=` counts under both values",
}

ACCEPTED: Mapping[str, Sequence[str]] = {
    "there are no CUDA graphs": [
        "enforce_eager",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "specialize_active_lora",
        "cudagraph_metrics",
    ],
    "nothing is logged": [
        "disable_log_stats",
        "aggregate_engine_logging",
        "enable_logging_iteration_details",
        "log_level",
        "logging_config",
        "log_config_file",
    ],
    "K/V take `kv_cache_fraction` of what is free": ["gpu_memory_utilization"],
    "long prompts are always cut into chunks": ["enable_chunked_prefill"],
    "images are encoded whole": ["disable_chunked_mm_input"],
    "code of a model's folder is never run; a model that needs it is refused": [
        "trust_remote_code"
    ],
    "set `HF_TOKEN` in the environment": ["hf_token"],
    "one device": [
        "disable_custom_all_reduce",
        "fully_sharded_loras",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dp_sync_interval",
    ],
    "up to 1,000 are allowed in any case": ["max_logprobs"],
    "nothing is compiled": [
        "compilation_config",
        "optimization_level",
        "jit_monitor_mode",
        "jit_monitor_verbose",
    ],
    "there is one mode": ["performance_mode"],
    "there is one way to schedule": ["async_scheduling"],
    "loading shows no bar": ["use_tqdm_on_load"],
    "a match is confirmed by content; names are SHA-256": ["prefix_caching_hash_algo"],
    "the fastest backend of the machine is taken": ["attention_config", "attention_backend"],
    "our name: `share_attention=False`": ["disable_cascade_attn"],
    "the fastest kernels of the machine are taken": [
        "kernel_config",
        "linear_backend",
        "moe_backend",
        "enable_flashinfer_autotune",
        "ir_op_priority",
    ],
    "weights are read in one go": [
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
    ],
    "our name: `encoder_cache_rows`": ["mm_processor_cache_gb"],
    "images are known by their content": ["mm_processor_cache_type"],
    "SHA-256": ["mm_hasher_algorithm"],
    "one process": [
        "mm_shm_cache_max_object_size_mb",
        "mm_ipc_gpu_memory_gb",
        "mm_tensor_ipc",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "master_addr",
        "master_port",
        "distributed_executor_backend",
        "ray_workers_use_nsight",
        "watchdog_config",
        "enable_shm_tensor_arena",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
    ],
    "nothing is profiled": ["skip_mm_profiling"],
    "callers tokenise in their own threads": ["renderer_num_workers"],
    "our name: `max_loras`": ["max_cpu_loras"],
    "the model's": ["lora_dtype"],
    "a prompt is let in when all of it fits": ["scheduler_reserve_full_isl", "watermark"],
    "`max_num_batched_tokens` bounds a chunk": [
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
    ],
    "`LLM.get_metrics()` has what there is": [
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "enable_mfu_metrics",
        "enable_mm_processor_stats",
        "show_hidden_metrics_for_version",
    ],
    "names belong to a server": ["served_model_name"],
    "there is one manager": ["disable_hybrid_kv_cache_manager"],
    "`close()` waits for the step under way": ["shutdown_timeout"],
    "no environment variables of vLLM are read": ["fail_on_environ_validation"],
    "no such backend": ["swa_bounded_replay"],
    "the draw is torch's `multinomial`": ["use_fp64_gumbel"],
    "our own decoder where it fits, else transformers'": ["model_impl"],
    "every step may begin a prompt": ["prefill_schedule_interval"],
    "there is no sleep mode": [
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
    ],
    "K/V stay where they are": ["kv_offloading_backend"],
    "no state-space models": ["mamba_cache_philox_rounds", "replayssm_buffer_len", "mamba_backend"],
    "encoders run in the model's dtype": ["mm_encoder_fp8_scale_save_margin"],
    "no videos": ["video_pruning_method"],
    "weights go where the model runs": ["pt_load_map_location"],
    "weights are taken as they are": ["allow_deprecated_quantization"],
    "there is one backend for structured outputs": ["structured_outputs_config"],
    "nothing is fetched from the network": ["allowed_media_domains"],
}

EARLIER: Mapping[str, Sequence[str]] = {
    "preempted requests hit their own blocks when they resume": ["swap_space"],
    "there is one block manager": ["use_v2_block_manager"],
    "there are no CUDA graphs": ["max_seq_len_to_capture"],
    "nothing is logged": ["disable_log_requests", "enable_log_requests"],
    "there is one backend for structured outputs": ["guided_decoding_backend"],
    "there is one way to schedule": ["disable_async_output_proc"],
}

REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "one engine runs in one process on one device: start several": {
        "pipeline_parallel_size": (1,),
        "nnodes": (1,),
        "node_rank": (0,),
        "device_ids": (),
        "tensor_parallel_size": (1,),
        "prefill_context_parallel_size": (1,),
        "decode_context_parallel_size": (1,),
        "dcp_comm_backend": (),
        "dcp_q_replicate": (),
        "dcp_kv_cache_interleave_size": (1,),
        "cp_kv_cache_interleave_size": (),
        "data_parallel_size": (1,),
        "data_parallel_rank": (),
        "data_parallel_start_rank": (),
        "data_parallel_size_local": (),
        "data_parallel_address": (),
        "data_parallel_rpc_port": (),
        "data_parallel_hybrid_lb": (False,),
        "data_parallel_external_lb": (False,),
        "data_parallel_multi_port_external_lb": (False,),
        "data_parallel_backend": ("mp",),
        "enable_hc_sp": (False,),
        "enable_expert_parallel": (False,),
        "enable_batch_sharded_sampling": (),
        "enable_ep_weight_filter": (False,),
        "sparse_indexer_topk_backend": ("auto",),
        "all2all_backend": ("allgather_reducescatter",),
        "enable_elastic_ep": (False,),
        "elastic_ep_max_dp_size": (),
        "enable_dbo": (False,),
        "ubatch_size": (0,),
        "disable_nccl_for_dp_synchronization": (),
        "eplb_config": (),
        "enable_eplb": (False,),
        "expert_placement_strategy": ("linear",),
        "mm_encoder_tp_mode": ("weights",),
        "enable_fault_tolerance": (False,),
        "fault_tolerance_config": (),
    },
    "give a folder: `huggingface-cli download NAME --revision REVISION` makes one": {
        "revision": (),
        "code_revision": (),
        "tokenizer_revision": (),
        "download_dir": (),
        "model_weights": ("",),
        "hf_config_path": (),
    },
    "a tokenizer is read as its folder says": {
        "tokenizer_mode": ("auto", "slow", "hf", "fast"),
    },
    "leave it out; give `prompt_token_ids` and `detokenize=False`": {
        "skip_tokenizer_init": (False,)
    },
    'give `weights`: `"int8"`, `"int5"` or `"int4"`; a GGUF file has its own': {
        "quantization": (),
        "quantization_config": (),
    },
    "weights are read as the checkpoint has them; choose a dtype": {
        "load_format": ("auto", "safetensors", "hf"),
        "model_loader_extra_config": ({},),
        "ignore_patterns": (),
    },
    "K/V of all layers have one dtype": {"kv_cache_dtype_skip_layers": ([],)},
    "the configuration is the checkpoint's: edit config.json in its folder": {
        "hf_overrides": ({},),
        "model_class_overrides": ({},),
        "config_format": ("auto",),
        "disable_sliding_window": (False,),
        "additional_config": ({},),
    },
    "models here generate; for embeddings or scores use transformers or sentence-transformers": {
        "runner": ("auto", "generate"),
        "convert": ("auto", "none"),
        "pooler_config": (),
        "max_lora_cls_labels": (),
    },
    "images are read by the model's own processor: Pillow images, paths, bytes, data: URLs": {
        "mm_processor_kwargs": (),
        "media_io_kwargs": ({},),
        "mm_encoder_only": (False,),
        "mm_encoder_attn_backend": (),
        "mm_encoder_attn_dtype": (),
        "mm_encoder_fp8_scale_path": (),
        "mm_encoder_fp8_scale_save_path": (),
        "video_pruning_rate": (),
        "mm_processor_device": ("auto",),
        "mm_device_do_normalize": (True, False),
        "allowed_local_media_path": ("",),
        "interleave_mm_strings": (False,),
        "language_model_only": (False,),
        "io_processor_plugin": (),
    },
    "prompts are texts, token ids and images, no embeddings": {
        "enable_prompt_embeds": (False,),
        "enable_mm_embeds": (False,),
    },
    "the model stays in memory whole: take a smaller one, or a narrower dtype": {
        "cpu_offload_gb": (0,),
        "cpu_offload_params": (set(),),
        "offload_backend": ("auto",),
        "offload_group_size": (0,),
        "offload_num_in_group": (1,),
        "offload_prefetch_step": (1,),
        "offload_params": (set(), []),
    },
    "K/V stay where they are: raise `kv_cache_fraction` for more": {
        "kv_offloading_size": (),
        "kv_transfer_config": (),
        "kv_events_config": (),
        "ec_transfer_config": (),
        "ec_manager_config": (),
        "kv_sharing_fast_prefill": (False,),
        "prefix_cache_retention_interval": (0,),
        "prefix_match_unit": (),
    },
    "there is no sleep mode: `close()` frees the memory": {
        "enable_sleep_mode": (False,),
        "enable_cumem_allocator": (False,),
        "enable_nccl_comm_suspend": (False,),
    },
    "there is no speculative decoding": {
        "speculative_config": (),
        "spec_method": (),
        "spec_model": (),
        "spec_tokens": (),
        "per_request_spec_decode_metrics": ("none",),
    },
    "models with a state beside K/V are not run": {
        "mamba_config": (),
        "mamba_cache_dtype": ("auto",),
        "mamba_ssm_cache_dtype": ("auto",),
        "mamba_block_size": (),
        "mamba_cache_mode": (),
        "enable_mamba_shared_prefix_checkpoint": (False,),
        "use_replayssm": (False,),
        "mamba_ssu_algorithm": (),
        "enable_mamba_cache_stochastic_rounding": (False,),
        "gdn_prefill_backend": (),
        "kda_prefill_backend": (),
        "kda_decode_backend": (),
        "engram_config": (),
        "diffusion_config": (),
        "monokernel": (False,),
    },
    "give adapters by name in each request: `lora_request` or `adapter`": {
        "default_mm_loras": (),
        "lora_target_modules": (),
        "enable_tower_connector_lora": (False,),
        "enable_mixed_moe_lora_format": (False,),
        "enable_moe_shared_loras": (False,),
    },
    "there is one scheduler: `max_num_seqs` and `max_num_batched_tokens` bound a step": {
        "scheduler_cls": (),
        "max_num_scheduled_tokens": (),
        "max_num_active_seqs": (),
        "max_num_queued_reqs": (),
        "max_num_queued_tokens": (),
        "stream_interval": (1,),
    },
    "there is one worker, in this process": {
        "worker_cls": ("auto",),
        "worker_extension_cls": ("",),
        "weight_transfer_config": (),
    },
    "give `logits_processors` in SamplingParams": {"logits_processors": ()},
    "log-probabilities are those of the raw logits": {"logprobs_mode": ("raw_logprobs",)},
    "the answer's text holds the reasoning: take it apart in the program": {
        "reasoning_parser": ("",),
        "reasoning_parser_plugin": (),
        "reasoning_config": (),
    },
    "outputs hold text, token ids and log-probabilities": {
        "enable_return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "aux_output_config": (),
        "enable_trace_replay": (False,),
        "watermark_config": (),
        "tokens_only": (False,),
    },
    "profile with torch.profiler or py-spy around the call": {
        "profiler_config": (),
        "otlp_traces_endpoint": (),
        "collect_detailed_traces": (),
        "custom_histogram_buckets": (),
        "enable_layerwise_nvtx_tracing": (False,),
    },
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _names(
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
    "served_model_name cudagraph_capture_sizes allowed_media_domains numa_bind_nodes "
    "numa_bind_cpus device_ids cpu_offload_params offload_params lora_target_modules "
    "collect_detailed_traces sleep_preserve_parameter_names kv_cache_dtype_skip_layers "
    "logits_processors ignore_patterns"
)
"""Options that take several values on a command line."""

TEXTS = frozenset(["model", "tokenizer", "dtype", "generation_config"])
"""Options whose value is a text, even one that spells a number."""

SHORT: Mapping[str, str] = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
"""Short flags of a command line."""
