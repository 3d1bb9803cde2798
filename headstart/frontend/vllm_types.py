"""Types of vLLM: prompts as dicts, and the configuration of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from headstart.imports import load_module

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from headstart.engine.engine import EngineCore


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
"""A prompt of `LLM.generate`."""


@dataclass(frozen=True)
class ModelView:
    """The model. `model` and `tokenizer` are the folders that they were read from."""

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
        """The model's config.json as transformers reads it; raises errors of transformers."""
        auto_config = load_module("transformers").AutoConfig
        config: PretrainedConfig = auto_config.from_pretrained(self.model, trust_remote_code=False)
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
