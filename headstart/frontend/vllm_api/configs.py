"""What becomes of the fields of vLLM's configurations, which programs read and do not change."""

from collections.abc import Mapping

from headstart.errors import RequestError
from headstart.frontend.vllm_api.rows import Names, Row, refused, works

__all__ = ["CONFIGS"]

_OPTIONS = "`engine.config` has the options that count here"
_SHAPES = "read it of `hf_text_config`"
_SAMPLING = "`LLM.get_default_sampling_params()` has the sampling"
_CHECKPOINT = "the configuration is the checkpoint's: read it of `hf_config`"
_POOLING = "models here generate; for embeddings or scores use transformers"
_ONE = "one engine runs in one process on one device"
_POOL = "`engine.manager.config` tells of the pool"
_STEPS = "`max_num_seqs` and `max_num_batched_tokens` bound a step"


def _rows(text: str, notes: Mapping[str, str], missing: Mapping[str, str]) -> dict[str, Row]:
    there = works({**dict.fromkeys(text.split(), ""), **notes})
    return there | refused(
        {note: dict.fromkeys(names.split(), ()) for note, names in missing.items()}
    )


CONFIGS: Mapping[str, Names] = {
    owner: Names(owner, rows, RequestError)
    for owner, rows in {
        "vllm_config": _rows(
            "model_config cache_config scheduler_config parallel_config",
            {
                "speculative_config": "None",
                "quant_config": "None",
                "kv_transfer_config": "None",
                "kv_events_config": "None",
                "ec_transfer_config": "None",
            },
            {
                "`engine.config` has `max_loras` and `max_lora_rank`": "lora_config",
                "`engine.config.device` says where it runs": "device_config",
                "weights are read as the checkpoint has them": "load_config",
                "nothing is compiled": "compilation_config optimization_level",
                "structured outputs have one backend": (
                    "structured_outputs_config decoding_config guided_decoding_config"
                ),
                "nothing is logged: read the outputs' `metrics`": "observability_config",
                "profile with torch.profiler or py-spy around the call": "profiler_config",
                "the answer's text holds the reasoning": "reasoning_config",
                _OPTIONS: (
                    "additional_config attention_config kernel_config mamba_config "
                    "offload_config weight_transfer_config instance_id shutdown_timeout "
                    "prompt_adapter_config"
                ),
            },
        ),
        "model_config": _rows(
            "model tokenizer dtype max_model_len seed is_multimodal_model vocab_size "
            "hf_config hf_text_config get_vocab_size",
            {
                "model": "the folder that it was read from",
                "runner_type": '`"generate"`',
                "quantization": "None",
            },
            {
                _SHAPES: (
                    "get_hidden_size get_head_size get_num_layers get_num_kv_heads "
                    "get_total_num_kv_heads get_num_attention_heads get_sliding_window "
                    "get_inputs_embeds_size uses_mrope use_mla attention_chunk_size"
                ),
                _CHECKPOINT: (
                    "architecture architectures hf_image_processor_config model_arch_config "
                    "hf_overrides hf_config_path revision code_revision tokenizer_revision "
                    "is_encoder_decoder is_attention_free is_hybrid rope_scaling rope_theta "
                    "config_format disable_sliding_window"
                ),
                _SAMPLING: (
                    "generation_config override_generation_config get_diff_sampling_param "
                    "try_get_generation_config"
                ),
                _POOLING: "task runner convert pooler_config supported_tasks",
                "`LLM.get_tokenizer()` is the tokenizer": "tokenizer_mode skip_tokenizer_init",
                "a model that needs its folder's code is refused": "trust_remote_code",
                "up to 1,000 are allowed": "max_logprobs",
                "log-probabilities are those of the raw logits": "logprobs_mode",
                "there are no CUDA graphs": "enforce_eager",
                "names belong to a server": "served_model_name",
                "prompts are texts, token ids and images": (
                    "multimodal_config enable_prompt_embeds limit_mm_per_prompt"
                ),
            },
        ),
        "cache_config": _rows(
            "block_size cache_dtype enable_prefix_caching",
            {"num_gpu_blocks": "blocks of the pool, wherever it is"},
            {
                _POOL: (
                    "gpu_memory_utilization num_cpu_blocks num_gpu_blocks_override swap_space "
                    "swap_space_bytes kv_cache_memory_bytes cpu_offload_gb sliding_window "
                    "prefix_caching_hash_algo is_attention_free calculate_kv_scales metrics_info"
                ),
            },
        ),
        "scheduler_config": _rows(
            "max_num_batched_tokens max_num_seqs",
            {"enable_chunked_prefill": "True"},
            {
                "`model_config` has it": "max_model_len",
                "`priority=` counts in any case": "policy",
                _STEPS: (
                    "max_num_partial_prefills max_long_partial_prefills "
                    "long_prefill_token_threshold num_scheduler_steps num_lookahead_slots "
                    "async_scheduling chunked_prefill_enabled delay_factor preemption_mode "
                    "runner_type is_multimodal_model scheduler_cls stream_interval "
                    "max_num_encoder_input_tokens encoder_cache_size"
                ),
            },
        ),
        "parallel_config": _rows(
            "",
            {
                "tensor_parallel_size": "1",
                "pipeline_parallel_size": "1",
                "data_parallel_size": "1",
                "data_parallel_rank": "0",
                "world_size": "1",
            },
            {
                _ONE: (
                    "rank local_rank node_rank nnodes distributed_executor_backend "
                    "enable_expert_parallel data_parallel_size_local data_parallel_rank_local "
                    "data_parallel_master_ip data_parallel_backend prefill_context_parallel_size "
                    "decode_context_parallel_size world_size_across_dp use_ray "
                    "ray_workers_use_nsight placement_group worker_cls sd_worker_cls "
                    "worker_extension_cls disable_custom_all_reduce "
                    "max_parallel_loading_workers all2all_backend enable_dbo enable_eplb"
                ),
            },
        ),
    }.items()
}
"""The configurations that programs read."""
