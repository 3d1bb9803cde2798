"""The engine's options; command line flags are made from these fields."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headstart.cache.config import CacheOptions
from headstart.engine.params import SEEDS
from headstart.engine.threads import count_cores
from headstart.errors import ConfigError
from headstart.validation import Number, OneOf, check_fields, option

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_COUNTS = Number(int, 1)
_THREADS = Number(int, 1, 1024)  # far more end the process, which cannot start them
_SHARES = Number(float, 0, 1, above_low=True)
_DTYPES = OneOf(("auto", "float32", "bfloat16", "float16"))
_WEIGHTS = OneOf(("auto", "int8", "int5", "int4"))
_KV_DTYPES = OneOf(("auto", "int8"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CacheOptions):
    """The options of an engine. Raises ConfigError for a value outside its range."""

    dtype: str = option(
        "auto",
        "auto (the checkpoint's, or float32 where a CPU is slow in it), float32, bfloat16, float16",
        _DTYPES,
    )
    weights: str = option(
        "auto",
        "bits of the linear layers' weights: auto (the checkpoint's), int8, int5, int4",
        _WEIGHTS,
    )
    device: str = option("cpu", "where the model runs: cpu, cuda, cuda:1, ...")
    # The cache takes any size, the attention kernels these.
    block_size: int = option(16, "tokens in a KV block", OneOf(BLOCK_SIZES))
    num_blocks: int | None = option(
        None, "KV blocks in the pool; default: what the memory holds", _COUNTS
    )
    kv_cache_memory: int | None = option(
        None, "bytes for K/V; default: a share of what is free", _COUNTS
    )
    kv_cache_dtype: str = option("auto", "bits of K/V: auto (the model's dtype), int8", _KV_DTYPES)
    kv_cache_fraction: float = option(0.4, "the share of free memory that K/V may take", _SHARES)
    max_model_len: int | None = option(
        None, "longest prompt and answer together, in tokens", _COUNTS
    )
    max_num_batched_tokens: int = option(2048, "tokens computed in one step at the most", _COUNTS)
    max_num_seqs: int = option(256, "requests that run at the same time at the most", _COUNTS)
    max_bypassed: int = option(
        8, "how often a waiting request may be bypassed by better hits", Number(int, 0)
    )
    share_attention: bool = option(True, "attend once to what running requests have in common")
    deterministic: bool = option(False, "bitwise equal logits, cache on or off, alone or not")
    encoder_cache_rows: int = option(
        8192, "image embeddings kept for reuse, one per placeholder", _COUNTS
    )
    max_images: int = option(16, "images in one prompt at the most", _COUNTS)
    max_image_pixels: int = option(2**25, "width times height of an image at the most", _COUNTS)
    num_threads: int | None = option(None, "torch threads; default: this process's cores", _THREADS)
    enable_lora: bool = option(True, "take LoRA adapters; off, loading one is an error")
    max_loras: int = option(8, "LoRA adapters in memory, and so in one step, at the most", _COUNTS)
    max_lora_rank: int = option(64, "the highest rank of a LoRA adapter", _COUNTS)
    cache_dir: str | None = option(
        None, "folder where K/V outlive the process; off: they end with it"
    )
    cache_dir_bytes: int = option(
        10 * 2**30, "bytes that the folder may take, of all models together", _COUNTS
    )
    cache_words: bool = option(
        False, "keep the text of blocks in the folder too, for headstart cache ls; never a tenant's"
    )
    remote_cache: str | None = option(
        None, "Valkey or Redis server where K/V are shared, redis://host:port/db"
    )
    seed: int = option(0, "seed of requests that bring none", SEEDS)
    debug: bool = option(False, "check every invariant of the cache after every step")

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    @property
    def kept_folder(self) -> Path | None:
        """The folder where K/V outlive the process, None for none."""
        return None if self.cache_dir in (None, "", "off") else Path(self.cache_dir).expanduser()

    @property
    def threads(self) -> int:
        """Torch threads: as given here, or in OMP_NUM_THREADS, else one for each core."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        told = int(given) if given.isdecimal() and len(given) < 9 else 0
        return self.num_threads or (told if told in _THREADS else count_cores())


def make_config(options: dict[str, Any]) -> EngineConfig:
    """The configuration of these options. Raises ConfigError, also for one that there is not."""
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(map(str, options.keys() - known))
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return EngineConfig(**options)
