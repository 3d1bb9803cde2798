"""How many KV blocks there are, and how long a sequence may be."""

import torch

from headstart.attention import PagedKVMemory
from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError, OutOfMemoryError
from headstart.machine import available_memory
from headstart.models.decoder import DecoderModel

# Unless told otherwise: a million tokens in blocks of 16. More blocks than that cost seconds to
# make, for models so small that nobody needs them.
DEFAULT_MAX_BLOCKS = 65_536


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def kv_dtype(config: EngineConfig, decoder: DecoderModel) -> torch.dtype:
    """The dtype in which K and V are kept."""
    return torch.int8 if config.kv_cache_dtype == "int8" else decoder.dtype


def count_blocks(config: EngineConfig, decoder: DecoderModel, encoder_row: int) -> int:
    """Blocks for the pool: as given, or what the K/V budget holds.

    encoder_row: bytes of a row of the encoder cache, which fills later and for which room is
    left; 0 for a model that sees nothing. Raises OutOfMemoryError when that is not even one
    block, or more than is free.
    """
    dtype = kv_dtype(config, decoder)
    size = PagedKVMemory.bytes_per_block(decoder.layouts, config.block_size, dtype)
    rows = config.encoder_cache_rows * encoder_row
    free = max(free_memory(decoder.device) - rows, 0)
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif config.kv_cache_memory is not None:
        blocks = config.kv_cache_memory // size
    else:
        blocks = min(int(free * config.kv_cache_fraction) // size, DEFAULT_MAX_BLOCKS)
    if blocks < 1:
        budget = config.kv_cache_memory or int(free * config.kv_cache_fraction)
        raise OutOfMemoryError(f"K/V may take {budget:,} bytes, and one block takes {size:,}")
    if blocks * size > free:
        taken = f" beside {rows:,} for image embeddings (encoder_cache_rows)" if rows else ""
        raise OutOfMemoryError(
            f"{blocks:,} KV blocks take {blocks * size:,} bytes, and {free:,} are free{taken}"
        )
    return blocks


def longest_sequence(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """Tokens of the longest sequence: what the model, the pool and the options allow.

    Raises ConfigError when `max_model_len` is more than the model takes, and OutOfMemoryError
    when it does not fit the pool.
    """
    capacity = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model_limit, capacity)
    if config.max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; allowed: up to {model_limit}, the positions "
            "that the model was made for"
        )
    if config.max_model_len > capacity:
        raise OutOfMemoryError(
            f"max_model_len is {config.max_model_len}; the {num_blocks:,} KV blocks of "
            f"{config.block_size} hold {capacity} tokens"
        )
    return config.max_model_len
