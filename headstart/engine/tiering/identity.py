"""The fingerprint of a model: processes exchange K/V only where it is equal.

It covers the content of the weights and of the configuration, the dtype, the bits in which weights
and K/V are stored, and the layout of a block's bytes; a block's name also covers adapter, salt,
tokens and items. Where answers must be equal bit for bit (`deterministic`), it also covers all that
determines rounding.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import torch

from headstart.attention import PagedKVMemory, name_backend
from headstart.attention.memory import INT8_REVISION
from headstart.engine.config import EngineConfig
from headstart.engine.tiering.offers import BlockRows
from headstart.machine import cpu_flags
from headstart.models.decoder import DecoderModel
from headstart.models.files import BUILT_IN, find_folder
from headstart.tiers import ModelRecord
from headstart.tiers.files import read_file, replace_file
from headstart.version import __version__
from headstart.weights.format import PREQUANTIZED_REVISION, REVISIONS, Embedding, Linear

_LAYOUT = "layer by layer K and then V, [tokens, heads, width], 1"
_MEMORY = "fingerprints.json"
# The instructions that torch's libraries use, each with its own rounding.
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_MOST = 256  # models whose fingerprints are remembered


def identify(
    decoder: DecoderModel,
    memory: PagedKVMemory,
    config: EngineConfig,
    folder: Path | None,
    rows: BlockRows | None = None,
) -> ModelRecord:
    """Return the model's record for a store. Reads all weights, unless `folder` has their digest.

    rows: the rows that are stored with K/V.
    """
    parts = [
        _LAYOUT,
        _weights(decoder, folder),
        str(decoder.dtype),
        repr(decoder.layouts),
    ]
    parts += _kept_weights(decoder)
    if memory.has_scales:
        parts.append(f"K/V int8 {INT8_REVISION}")
    if config.deterministic:
        parts += [
            name_backend(memory),
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


def _kept_weights(decoder: DecoderModel) -> list[str]:
    """Return each layer whose weight is not a float, since a file may be read into several kinds.

    Each says if its compiled product rounds its rows to 8 bits, which others do not.
    """
    kept = []
    for name, module in sorted(decoder.module.named_modules()):
        matrix = module.matrix if isinstance(module, Linear | Embedding) else None
        if matrix is not None and matrix.kind is not None:
            own = f" as it was, {PREQUANTIZED_REVISION}" if matrix.is_prequantized else ""
            rounds = isinstance(module, Linear) and matrix.rounds_rows
            rows = " of rows in 8 bits" if rounds else ""
            kept.append(f"{name} {matrix.kind} {REVISIONS[matrix.kind]}{own}{rows}")
    return kept


def _kinds(decoder: DecoderModel, memory: PagedKVMemory, config: EngineConfig) -> list[str]:
    """Return what distinguishes a model's K/V from others of the same files, for people."""
    kinds = [str(decoder.dtype).removeprefix("torch.")]
    layers = [layer.matrix for layer in decoder.module.modules() if isinstance(layer, Linear)]
    quantized = [matrix for matrix in layers if matrix.kind is not None]
    rounded = [matrix.kind for matrix in quantized if not matrix.is_prequantized and matrix.kind]
    if 2 * len(rounded) > len(quantized):  # int4 has layers of more bits
        kinds.append(f"{min(rounded, key=lambda kind: kind.removeprefix('int'))} weights")
    if memory.has_scales:
        kinds.append("int8 K/V")
    if config.deterministic:
        kinds.append("deterministic")
    if config.block_size != EngineConfig.block_size:
        kinds.append(f"blocks of {config.block_size}")
    return kinds


def _name(folder: Path | None) -> str:
    """Return a model's name for people: that on the hub, or its folder's or GGUF file's."""
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
    """Return the SHA-256 of configuration and weights, remembered by files, sizes and times."""
    if decoder.folder is None or folder is None or not decoder.has_its_files:
        return decoder.fingerprint()
    key = hashlib.sha256(repr((decoder.folder.resolve(), decoder.files)).encode()).hexdigest()
    path = folder / _MEMORY
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):  # missing, or damaged
        data = json.loads(read_file(path))
        if isinstance(data, dict):
            known = {name: value for name, value in data.items() if isinstance(value, str)}
    if key in known:
        decoder.recall_fingerprint(known[key])
        return known[key]
    known[key] = decoder.fingerprint()
    with suppress(OSError):  # two processes may write at once
        replace_file(path, json.dumps(dict(list(known.items())[-_MOST:])).encode())
    return known[key]
