"""The engine's options; command line flags are made from these fields."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from headstart.cache.eviction import POLICIES
from headstart.engine.params import SEEDS
from headstart.engine.startup.threads import count_cores
from headstart.engine.validation import describe
from headstart.errors import ConfigError

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built with. Raises ConfigError for a value outside its range."""

    dtype: str = _option(
        "auto",
        "auto (the checkpoint's, or float32 where a CPU is slow in it), float32, bfloat16, float16",
    )
    device: str = _option("cpu", "where the model runs: cpu, cuda, cuda:1, ...")
    enable_prefix_caching: bool = _option(
        True, "keep and reuse the K/V of prompts that begin alike"
    )
    block_size: int = _option(16, "tokens in a KV block")
    num_blocks: int | None = _option(None, "KV blocks in the pool; default: what the memory holds")
    kv_cache_memory: int | None = _option(None, "bytes for K/V; default: a share of what is free")
    kv_cache_fraction: float = _option(0.4, "the share of free memory that K/V may take")
    max_model_len: int | None = _option(None, "longest prompt and answer together, in tokens")
    max_num_batched_tokens: int = _option(2048, "tokens computed in one step at the most")
    max_num_seqs: int = _option(256, "requests that run at the same time at the most")
    max_bypassed: int = _option(8, "how often a waiting request may be bypassed by better hits")
    eviction: str = _option("adaptive-lru", "which free block is reused next")
    deduplicate: bool = _option(True, "give a block back when it fills with what is cached")
    partial_hits: bool = _option(True, "reuse the head of a block that matches in part")
    share_attention: bool = _option(True, "attend once to what running requests have in common")
    deterministic: bool = _option(False, "bitwise equal logits, cache on or off, alone or not")
    encoder_cache_rows: int = _option(8192, "image embeddings kept for reuse, one per placeholder")
    max_images: int = _option(16, "images in one prompt at the most")
    max_image_pixels: int = _option(2**25, "width times height of an image at the most")
    num_threads: int | None = _option(None, "torch threads; default: this process's cores")
    enable_lora: bool = _option(True, "take LoRA adapters; off, loading one is an error")
    max_loras: int = _option(8, "LoRA adapters in memory, and so in one step, at the most")
    max_lora_rank: int = _option(64, "the highest rank of a LoRA adapter")
    seed: int = _option(0, "seed of requests that bring none")
    debug: bool = _option(False, "check every invariant of the cache after every step")

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}; allowed: {BLOCK_SIZES}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: auto, float32, bfloat16, float16")
        if not 0 < self.kv_cache_fraction <= 1:
            raise ConfigError(
                f"kv_cache_fraction is {self.kv_cache_fraction}; allowed: above 0, up to 1"
            )
        if self.eviction not in POLICIES:
            raise ConfigError(f"eviction is {self.eviction!r}; allowed: {', '.join(POLICIES)}")
        if self.seed not in SEEDS:
            raise ConfigError(f"seed is {describe(self.seed)}; allowed: {SEEDS}")
        self._check_counts()

    def _check_counts(self) -> None:
        """Counts are at least 1, whether given or worked out later."""
        for name in (
            "num_blocks",
            "kv_cache_memory",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "encoder_cache_rows",
            "max_images",
            "max_image_pixels",
            "num_threads",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.max_bypassed < 0:
            raise ConfigError(f"max_bypassed is {self.max_bypassed}; it must be at least 0")

    @property
    def threads(self) -> int:
        """Torch threads: as given here, or in OMP_NUM_THREADS, else one for each core."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        if self.num_threads is None and given.isdigit() and int(given):
            return int(given)
        return self.num_threads or count_cores()


def make_config(options: dict[str, Any]) -> EngineConfig:
    """The configuration of these options. Raises ConfigError, also for one that there is not."""
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return EngineConfig(**options)
