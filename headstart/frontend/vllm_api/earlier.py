"""Names that earlier versions of vLLM had, or that programs bring from other libraries.

None of them is a flag of a command line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Refused = Mapping[str, Mapping[str, tuple[Any, ...]]]

_DECODING = "there is no speculative decoding"
_FORM = "give `structured_outputs`"
_BEAMS = "call `LLM.beam_search` with `BeamSearchParams`"

ENGINE_ACCEPTED: Mapping[str, Sequence[str]] = {
    "preempted requests hit their own blocks when they resume": ["preemption_mode"],
    "there are no CUDA graphs": ["max_context_len_to_capture"],
    "there is one way to schedule": [
        "num_scheduler_steps",
        "multi_step_stream_outputs",
        "scheduler_delay_factor",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "max_paddings",
    ],
    "callers tokenise in their own threads": [
        "tokenizer_pool_size",
        "tokenizer_pool_type",
        "tokenizer_pool_extra_config",
    ],
    "images are known by their content": ["disable_mm_preprocessor_cache", "mm_cache_preprocessor"],
}

ENGINE_REFUSED: Refused = {
    _DECODING: {
        "speculative_model": (),
        "num_speculative_tokens": (),
        "num_lookahead_slots": (0,),
    },
    'a model must fit one device (`weights="int8"` or `"int4"` makes it smaller); several engines '
    "share load by `headstart serve --replicas N`": {
        "worker_use_ray": (False,),
        "engine_use_ray": (False,),
    },
    "models here generate; for embeddings or scores use transformers or sentence-transformers": {
        "task": ("auto", "generate"),
        "override_pooler_config": (),
    },
    "the configuration is the checkpoint's: edit config.json in its folder": {
        "rope_scaling": (),
        "rope_theta": (),
        "override_neuron_config": ({},),
    },
    "one adapter is a LoRA adapter: give `lora_request`": {
        "enable_prompt_adapter": (False,),
        "max_prompt_adapters": (1,),
        "max_prompt_adapter_token": (0,),
    },
    "an adapter changes linear layers by products alone": {
        "lora_extra_vocab_size": (0, 256),
        "long_lora_scaling_factors": (),
        "enable_lora_bias": (False,),
    },
    "give adapters by name in each request: `lora_request` or `adapter`": {"lora_modules": ()},
    "give them in each request's `StructuredOutputsParams`": {
        "guided_decoding_disable_fallback": (False,),
        "guided_decoding_disable_any_whitespace": (False,),
        "guided_decoding_disable_additional_properties": (False,),
    },
    "the answer's text holds the reasoning: take it apart in the program": {
        "enable_reasoning": (False,)
    },
    "K/V in 8 bits have their scales with them": {"calculate_kv_scales": (False,)},
    "give `logits_processors` in SamplingParams": {"logits_processor_pattern": ()},
    "the name is `num_gpu_blocks_override`, or `num_blocks`": {"num_gpu_blocks": ()},
}

SAMPLING_REFUSED: Refused = {
    "give `n`": {"best_of": (1,), "num_return_sequences": (1,)},
    _FORM: {
        "guided_decoding": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "response_format": (),
    },
    _BEAMS: {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "beam_width": (1,),
        "num_beams": (1,),
    },
    "cut the prompt's token ids in the program": {"truncate_prompt_tokens": ()},
    "the name is `max_tokens`": {"max_new_tokens": (), "max_completion_tokens": ()},
    "`temperature=0` is greedy, any other draws": {"do_sample": ()},
    "give `frequency_penalty` or `repetition_penalty`": {"no_repeat_ngram_size": (0,)},
    "`AsyncLLM.generate` and `LLM.stream` stream": {"stream": (False,)},
}

_CALL: Refused = {
    'give `{"prompt": ..., "multi_modal_data": ...}` as the prompt': {"multi_modal_data": ()},
    "give `structured_outputs` in SamplingParams": {
        "guided_options_request": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
    },
    "one adapter is a LoRA adapter: give `lora_request`": {"prompt_adapter_request": ()},
}
_AS_PROMPT = 'the ids are a prompt themselves: `[5, 6]`, or `{"prompt_token_ids": [5, 6]}`'

GENERATE_REFUSED: Refused = {
    _AS_PROMPT: {"prompt_token_ids": ()},
    "the name is `prompts`": {"inputs": ()},
    **_CALL,
}

STREAM_REFUSED: Refused = {
    _AS_PROMPT: {"prompt_token_ids": ()},
    "the name is `prompt`": {"inputs": ()},
    **_CALL,
}

CHAT_REFUSED: Refused = {
    "`LLM.generate` takes token ids": {"prompt_token_ids": ()},
    'give `chat_template_kwargs={"documents": ...}`': {"documents": ()},
    **_CALL,
}


def _none(text: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(text.split(), ())


_VIEW = "read it of `vllm_config`"
_CONFIGS = _none(
    "device_config decoding_config load_config lora_config compilation_config "
    "structured_outputs_config prompt_adapter_config get_model_config get_vllm_config "
    "get_scheduler_config get_parallel_config get_cache_config get_decoding_config "
    "get_lora_config"
)
_PARTS = _none(
    "scheduler cache_engine block_manager seq_counter driver_worker workers processor "
    "input_preprocessor get_input_preprocessor create_trace_span do_tracing "
    "use_cached_outputs cached_scheduler_outputs"
)
_TOKENIZER = _none("tokenizer_group get_tokenizer_group init_tokenizer get_tokenizer_async")
_LOGS = _none("stat_loggers add_logger remove_logger stats")
_OF_THE_MODEL = {"`model_config` tells of the model": _none("model dtype max_model_len")}

ENGINE_MEMBERS_REFUSED: Refused = {
    _VIEW: _CONFIGS,
    "`engine` is the engine here; its parts are not vLLM's": _PARTS,
    "`get_tokenizer()` is transformers' tokenizer": _TOKENIZER,
    "nothing is logged: read the outputs' `metrics`": _LOGS,
    "`LLM.generate` and `LLM.chat` answer": {"generate": (), "chat": ()},
    "models here generate; for embeddings or scores use transformers": {"encode": ()},
    "a call of an engine that is closed raises": {"check_health": (), "errored": ()},
    "`close()` frees the memory": {"shutdown": ()},
    "one engine runs in one process on one device": {
        "has_unfinished_requests_for_virtual_engine": (),
        "stop_remote_worker_execution_loop": (),
    },
    **_OF_THE_MODEL,
}
"""Attributes of `LLM.llm_engine` and of `LLMEngine`."""

ASYNC_MEMBERS_REFUSED: Refused = {
    _VIEW: _CONFIGS,
    "`engine` is the engine here; its parts are not vLLM's": _PARTS,
    "`await get_tokenizer()` is transformers' tokenizer": _TOKENIZER,
    "nothing is logged: read the outputs' `metrics`": _LOGS,
    "the engine runs from the start until `shutdown()`": _none(
        "start_background_loop background_loop shutdown_background_loop run_engine_loop "
        "engine_step stop_remote_worker_execution_loop"
    ),
    "give `LLM.beam_search` the prompts": {"beam_search": ()},
    "bound the requests in the program": {"limit_concurrency": ()},
    **_OF_THE_MODEL,
}

LLM_MEMBERS_REFUSED: Refused = {
    "models here generate; for embeddings or scores use transformers": {"reward": ()},
    "`chat` takes the messages": {"preprocess_chat": ()},
    "`llm_engine.get_metrics()`, or `get_metrics()`, tells them": {"metrics": ()},
    "`model_config` tells of the model": {
        "dtype": (),
        "max_model_len": (),
        "vllm_config": (),
    },
    "`llm_engine.has_unfinished_requests()` says it": {"has_unfinished_requests": ()},
    "`get_tokenizer()` is transformers' tokenizer": {"tokenizer": ()},
    "`engine.model` is the model": {"model": ()},
}

ENGINE_ARGS_MEMBERS_REFUSED: Refused = {
    "options are read where an engine is made: `LLM(**asdict(engine_args))`": {
        "create_engine_config": (),
        "create_model_config": (),
        "create_load_config": (),
        "create_speculative_config": (),
        "create_observability_config": (),
        "create_diffusion_config": (),
        "validate_tensorizer_args": (),
    }
}

_MEASURED = "`queue`, `time_to_first_token`, `time_per_token` and `total` are measured"
METRICS_REFUSED: Refused = {
    "`last_token_time` is that of the last token, once the output is finished": {
        "finished_time": ()
    },
    "an answer that is not finite is an error": {"is_corrupted": ()},
    _MEASURED: {
        "scheduler_time": (),
        "model_forward_time": (),
        "model_execute_time": (),
        "spec_token_acceptance_counts": (),
        "engine_core_timestamp": (),
        "inter_token_latencies": (),
    },
}

LORA_REFUSED: Refused = {
    "the name is `lora_path`": _none("lora_local_path local_path"),
    "positions are the model's": {"long_lora_max_len": ()},
    "the adapter's own configuration has it": {"rank": (), "base_model": ()},
}

STRUCTURED_REFUSED: Refused = {
    "a form that is none is refused when it is made": _none(
        "all_constraints_none all_non_structural_tag_constraints_none"
    ),
    "there is one backend": _none("backend disable_fallback"),
}
