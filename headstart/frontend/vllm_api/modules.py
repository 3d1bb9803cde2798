"""What becomes of the modules of vLLM that programs import from, and of the names in them."""

from collections.abc import Iterable, Mapping

from headstart.errors import HeadstartError, RequestError
from headstart.frontend.vllm_api.members import EXPORTS
from headstart.frontend.vllm_api.rows import (
    MissingModuleError,
    MissingNameError,
    Names,
    Row,
    Verdict,
    refused,
    works,
)

__all__ = ["HOMES", "MODULES", "explain_missing", "missing_module", "names_in"]

_PROMPTS = dict.fromkeys(
    ["PromptType", "TextPrompt", "TokensPrompt"], "headstart.frontend.prompt_types"
)
_HELPERS = "headstart.frontend.vllm_api.helpers"
_CLEANUP = {"cleanup_dist_env_and_memory": _HELPERS}
HOMES: Mapping[str, Mapping[str, str]] = {
    "distributed": _CLEANUP,
    "distributed.parallel_state": _CLEANUP,
    "engine.async_llm_engine": {"AsyncLLMEngine": "headstart.frontend.async_llm"},
    "engine.llm_engine": {"LLMEngine": "headstart.frontend.vllm_api.llm_engine"},
    "entrypoints": {"LLM": "headstart.frontend.llm"},
    "entrypoints.llm": {"LLM": "headstart.frontend.llm"},
    "inputs.data": _PROMPTS,
    "inputs.llm": _PROMPTS,
    "logger": {"init_logger": _HELPERS},
    "logprobs": {"Logprob": "headstart.engine.outputs"},
    "multimodal": {},
    "multimodal.utils": {"encode_image_base64": _HELPERS},
    "sequence": {"Logprob": "headstart.engine.outputs"},
    "v1.metrics": {},
    "v1.metrics.reader": dict.fromkeys(
        ["Metric", "Counter", "Gauge", "Histogram", "Vector"], "headstart.frontend.vllm_api.metrics"
    ),
}
"""Modules that have no file: their names, and the modules that these come from."""

_NO_FILES = {name: ", ".join(f"`{one}`" for one in homes) for name, homes in HOMES.items()}
_FILES = {
    "envs": "",
    "sampling_params": "",
    "inputs": "",
    "outputs": "",
    "lora.request": "",
    "engine.arg_utils": "",
    "utils": "",
    "utils.argparse_utils": "",
    "v1.engine.async_llm": "",
    "v1.engine.llm_engine": "",
    "version": "",
}
_IMAGES = "give Pillow images in `multi_modal_data`, or data URLs in a chat's `image_url`"
_TOKENIZER = "`llm.get_tokenizer()` is transformers' tokenizer"
_OPTIONS = "options are arguments of `LLM`"
_SERVER = "`headstart serve` is the server"
_INSIDE = "`LLM.engine` is the engine here; its parts are not vLLM's"
_ONE_PROCESS = "one engine runs in one process on one device; `llm.close()` frees the memory"
_POOLING = "models here generate; for embeddings or scores use transformers"


def _all(text: str) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(text.split(), ())


MODULES = Names(
    "headstart",
    works(_FILES | _NO_FILES)
    | refused(
        {
            _IMAGES: _all("assets.image assets.base"),
            "models here hear only in `Omni`, which takes arrays": _all("assets.audio"),
            "models here see images, not videos": _all("assets.video"),
            _TOKENIZER: _all("tokenizers transformers_utils"),
            f"{_OPTIONS}, or HEADSTART_... for the command line": _all("config"),
            _SERVER: _all(
                "entrypoints.openai entrypoints.anthropic entrypoints.api_server entrypoints.cli "
                "entrypoints.launcher entrypoints.serve entrypoints.utils tool_parsers reasoning "
                "parser"
            ),
            "`headstart doctor` tells of the machine": _all("collect_env"),
            "a process is started anew": _all("snapshot"),
            "one adapter is a LoRA adapter: give `lora_request`": _all(
                "prompt_adapter adapter_commons control_vectors"
            ),
            "`LLM.chat` takes the messages": _all("entrypoints.chat_utils renderers"),
            _POOLING: _all("pooling_params entrypoints.pooling entrypoints.score_utils"),
            "`headstart.sampling_params` has `BeamSearchParams`": _all("beam_search"),
            "every decoder that transformers has is tried": _all("model_executor model_inspection"),
            _ONE_PROCESS: _all("device_allocator ray executor worker engine.multiprocessing"),
            "give functions as `SamplingParams(logits_processors=[...])`": _all(
                "logits_process v1.sample"
            ),
            "`AsyncLLM` is the class": _all("engine.protocol"),
            "`LLM.get_metrics` and the server's `/metrics` tell them": _all(
                "engine.metrics v1.metrics.loggers v1.metrics.stats v1.metrics.prometheus"
            ),
            "`device=` says where the engine runs": _all("platforms"),
            "use Python's `logging`": _all("logging_utils"),
            "errors are in `headstart.errors`": _all("exceptions v1.engine.exceptions"),
            "measure with the programs in `bench/`": _all("benchmarks"),
            "profile with torch.profiler or py-spy around the call": _all("profiler"),
            "`headstart serve --otlp-traces-endpoint` traces requests": _all("tracing"),
            _INSIDE: _all(
                "block compilation connections core cute_utils engine.async_timeout "
                "engine.output_processor env_override forward_context ir kernels lora.models "
                "lora.layers plugins scalar_type spec_decode tasks third_party "
                "tilelang_utils triton_utils usage "
                "v1.attention v1.core v1.executor v1.kv_cache_interface v1.outputs v1.request "
                "v1.spec_decode v1.structured_output v1.utils v1.worker vllm_flash_attn"
            ),
        }
    ),
    RequestError,
)

_WITHIN: Mapping[str, str] = {
    "attention": _INSIDE,
    "distributed": _ONE_PROCESS,
    "multimodal": _IMAGES,
    "v1": _INSIDE,
    "lora": _INSIDE,
    "utils": "write what it does in the program",
    "entrypoints": _SERVER,
    "inputs": "`headstart.inputs` has the kinds of prompts",
    "models": "every decoder that transformers has is tried",
}
"""What to do without any other module of these packages."""

_ENVS = "no environment variables of vLLM are read: options are arguments of `LLM`"
_LISTS = "a dict of token ids to `Logprob` for each token"
_EMBEDS = "prompts are texts, token ids and images, no embeddings"
_DECODERS = "models here are decoders: a prompt is one text"
_NAMES: Mapping[str, Mapping[str, Iterable[str]]] = {
    "sampling_params": {
        "`StructuredOutputsParams` has its fields": ["GuidedDecodingParams"],
        "give functions as `logits_processors`": ["LogitsProcessor"],
        "repeating answers end at `max_tokens`": ["RepetitionDetectionParams"],
    },
    "inputs": {
        _EMBEDS: _all("EmbedsPrompt EmbedsInput EmbedsInputs embeds_input embeds_inputs"),
        _DECODERS: _all(
            "ExplicitEncoderDecoderPrompt EncoderDecoderInputs EncoderDecoderInput "
            "MultiModalEncDecInput build_explicit_enc_dec_prompt build_enc_dec_input "
            "mm_enc_dec_input split_enc_dec_input to_enc_dec_tuple_list zip_enc_dec_prompts"
        ),
        "`PromptType` is every prompt that is taken": _all(
            "DataPrompt DecoderOnlyInputs DecoderOnlyPrompt DecoderOnlyEngineInput EngineInput "
            "ProcessorInputs PromptInputs SingletonInputs SingletonInput SingletonPrompt "
            "TokenInputs TokensInput token_inputs tokens_input"
        ),
        _IMAGES: _all(
            "ModalityData MultiModalDataBuiltins MultiModalDataDict MultiModalUUIDDict "
            "MultiModalHashes MultiModalInput MultiModalPlaceholders mm_input"
        ),
    },
    "envs": {
        _ENVS: _all(
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ATTENTION_BACKEND VLLM_CPU_KVCACHE_SPACE "
            "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_HOST_IP VLLM_LOGGING_LEVEL VLLM_PORT VLLM_USE_V1 "
            "VLLM_USE_MODELSCOPE VLLM_WORKER_MULTIPROC_METHOD environment_variables"
        )
    },
    "multimodal": {_IMAGES: _all("MULTIMODAL_REGISTRY MultiModalDataDict MultiModalKwargs")},
    "multimodal.utils": {
        _IMAGES: _all("MediaConnector encode_audio_base64 encode_image_url fetch_image")
    },
    "sequence": {_INSIDE: _all("IntermediateTensors Sequence SequenceGroup SequenceData")},
    "outputs": {_POOLING: [name for name in EXPORTS.rows if name.endswith("Output")]},
    "logprobs": {_LISTS: ["PromptLogprobs", "SampleLogprobs", "FlatLogprobs"]},
    "entrypoints.llm": {_POOLING: ["PoolingParams", "PoolingRequestOutput"]},
    "v1.metrics.reader": {
        "`LLM.get_metrics` reads them": ["get_metrics_snapshot"],
    },
}


def explain_missing(module: str, name: str, has: Iterable[str], *, imported: bool) -> Exception:
    """The error for a name that a module of ours does not have; those of vLLM's have a reason.

    has: the names that the module has. imported: an import asks for it; any other way gets an
    AttributeError, so that `hasattr` says False.
    """
    names = names_in(module, has)
    refused_module = _refused_module(f"{module}.{name}")
    if imported:
        return refused_module or names.missing_import(name)
    return names.missing(name) if refused_module is None else MissingNameError(str(refused_module))


def names_in(module: str, has: Iterable[str]) -> Names:
    """The names of a module: those that it has, and vLLM's that it has not."""
    rows: dict[str, Row] = works(dict.fromkeys(has, ""))
    if module == EXPORTS.owner:
        rows = {**EXPORTS.rows, **rows}
    for note, missing in _NAMES.get(module.removeprefix("headstart."), {}).items():
        rows |= {name: Row(Verdict.REFUSED, note) for name in missing if name not in rows}
    return Names(module, rows, RequestError)


def missing_module(name: str) -> HeadstartError | None:
    """The error for a module of vLLM's that is not here; None if vLLM has none of this name."""
    row = _refused_module(name)
    within = _WITHIN.get(name.split(".")[1])
    if row is None and within is not None:
        return MissingModuleError(f"no module named {name!r}: {within}", name=name)
    return row


def _refused_module(name: str) -> HeadstartError | None:
    """The error for a module that the table refuses; None for any other."""
    row = MODULES.rows.get(name.removeprefix("headstart."))
    if row is None or row.verdict is not Verdict.REFUSED:
        return None
    return MissingModuleError(f"no module named {name!r}: {row.note}", name=name)
