"""The fingerprint of a model: processes exchange K/V only where it is the same.

It covers the content of the weights and of the configuration, the dtype, the bits in which weights
and K/V are kept, and the layout of a block's bytes; adapter, salt, tokens and items are in a
block's name besides. Where answers must be the same bit for bit (`deterministic`), it also covers
all that decides on rounding.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import torch

from headstart.attention import PagedKVMemory, name_backend
from headstart.attention.int8_rows import REVISION
from headstart.engine.config import EngineConfig
from headstart.engine.tiering.offers import BlockRows
from headstart.machine import cpu_flags
from headstart.models.decoder import DecoderModel
from headstart.models.files import BUILT_IN, find_folder
from headstart.tiers import ModelRecord
from headstart.tiers.files import read_file, replace_file
from headstart.version import __version__
from headstart.weights.format import PREQUANTIZED_REVISION, REVISIONS, Embedding, Linear

__all__ = ["identify"]

_LAYOUT = "layer by layer K and then V, [tokens, heads, width], 1"
_MEMORY = "fingerprints.json"
# Which instructions torch's libraries take: they round in their own ways.
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_MOST = 256  # models whose fingerprints are remembered


def identify(
    decoder: DecoderModel,
    memory: PagedKVMemory,
    config: EngineConfig,
    folder: Path | None,
    rows: BlockRows | None = None,
) -> ModelRecord:
    """The model's record for a store. Reads all weights, unless `folder` remembers these files.

    rows: what is kept beside K/V.
    """
    parts = [
        _LAYOUT,
        _weights(decoder, folder),
        str(decoder.dtype),
        repr(decoder.layouts),
    ]
    parts += _kept_weights(decoder)
    if memory.has_scales:
        parts.append(f"K/V int8 {REVISION}")
    if config.deterministic:
        parts += [name_backend(memory), *_rounding(decoder, config)]
    name, nbytes = _name(decoder.folder), memory.block_bytes
    if rows is not None:
        parts.append(rows.layout)
        name, nbytes = f"{name}, {rows.title}", nbytes + rows.nbytes
    title = f"{name} ({', '.join(_kinds(decoder, memory, config))})"
    framed = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    fingerprint = hashlib.sha256(framed).hexdigest()
    return ModelRecord(fingerprint, title, config.block_size, nbytes)


def _kept_weights(decoder: DecoderModel) -> list[str]:
    """Each layer whose weight is not a float: one file may be read into several kinds.

    And whether a compiled product rounds its rows to 8 bits, which others do not.
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
    """What tells people a model's K/V from others of the same files."""
    found = [str(decoder.dtype).removeprefix("torch.")]
    layers = [one.matrix for one in decoder.module.modules() if isinstance(one, Linear)]
    quantized = [matrix for matrix in layers if matrix.kind is not None]
    rounded = [matrix.kind for matrix in quantized if not matrix.is_prequantized and matrix.kind]
    if 2 * len(rounded) > len(quantized):  # int4 has layers of more bits
        found.append(f"{min(rounded, key=lambda kind: kind.removeprefix('int'))} weights")
    if memory.has_scales:
        found.append("int8 K/V")
    if config.deterministic:
        found.append("deterministic")
    if config.block_size != EngineConfig.block_size:
        found.append(f"blocks of {config.block_size}")
    return found


def _name(folder: Path | None) -> str:
    """A model's name for people: that on the hub, or its folder's or GGUF file's."""
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


def _rounding(decoder: DecoderModel, config: EngineConfig) -> list[str]:
    """All that decides on the last bits of K and V."""
    return [
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


def _weights(decoder: DecoderModel, folder: Path | None) -> str:
    """SHA-256 of configuration and weights, remembered by the files' inodes, sizes and times."""
    if decoder.folder is None or folder is None or not decoder.has_its_files:
        return decoder.fingerprint()
    key = hashlib.sha256(repr((decoder.folder.resolve(), decoder.files)).encode())
    path = folder / _MEMORY
    known = _read(path)
    if (found := known.get(key.hexdigest())) is not None:
        decoder.recall_fingerprint(found)
        return found
    known[key.hexdigest()] = decoder.fingerprint()
    with suppress(OSError):  # two processes may write at once
        replace_file(path, json.dumps(dict(list(known.items())[-_MOST:])).encode())
    return known[key.hexdigest()]


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
