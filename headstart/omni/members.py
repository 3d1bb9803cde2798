"""What programs ask of the classes of `Omni` that other classes have, and what to do instead."""

from headstart.errors import RequestError
from headstart.frontend.vllm_api.rows import Names, refused

__all__ = ["ASYNC_OMNI", "METRICS", "OMNI", "OUTPUT", "PARAMS"]

_OMNI = {
    "`tokenizer` is the tokenizer": {"get_tokenizer": ()},
    "an output's `metrics` tell of each stage": {"get_metrics": ()},
    "`reset_cache()` forgets everything": {"reset_prefix_cache": ()},
    "give `generate` the whole prompt": {"chat": ()},
    "`text_params` and `speech_params` are they": {"get_default_sampling_params": ()},
    "`pipeline.stages` has the engines": {"engine": (), "llm_engine": ()},
}
OMNI = Names("Omni", refused(_OMNI), RequestError)
ASYNC_OMNI = Names(
    "AsyncOmni",
    refused(
        {
            "`omni` is the `Omni`; ask it by `call`": dict.fromkeys(
                [*(name for names in _OMNI.values() for name in names), "tokenizer", "voices"], ()
            ),
            "close the stream that `start` returned": {"abort": ()},
            "`start` streams": {"stream": ()},
            "`close()` frees the memory": {"shutdown": ()},
        }
    ),
    RequestError,
)
OUTPUT = Names(
    "OmniOutput",
    refused(
        {
            "one answer is given: `text`, `token_ids` and `audio`": {"outputs": ()},
            "`metrics` has `cached_tokens` of each stage": {"num_cached_tokens": ()},
            "the prompt is known by `prompt_token_ids`": {"prompt": ()},
        }
    ),
    RequestError,
)
PARAMS = Names(
    "OmniParams",
    refused(
        {
            "give it in `text` or `speech`, each a SamplingParams": dict.fromkeys(
                ["temperature", "top_p", "top_k", "max_tokens", "stop", "logprobs", "n"], ()
            )
        }
    ),
    RequestError,
)
METRICS = Names("StageMetrics", {}, RequestError)
