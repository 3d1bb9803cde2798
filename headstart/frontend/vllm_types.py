"""The configuration of an engine, in vLLM's names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

from headstart.errors import RequestError
from headstart.imports import load_module
from headstart.validation import describe

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from headstart.engine.engine import EngineCore

__all__ = ["ConfigParts", "PromptType", "TextPrompt", "TokensPrompt", "VllmView", "read_config"]


class _PromptOptions(TypedDict):
    """multi_modal_data: `{"image": one or a list}`. multi_modal_uuids: names of those images.
    cache_salt: prompts of different salts share no K/V."""

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    cache_salt: NotRequired[str | None]


class TextPrompt(_PromptOptions):
    """A text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids, and the text that they came from."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
"""What `LLM.generate` takes one or many of."""


@dataclass(frozen=True)
class ModelView:
    """The model. `model` and `tokenizer` are the folder that it was read from."""

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
            config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
                self.model, trust_remote_code=False
            )
        except Exception as error:  # a model of a kind or a file that transformers does not know
            raise RequestError(
                f"transformers reads no configuration from {describe(self.model)}: {error}"
            ) from error
        return config

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The decoder's part of `hf_config`."""
        config: PretrainedConfig = self.hf_config.get_text_config()
        return config

    def get_vocab_size(self) -> int:
        """Return the width of the logits."""
        return self.vocab_size


@dataclass(frozen=True)
class CacheView:
    """The pool of KV blocks."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


@dataclass(frozen=True)
class SchedulerView:
    """Limits of a step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = True


@dataclass(frozen=True)
class ParallelView:
    """One process on one device."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class VllmView:
    """All configurations."""

    model_config: ModelView
    cache_config: CacheView
    scheduler_config: SchedulerView
    parallel_config: ParallelView = field(default_factory=ParallelView)
    speculative_config: None = None
    quant_config: None = None
    kv_transfer_config: None = None
    kv_events_config: None = None
    ec_transfer_config: None = None


class ConfigParts:
    """Parts of `vllm_config` as attributes of an engine, as in earlier versions of vLLM."""

    speculative_config: ClassVar[None] = None
    quant_config: ClassVar[None] = None
    kv_transfer_config: ClassVar[None] = None
    kv_events_config: ClassVar[None] = None
    ec_transfer_config: ClassVar[None] = None

    @property
    @abstractmethod
    def vllm_config(self) -> VllmView:
        """The configuration, in vLLM's names."""

    @property
    def model_config(self) -> ModelView:
        """The model's part of `vllm_config`."""
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheView:
        """The pool's part of `vllm_config`."""
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> SchedulerView:
        """The limits of a step in `vllm_config`."""
        return self.vllm_config.scheduler_config

    @property
    def parallel_config(self) -> ParallelView:
        """Processes and devices in `vllm_config`."""
        return self.vllm_config.parallel_config


def read_config(engine: EngineCore, tokenizer: object) -> VllmView:
    """Return the configuration of a loaded engine."""
    config, pool = engine.config, engine.manager.config
    folder = str(engine.model.folder or "")
    return VllmView(
        ModelView(
            folder,
            str(getattr(tokenizer, "name_or_path", "") or folder),
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
