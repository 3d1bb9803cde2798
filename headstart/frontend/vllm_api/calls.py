"""What becomes of the arguments of vLLM's calls, and of the keys of its prompts."""

from typing import Any

from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_api.earlier import (
    CHAT_REFUSED,
    GENERATE_REFUSED,
    LORA_REFUSED,
    STREAM_REFUSED,
)
from headstart.frontend.vllm_api.rows import Names, Row, accepted, refused, works

__all__ = [
    "ADD_REQUEST",
    "ASYNC_CHAT",
    "ASYNC_GENERATE",
    "BEAM_SEARCH_CALL",
    "CHAT",
    "FROM_ENGINE_ARGS",
    "GENERATE",
    "LORA",
    "PROMPT",
    "RESET",
    "STREAM",
    "STREAM_CHAT",
]

_TOKENIZE: dict[str, dict[str, tuple[Any, ...]]] = {
    "tokenise in the program and give `prompt_token_ids`": {"tokenization_kwargs": ({},)},
    "images are read by the model's own processor": {"mm_processor_kwargs": ({},)},
}
_EVERY_CALL = works({"lora_request": "", "priority": "lower values run first"})
_OWN = ["adapter", "cache_salt"]

GENERATE = Names(
    "LLM.generate",
    works({"prompts": "", "sampling_params": "", "use_tqdm": "a function counts as `True`"})
    | _EVERY_CALL
    | refused(_TOKENIZE)
    | refused(GENERATE_REFUSED),
    RequestError,
    own=_OWN,
)

_TEMPLATE: dict[str, Row] = works(
    {
        "chat_template": "",
        "chat_template_content_format": "",
        "add_generation_prompt": "",
        "continue_final_message": "",
        "tools": "",
        "chat_template_kwargs": "",
    }
)

CHAT = Names(
    "LLM.chat",
    works({"messages": "", "sampling_params": "", "use_tqdm": "a function counts as `True`"})
    | _EVERY_CALL
    | _TEMPLATE
    | refused(_TOKENIZE)
    | refused(CHAT_REFUSED),
    RequestError,
    own=_OWN,
)

ASYNC_GENERATE = Names(
    "AsyncLLM.generate",
    works(
        {
            "prompt": "",
            "sampling_params": "",
            "request_id": "a name is made if there is none; free once left",
        }
    )
    | _EVERY_CALL
    | accepted(
        {"nothing is traced": ["trace_headers"], "requests have no sessions": ["session_id"]}
    )
    | refused(
        {
            "images are read by the model's own processor": {"mm_processor_kwargs": ({},)},
            "tokenise in the program and give `prompt_token_ids`": {"tokenization_kwargs": ({},)},
            'give `{"prompt": ..., "prompt_token_ids": ...}`': {"prompt_text": ()},
            "one engine runs in one process on one device": {"data_parallel_rank": (0,)},
            "K/V stay where they are": {"kv_hints": ()},
            "the answer's text holds the reasoning": {
                "reasoning_ended": (False,),
                "reasoning_parser_kwargs": ({},),
            },
        }
    )
    | refused(STREAM_REFUSED),
    RequestError,
    own=_OWN,
)

ADD_REQUEST = Names(
    "LLMEngine.add_request",
    works({"request_id": "", "prompt": "", "params": ""})
    | _EVERY_CALL
    | accepted(
        {
            "requests wait in the order of these calls": ["arrival_time"],
            "nothing is traced": ["trace_headers"],
            "requests have no sessions": ["session_id"],
        }
    )
    | refused(
        {
            "tokenise in the program and give `prompt_token_ids`": {"tokenization_kwargs": ({},)},
            'give `{"prompt": ..., "prompt_token_ids": ...}`': {"prompt_text": ()},
            "K/V stay where they are": {"kv_hints": ()},
        }
    )
    | refused(STREAM_REFUSED),
    RequestError,
    own=_OWN,
)

STREAM = Names("LLM.stream", _EVERY_CALL | refused(STREAM_REFUSED), RequestError, own=_OWN)

ASYNC_CHAT = Names(
    "AsyncLLM.chat",
    _EVERY_CALL | _TEMPLATE | refused(CHAT_REFUSED),
    RequestError,
    own=[*_OWN, "request_id"],
)

STREAM_CHAT = Names(
    "LLM.stream_chat",
    _EVERY_CALL | _TEMPLATE | refused(CHAT_REFUSED),
    RequestError,
    own=_OWN,
)

BEAM_SEARCH_CALL = Names(
    "LLM.beam_search",
    works({"prompts": "", "params": ""})
    | _EVERY_CALL
    | accepted(
        {
            "steps show no bar": ["use_tqdm"],
            "`max_num_seqs` bounds what runs at once": ["concurrency_limit"],
        }
    ),
    RequestError,
    own=_OWN,
)

PROMPT = Names(
    "a prompt",
    works(
        {
            "prompt": "",
            "prompt_token_ids": "",
            "multi_modal_data": "images",
            "multi_modal_uuids": "",
            "cache_salt": "",
        }
    )
    | refused(
        {
            "images are read by the model's own processor": {
                "media_io_kwargs": ({},),
                "mm_processor_kwargs": ({},),
            },
            "decoders have tokens of one type": {"token_type_ids": ()},
            "prompts are texts, token ids and images, no embeddings": {"prompt_embeds": ()},
        }
    )
    | accepted({"nothing is traced back to the text": ["prompt_token_offsets"]}),
    RequestError,
)

LORA = Names(
    "LoRARequest",
    works({"lora_name": "", "lora_int_id": "", "lora_path": ""})
    | accepted(
        {
            "the adapter's own configuration counts": ["base_model_name"],
            "an adapter is its content: one that changed is another": ["load_inplace"],
        }
    )
    | refused({"adapters of experts are not run": {"is_3d_lora_weight": (False,)}})
    | refused(LORA_REFUSED),
    RequestError,
)

FROM_ENGINE_ARGS = Names(
    "from_engine_args",
    works({"engine_args": ""})
    | accepted({"nothing is reported": ["usage_context"]})
    | refused(
        {
            "the engine runs from the start until `shutdown()`": {"start_engine_loop": (True,)},
            "nothing is logged: read the outputs' `metrics`": {"stat_loggers": ()},
            "one engine runs in one process": {"enable_multiprocessing": (False,)},
        }
    ),
    ConfigError,
)

RESET = Names(
    "LLM.reset_prefix_cache",
    works(
        {
            "reset_running_requests": "they are computed anew",
            "reset_connector": "what is on disk or another machine is forgotten too",
        }
    ),
    RequestError,
)
