"""The parts of an engine for a loaded model: memory, cache and stores, and their sizes.

Processes exchange K/V only if the fingerprints of their models are equal. A fingerprint covers the
content of the weights and of the configuration, the dtype, the quantization of weights and K/V, and
the layout of a block's bytes. With `deterministic` it also covers all that determines rounding.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from headstart.attention import PagedKVMemory, StateMemory, make_backend
from headstart.attention.memory import INT8_REVISION
from headstart.cache import BlockHasher, CacheConfig, CacheEvent, KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.tiering.loads import BlockPayload, BlockRows, block_text
from headstart.engine.tiering.states import StatePayload, StateStores
from headstart.engine.tiering.tiers import Tiers
from headstart.errors import ConfigError, OutOfMemoryError
from headstart.imports import load_module
from headstart.machine import available_memory, cpu_flags
from headstart.models.decoder import DecoderModel, VisionModel
from headstart.models.files import BUILT_IN, find_folder
from headstart.models.tokenizer import Tokenizer
from headstart.tiers.disk import DiskStore
from headstart.tiers.files import read_file, replace_file
from headstart.tiers.index import make_folder
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import BlockStore, ModelRecord
from headstart.tiers.transfers import OBJECTS
from headstart.version import __version__
from headstart.weights.format import PREQUANTIZED_REVISION, REVISIONS, Embedding, Linear

_LAYOUT = "layer by layer K and then V, [tokens, heads, width], 1"
_FINGERPRINTS = "fingerprints.json"
_MAX_FINGERPRINTS = 256
# Environment variables that change rounding: they limit the CPU instructions of torch's libraries.
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


def identify(
    decoder: DecoderModel,
    memory: PagedKVMemory,
    config: EngineConfig,
    folder: Path | None,
    rows: BlockRows | None = None,
) -> ModelRecord:
    """Return the model's record for a store. Reads all weights unless `folder` has their digest.

    rows: outputs of a pipeline's stage that are stored with K/V.
    """
    parts = [_LAYOUT, _weights(decoder, folder), str(decoder.dtype), repr(decoder.layouts)]
    if decoder.state_layouts:
        parts.append(repr(decoder.state_layouts))
    parts += _quantized_layers(decoder)
    if memory.has_scales:
        parts.append(f"K/V int8 {INT8_REVISION}")
    if config.deterministic:
        parts += [
            type(make_backend(memory)).__name__,
            "deterministic",
            __version__,
            torch.__version__,
            str(decoder.device),
            torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else "",
            torch.backends.cpu.get_cpu_capability(),
            " ".join(sorted(cpu_flags())),
            f"{config.threads} threads",
            decoder.products(),
            torch.get_float32_matmul_precision(),
            *(os.environ.get(name, "") for name in _CAPS),
        ]
    name, nbytes = _name(decoder.folder), memory.block_bytes
    if rows is not None:
        parts.append(rows.layout)
        name, nbytes = f"{name}, {rows.title}", nbytes + rows.nbytes
    title = f"{name} ({', '.join(_kinds(decoder, memory, config))})"
    framed = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    fingerprint = hashlib.sha256(framed).hexdigest()
    return ModelRecord(fingerprint, title, config.block_size, nbytes)


def _quantized_layers(decoder: DecoderModel) -> list[str]:
    """Return a string for each quantized layer: its format, and whether its inputs are rounded."""
    layers = []
    for name, module in sorted(decoder.module.named_modules()):
        matrix = module.matrix if isinstance(module, Linear | Embedding) else None
        if matrix is not None and matrix.kind is not None:
            source = f" as it was, {PREQUANTIZED_REVISION}" if matrix.is_prequantized else ""
            rounds = isinstance(module, Linear) and matrix.rounds_rows
            rows = " of rows in 8 bits" if rounds else ""
            layers.append(f"{name} {matrix.kind} {REVISIONS[matrix.kind]}{source}{rows}")
    return layers


def _kinds(decoder: DecoderModel, memory: PagedKVMemory, config: EngineConfig) -> list[str]:
    """Return display names of the options on which the K/V depend, such as the dtype."""
    kinds = [str(decoder.dtype).removeprefix("torch.")]
    layers = [layer.matrix for layer in decoder.module.modules() if isinstance(layer, Linear)]
    quantized = [matrix for matrix in layers if matrix.kind is not None]
    rounded = [matrix.kind for matrix in quantized if not matrix.is_prequantized and matrix.kind]
    # A model rounded to 4 bits has some layers in 8 bits, so show the smallest format.
    if 2 * len(rounded) > len(quantized):
        kinds.append(f"{min(rounded, key=lambda kind: kind.removeprefix('int'))} weights")
    if memory.has_scales:
        kinds.append("int8 K/V")
    if config.deterministic:
        kinds.append("deterministic")
    if config.block_size != EngineConfig.block_size:
        kinds.append(f"blocks of {config.block_size}")
    return kinds


def _name(folder: Path | None) -> str:
    """Return a model's display name: its name on the hub, or the name of its folder or file."""
    if folder is None:
        return "a model in memory"
    folder = folder.absolute()
    if (file := folder / "model.gguf").is_symlink():
        return file.readlink().name
    if folder == find_folder(BUILT_IN).absolute():
        return BUILT_IN
    if folder.parent.name == "snapshots":  # .../models--owner--name/snapshots/commit
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def _weights(decoder: DecoderModel, folder: Path | None) -> str:
    """Return the SHA-256 of configuration and weights, cached by the files' sizes and times."""
    if decoder.folder is None or folder is None or not decoder.has_original_files:
        return decoder.fingerprint()
    key = hashlib.sha256(repr((decoder.folder.resolve(), decoder.files)).encode()).hexdigest()
    path = folder / _FINGERPRINTS
    digests: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):  # missing, or damaged
        data = json.loads(read_file(path))
        if isinstance(data, dict):
            digests = {name: value for name, value in data.items() if isinstance(value, str)}
    if key in digests:
        decoder.recall_fingerprint(digests[key])
        return digests[key]
    digests[key] = decoder.fingerprint()
    with suppress(OSError):  # two processes may write at once
        replace_file(path, json.dumps(dict(list(digests.items())[-_MAX_FINGERPRINTS:])).encode())
    return digests[key]


# A million tokens in blocks of 16. Creating more blocks takes seconds.
DEFAULT_MAX_BLOCKS = 65_536
MIN_STATES = 16
_SAVED_PER_STATE = 32  # stored states are at least `tokens_per_state` / 32 tokens apart
_LOG = logging.getLogger("headstart.tiers")
_MAX_PREPARED = 8192  # maximum positions for `prepare`, which would otherwise delay the start


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()  # torch retains freed memory
    return torch.cuda.mem_get_info(device)[0]


def kv_dtype(config: EngineConfig, decoder: DecoderModel) -> torch.dtype:
    """Return the dtype in which K and V are stored."""
    return torch.int8 if config.kv_cache_dtype == "int8" else decoder.dtype


class MemoryPlan(NamedTuple):
    """The sizes of an engine's memory, by their names in `CacheConfig`.

    num_states: slots for states of recurrent layers. num_window_blocks: blocks of the layers with a
    sliding window; 0 if all layers share one pool. window: tokens of the widest sliding window.
    """

    num_blocks: int
    num_states: int = 0
    num_window_blocks: int = 0
    window: int = 0


def plan_memory(config: EngineConfig, decoder: DecoderModel, encoder_row: int) -> MemoryPlan:
    """Return the sizes of the memory: by default as many blocks as the K/V budget holds.

    A model without attention has no K/V. Its blocks only identify prefixes, and the whole budget is
    for states.

    encoder_row: bytes of a row of the encoder cache, for which memory is reserved; 0 for a model
    without vision. Raises OutOfMemoryError if the budget is smaller than one block or exceeds the
    free memory, and ConfigError for too few window blocks.
    """
    block = _block_bytes(config, decoder)
    rows = config.encoder_cache_rows * encoder_row
    free = max(free_memory(decoder.device) - rows, 0)
    budget = config.kv_cache_memory or int(free * config.kv_cache_fraction)
    states = _count_states(config, decoder, budget)
    state_bytes = states * StateMemory.bytes_per_slot(decoder.state_layouts)
    window = window_width(config, decoder)
    blocks, window_blocks = _plan_windows(config, decoder, budget) if window else (None, 0)
    if not window_blocks:
        window, blocks = 0, config.num_blocks
    if blocks is None:
        blocks = (budget - state_bytes) // block if block else DEFAULT_MAX_BLOCKS
        if config.kv_cache_memory is None:
            blocks = min(blocks, DEFAULT_MAX_BLOCKS)
    if blocks < 1:
        needed = "one block" + (f" and {states:,} states (num_states)" if states else "")
        raise OutOfMemoryError(
            f"the memory for K/V is {budget:,} bytes; allowed: at least {block + state_bytes:,}, "
            f"for {needed}"
        )
    nbytes = blocks * block
    if window:
        nbytes -= (blocks - window_blocks) * _window_block_bytes(config, decoder)
    if nbytes + state_bytes > free:
        free = max(free - state_bytes, 0)
        reserved = f" after {rows:,} for image embeddings (encoder_cache_rows)" if rows else ""
        reserved += f" after {state_bytes:,} for states (num_states)" if states else ""
        windows = f" and {window_blocks:,} window blocks" if window else ""
        raise OutOfMemoryError(
            f"{blocks:,} KV blocks{windows} need {nbytes:,} bytes, and {free:,} are free{reserved}"
        )
    return MemoryPlan(blocks, states, window_blocks, window)


def has_stores(config: EngineConfig) -> bool:
    """Return True if K/V outlive the pool."""
    return config.enable_prefix_caching and bool(config.disk_folder or config.remote_cache)


def window_width(config: EngineConfig, decoder: DecoderModel) -> int:
    """Return the widest sliding window of a layer; 0 if window blocks are not used.

    Window blocks are used only if some layers have no window, since the blocks of those layers
    identify prefixes. They are not used with recurrent states or with stores, since both need
    blocks with the K/V of all layers.
    """
    windows = {layout.window for layout in decoder.layouts}
    if decoder.state_layouts or has_stores(config) or None not in windows:
        return 0
    return max(window or 0 for window in windows)


def _plan_windows(config: EngineConfig, decoder: DecoderModel, budget: int) -> tuple[int, int]:
    """Return the numbers of blocks and of window blocks; the second is 0 if they save no memory.

    By default there is a window block for every ten blocks, but at least as many as the longest
    step reads and writes. Raises ConfigError if `num_window_blocks` is too few for this step.
    """
    tokens, window = config.max_num_batched_tokens, window_width(config, decoder)
    min_count = -(-(tokens + window) // config.block_size) + 2
    count = config.num_window_blocks
    if count is not None and count < min_count:
        raise ConfigError(
            f"num_window_blocks is {count}; allowed: at least {min_count}, for steps of {tokens} "
            f"tokens (max_num_batched_tokens) and sliding windows of {window}"
        )
    blocks = config.num_blocks
    if blocks is None:
        window_block = _window_block_bytes(config, decoder)
        block = _block_bytes(config, decoder) - window_block
        blocks = (budget - (count or min_count) * window_block) // block
        if count is None:
            blocks = min(blocks, 10 * (budget - window_block) // (10 * block + window_block))
        if config.kv_cache_memory is None:
            blocks = min(blocks, DEFAULT_MAX_BLOCKS)
    if count is None:
        count = max(min_count, -(-blocks // 10))
    return blocks, count if count < blocks else 0


def _block_bytes(config: EngineConfig, decoder: DecoderModel) -> int:
    dtype = kv_dtype(config, decoder)
    return PagedKVMemory.bytes_per_block(decoder.layouts, config.block_size, dtype)


def _window_block_bytes(config: EngineConfig, decoder: DecoderModel) -> int:
    layouts = [layout for layout in decoder.layouts if layout.window is not None]
    return PagedKVMemory.bytes_per_block(layouts, config.block_size, kv_dtype(config, decoder))


def _count_states(config: EngineConfig, decoder: DecoderModel, budget: int) -> int:
    """Return `num_states`, or one slot for every `tokens_per_state` tokens of the K/V budget."""
    if not decoder.state_layouts:
        return 0
    if config.num_states is not None:
        return config.num_states
    blocks = tokens_per_state(config, decoder) // config.block_size
    if config.num_blocks is not None:
        return max(MIN_STATES, config.num_blocks // blocks)
    slot = StateMemory.bytes_per_slot(decoder.state_layouts)
    states = budget // (slot + blocks * _block_bytes(config, decoder))
    return min(max(MIN_STATES, states), DEFAULT_MAX_BLOCKS // blocks)


def tokens_per_state(config: EngineConfig, decoder: DecoderModel) -> int:
    """Return the number of K/V tokens per state slot, from 128 to 2,048.

    Between these limits, states get a seventh to a quarter of the memory.
    """
    slot = StateMemory.bytes_per_slot(decoder.state_layouts)
    token = max(1, _block_bytes(config, decoder) // config.block_size)
    return min(max(128, 1 << (3 * slot // token).bit_length()), 2048)


def longest_sequence(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """Return the maximum number of tokens that model, pool and options allow for a sequence.

    Raises ConfigError if `max_model_len` is more than the model supports, and OutOfMemoryError if
    it is more than the pool holds.
    """
    capacity = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model_limit, capacity)
    if config.max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; allowed: up to {model_limit}, the limit of "
            "the model"
        )
    if config.max_model_len > capacity:
        raise OutOfMemoryError(
            f"max_model_len is {config.max_model_len}; allowed: up to {capacity}, the tokens that "
            f"{num_blocks:,} KV blocks of {config.block_size} hold"
        )
    return config.max_model_len


class ObservedManager(KVCacheManager):
    """A manager whose events are read twice: by the tiers, and by a router."""

    def __init__(self, config: CacheConfig, hasher: BlockHasher | None = None) -> None:
        super().__init__(config, hasher)
        self._observed: list[CacheEvent] = []

    def take_events(self) -> list[CacheEvent]:
        events = super().take_events()
        self._observed += events
        return events

    def take_observed(self) -> list[CacheEvent]:
        """Return the events that `take_events` returned since the last call, oldest first."""
        observed, self._observed = self._observed, []
        return observed


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine.

    tiers: the stores of blocks outside the pool, if any. states: the states of recurrent layers;
    None for a model without such layers.
    """

    model: DecoderModel
    memory: PagedKVMemory
    manager: KVCacheManager
    max_model_len: int
    vision: VisionModel | None = None
    tiers: Tiers | None = None
    states: StateMemory | None = None


def open_stores(model: ModelRecord, config: EngineConfig) -> Sequence[BlockStore]:
    """Return the stores that the options name, nearest first. Raises ConfigError."""
    stores: list[BlockStore] = []
    if config.disk_folder is not None:
        stores.append(DiskStore(config.disk_folder, model, config.cache_dir_bytes))
    if config.remote_cache:
        stores.append(RemoteStore(config.remote_cache, model))
    return stores


def _log_unused(config: EngineConfig, memory: PagedKVMemory, states: StateMemory | None) -> None:
    """Log each option that is set but has no effect with this model."""
    log = logging.getLogger("headstart.engine")
    if config.num_states is not None and states is None:
        log.warning("num_states has no effect: the model has no recurrent layers")
    if config.num_window_blocks is not None and not memory.num_window_blocks:
        log.warning("num_window_blocks has no effect: all layers share one pool of blocks")


def make_engine_parts(
    decoder: DecoderModel,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    *,
    rows: BlockRows | None = None,
    is_observed: bool = False,
) -> EngineParts:
    """Return memory, cache and stores for a model. Raises ConfigError or OutOfMemoryError.

    rows: outputs of a pipeline's stage that are stored with K/V. is_observed: make the manager an
    `ObservedManager`.
    """
    vision: VisionModel | None = None
    # Image processors take seconds to import.
    if decoder.takes_images and decoder.folder is not None:
        backend = load_module("headstart.models.transformers_backend.image_encoder")
        vision = backend.TransformersVision(decoder, decoder.folder, tokenizer)
    plan = plan_memory(config, decoder, vision.bytes_per_row if vision is not None else 0)
    limit = longest_sequence(config, decoder.max_model_len, plan.num_blocks)
    dtype, device = kv_dtype(config, decoder), decoder.device
    memory = PagedKVMemory(
        decoder.layouts, plan.num_blocks, config.block_size, dtype, device, plan.num_window_blocks
    )
    layouts = decoder.state_layouts
    states = StateMemory(layouts, plan.num_states, device) if layouts else None
    _log_unused(config, memory, states)
    folder, model = config.disk_folder, None
    stores: Sequence[BlockStore] = ()
    if has_stores(config):
        if folder is not None and not make_folder(folder):
            _LOG.warning("cache folder %s is not writable; its blocks are only read", folder)
        model = identify(decoder, memory, config, folder, rows)
        stores = open_stores(model, config)
        # Prepare for the longest load: it writes `loaded` blocks, and the next step reads them.
        num_stored = max(store.num_stored for store in stores)
        loaded = min(num_stored, -(-limit // config.block_size))
        memory.prefault(loaded)
        decoder.prepare(min(loaded * config.block_size, _MAX_PREPARED))
    cache = CacheConfig(
        **plan._asdict(),
        events=is_observed or bool(stores),
        state_interval=max(128, tokens_per_state(config, decoder) // 4),
        states_at_borders=config.deterministic,
        **config.shared() | {"partial_hits": config.partial_hits and not config.deterministic},
    )
    hasher = BlockHasher(config.block_size, "" if model is None else model.fingerprint)
    manager = (ObservedManager if is_observed else KVCacheManager)(cache, hasher)
    tiers = state_stores = None
    if model is not None:
        payload, text = BlockPayload(memory, rows), block_text(tokenizer, config.cache_words)
        if states is not None:
            has_tail = cache.partial_hits and rows is None
            state_payload = StatePayload(memory, states, has_tail=has_tail)
            record = state_payload.record(model)
            min_gain = tokens_per_state(config, decoder) // _SAVED_PER_STATE
            state_stores = StateStores(state_payload, open_stores(record, config), min_gain)
        objects, size = open_stores(OBJECTS, config), decoder.vocab_size
        tiers = Tiers(manager, payload, stores, objects, text, size, state_stores)
    return EngineParts(decoder, memory, manager, limit, vision, tiers, states)
