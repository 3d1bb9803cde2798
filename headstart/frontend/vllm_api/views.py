"""What programs read of vLLM's engine, in its names: `llm.llm_engine`, and the configurations.

All of it may be read, nothing changed. What is missing says what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from headstart.engine.adapters.request import LoRARequest
from headstart.engine.metrics import Metric, read_metrics
from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_api.configs import CONFIGS
from headstart.frontend.vllm_api.members import ENGINE_VIEW
from headstart.frontend.vllm_api.signatures import OfOneProcess, check_calls, refuse_changes
from headstart.imports import load_module
from headstart.validation import check_flag, describe

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from headstart.engine.driver import Driver
    from headstart.engine.engine import Engine

__all__ = [
    "PARTS",
    "CacheView",
    "EngineView",
    "ModelView",
    "ParallelView",
    "SchedulerView",
    "VllmView",
    "read_config",
]


Kind = TypeVar("Kind", bound="_View")


class _View:
    _name: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        raise CONFIGS[self._name].missing(name)


@dataclass_transform(frozen_default=True)
def _view(kind: type[Kind]) -> type[Kind]:
    return refuse_changes(dataclass(frozen=True)(kind))


@_view
class ModelView(_View):
    """The model. `model` and `tokenizer` are the folder that it was read from."""

    _name = "model_config"
    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    seed: int
    is_multimodal_model: bool
    vocab_size: int
    runner_type: str = "generate"
    quantization: None = None

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's config.json as transformers reads it. Raises RequestError."""
        transformers = load_module("transformers")
        try:
            found: PretrainedConfig = transformers.AutoConfig.from_pretrained(
                self.model, trust_remote_code=False
            )
        except Exception as error:  # a model of a kind or a file that transformers does not know
            raise RequestError(
                f"transformers reads no configuration from {describe(self.model)}: {error}"
            ) from error
        return found

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The part of `hf_config` that the decoder has."""
        found: PretrainedConfig = self.hf_config.get_text_config()
        return found

    def get_vocab_size(self) -> int:
        """Width of the logits."""
        return self.vocab_size


@_view
class CacheView(_View):
    """The pool of KV blocks."""

    _name = "cache_config"
    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


@_view
class SchedulerView(_View):
    """What bounds a step."""

    _name = "scheduler_config"
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = True


@_view
class ParallelView(_View):
    """One process on one device."""

    _name = "parallel_config"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    world_size: int = 1


@_view
class VllmView(_View):
    """All configurations."""

    _name = "vllm_config"
    model_config: ModelView
    cache_config: CacheView
    scheduler_config: SchedulerView
    parallel_config: ParallelView = field(default_factory=ParallelView)
    speculative_config: None = None
    quant_config: None = None
    kv_transfer_config: None = None
    kv_events_config: None = None
    ec_transfer_config: None = None


PARTS = frozenset(field.name for field in fields(VllmView))
"""What is an attribute of an engine too, as programs of earlier versions ask."""


def read_config(engine: Engine) -> VllmView:
    """The configuration of an engine, as it came out."""
    config, pool = engine.config, engine.manager.config
    folder = str(engine.model.folder or "")
    return VllmView(
        ModelView(
            folder,
            str(getattr(engine.tokenizer, "name_or_path", "") or folder),
            engine.model.dtype,
            engine.max_model_len,
            config.seed,
            engine.model.takes_images,
            engine.model.vocab_size,
        ),
        CacheView(
            pool.block_size,
            pool.num_blocks,
            config.kv_cache_dtype,
            config.enable_prefix_caching,
        ),
        SchedulerView(config.max_num_batched_tokens, config.max_num_seqs),
    )


@check_calls(ConfigError)
class EngineView(OfOneProcess):
    """The engine of an `LLM`, as far as programs look into it; its steps are the `LLM`'s own."""

    _name = "LLM.llm_engine"

    def __init__(self, engine: Engine, driver: Driver) -> None:
        self._engine, self._driver = engine, driver

    @property
    def engine(self) -> Engine:
        """As `LLM.engine`."""
        return self._engine

    @property
    def vllm_config(self) -> VllmView:
        """All configurations."""
        return read_config(self._engine)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, None if it came without one."""
        self._engine.require_open()
        return self._engine.tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As `get_tokenizer`."""
        return self.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        return self._driver.call(lambda: read_metrics(self._engine))

    def has_unfinished_requests(self) -> bool:
        """Whether a request is under way, or waits."""
        return self._engine.has_unfinished

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before it is first asked for."""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request is {describe(lora_request)}; allowed: a LoRARequest")
        self._engine.require_open()
        self._engine.adapters.require(lora_request, self._driver.call)
        return True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `LLM.reset_prefix_cache`."""
        again = check_flag("reset_running_requests", reset_running_requests)
        tiers = check_flag("reset_connector", reset_connector)
        return self._driver.call(
            lambda: self._engine.reset_prefix_cache(reset_running_requests=again, reset_tiers=tiers)
        )

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            return getattr(self.vllm_config, name)
        raise ENGINE_VIEW.missing(name)
