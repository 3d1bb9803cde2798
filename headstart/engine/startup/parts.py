"""The parts of an engine, made for a model that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.attention import PagedKVMemory
from headstart.cache import BlockNames, CacheConfig, KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.startup.observed import ObservedManager
from headstart.engine.startup.sizing import count_blocks, kv_dtype, longest_sequence
from headstart.engine.tiering.identity import identify
from headstart.engine.tiering.offers import block_text
from headstart.engine.tiering.payload import BlockPayload, BlockRows
from headstart.engine.tiering.tiers import Stores
from headstart.imports import load_module
from headstart.models.decoder import DecoderModel
from headstart.models.image_encoder import VisionModel
from headstart.tiers import (
    OBJECTS,
    BlockStore,
    DiskStore,
    ModelRecord,
    RemoteStore,
    make_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Parts", "make_parts", "open_stores"]

_LOG = logging.getLogger("headstart.tiers")
_MOST_PREPARED = 8192  # positions, in 3 ms of the start; more take little beside their load


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine. stores: where blocks outlive the pool, None for nowhere."""

    model: DecoderModel
    tokenizer: PreTrainedTokenizerBase | None
    memory: PagedKVMemory
    manager: KVCacheManager
    max_model_len: int
    vision: VisionModel | None = None
    stores: Stores | None = None


def open_stores(model: ModelRecord, config: EngineConfig) -> Sequence[BlockStore]:
    """The tiers that the options ask for, at least one, nearest first. Raises ConfigError."""
    stores: list[BlockStore] = []
    if config.kept_folder is not None:
        stores.append(DiskStore(config.kept_folder, model, config.cache_dir_bytes))
    if config.remote_cache:
        stores.append(RemoteStore(config.remote_cache, model))
    return stores


def make_parts(
    decoder: DecoderModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    *,
    rows: BlockRows | None = None,
    is_observed: bool = False,
) -> Parts:
    """Memory, cache and store for a model. Raises ConfigError or OutOfMemoryError.

    rows: what a store keeps beside K/V. is_observed: the manager is an `ObservedManager`.
    """
    vision = _load_vision(decoder, tokenizer)
    blocks = count_blocks(config, decoder, vision.bytes_per_row if vision is not None else 0)
    limit = longest_sequence(config, decoder.max_model_len, blocks)
    memory = PagedKVMemory(
        decoder.layouts, blocks, config.block_size, kv_dtype(config, decoder), decoder.device
    )
    folder, model, stores = config.kept_folder, None, None
    if config.enable_prefix_caching and (folder is not None or config.remote_cache):
        if folder is not None and not make_folder(folder):
            _LOG.warning("cache folder %s cannot be written: its blocks are only read", folder)
        model = identify(decoder, memory, config, folder, rows)
        stores = Stores(
            open_stores(model, config),
            open_stores(OBJECTS, config),
            BlockPayload(memory, rows),
            memory.device.type == "cpu",
            block_text(tokenizer, config.cache_words),
        )
        # What loading the longest prompt would write, and what the step after that reads.
        kept = max(store.num_kept for store in stores.kv)
        loaded = min(kept, -(-limit // config.block_size))
        memory.prefault(loaded)
        decoder.prepare(min(loaded * config.block_size, _MOST_PREPARED))
    cache = CacheConfig(
        num_blocks=blocks,
        events=is_observed or stores is not None,
        **config.shared() | {"partial_hits": config.partial_hits and not config.deterministic},
    )
    names = BlockNames(config.block_size, "" if model is None else model.fingerprint)
    manager = (ObservedManager if is_observed else KVCacheManager)(cache, names)
    return Parts(decoder, tokenizer, memory, manager, limit, vision, stores)


def _load_vision(
    decoder: DecoderModel, tokenizer: PreTrainedTokenizerBase | None
) -> VisionModel | None:
    """The model's vision part, if it has one; image processors take seconds to import."""
    if not decoder.takes_images:
        return None
    zoo = load_module("headstart.models.transformers_backend.image_encoder")
    found: VisionModel | None = zoo.load_vision(decoder, tokenizer)
    return found
