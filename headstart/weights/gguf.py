"""The tensors of a GGUF file, llama.cpp's format, under transformers' names, one at a time.

Its formats of 4, 5 and 8 bits become weights of ours with the same values; steps are rounded to
float16:

    Q4_0    32 weights: d, 16 bytes                     weight = d * (value - 8)
    Q4_1    32 weights: d, m, 16 bytes                  weight = d * value + m
    Q4_K    256 weights: d, least, 8 times 2 * 6 bits   weight = d * scale * value - least * min
    Q8_0    32 weights: d, 32 signed bytes              weight = d * value

A byte of the first two holds the values at i and i + 16 of its block. Q5_0, Q5_1 and Q5_K have the
fifth bits besides: 4 bytes with a bit for each weight, or 32 with a bit for each group of a block.
The package `gguf`, an optional dependency, reads the files.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.imports import install
from headstart.native.pages import drop_pages
from headstart.weights.format import WeightKind
from headstart.weights.grouped import GROUP, Form, Grid, GroupedValues, pack_groups
from headstart.weights.scheme import UnsupportedLayerError

__all__ = [
    "ARCHITECTURES",
    "FORMATS",
    "ROPE_FACTORS",
    "GGUFCheckpoint",
    "Metadata",
    "import_gguf",
    "read_architecture",
    "read_weight",
]

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with a factor for each pair of elements that are rotated together."""

_log = logging.getLogger(__name__)
_ROUNDED = "rounded again"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OLMO2 = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "llama": _NAMES,
    "mistral3": _NAMES,
    "qwen2": _NAMES,
    "qwen3": _NAMES,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _PHI3,
    "granite": _NAMES,
    "olmo2": _OLMO2,
    "smollm3": _NAMES,
}
"""The architectures whose tensors are known, and transformers' names for them."""

# Those in whose files the two halves of a head of Q and K, which are rotated together, lie side by
# side.
_PERMUTED = frozenset({"llama", "mistral3", "granite", "smollm3"})
_OWN_TENSORS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Formats of few bits, which no kind holds: they are rounded to 4 bits, all others to 8.
_NARROW = frozenset(
    {
        *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"),
        *("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
    }
)
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
_QUERY = "model.layers.0.self_attn.q_proj.weight"
_PLACE = re.compile(r"(?:blk\.(\d{1,9})\.)?([a-z_]+)\.(weight|bias)")


class Metadata:
    """The values of a file's metadata below one prefix."""

    def __init__(self, reader: Any, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` where the file has none."""
        field = self._reader.fields.get(f"{self._prefix}.{name}")
        return default if field is None else field.contents()

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number; raises `UnsupportedLayerError` for any other value."""
        value = self.get(name, default)
        if type(value) is not int:
            raise UnsupportedLayerError(
                f"its {self._prefix}.{name} is {value!r}, and not a whole number"
            )
        return value


def read_architecture(reader: Any) -> str:
    """Return a file's architecture; raises `UnsupportedLayerError` unless it is supported."""
    field = reader.fields.get("general.architecture")
    if field is None:
        raise UnsupportedLayerError("its metadata has no general.architecture")
    found = str(field.contents())
    if found not in ARCHITECTURES:
        raise UnsupportedLayerError(
            f"its architecture is {found}; read are {', '.join(ARCHITECTURES)}"
        )
    return found


class GGUFCheckpoint:
    """The tensors of `model.gguf` in a folder.

    Raises `UnsupportedLayerError` for an architecture that is not in `ARCHITECTURES`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "model.gguf"
        self._gguf: Any = import_gguf(self._file)
        reader = self._gguf.GGUFReader(self._file)
        self._mapped = reader.data
        self._architecture = read_architecture(reader)
        known = Metadata(reader, self._architecture)
        self._check_keys(known)
        self._heads = heads = known.count("attention.head_count")
        self._kv_heads = known.count("attention.head_count_kv", heads) or heads
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            if tensor.name not in _OWN_TENSORS:
                name = self._name(tensor.name)
                if name in self._tensors:
                    raise UnsupportedLayerError(f"it has two tensors for {name}")
                self._tensors[name] = tensor
        rotated, query = known.get("rope.dimension_count"), self.shapes.get(_QUERY)
        if rotated is not None and query is not None and rotated * heads != query[0]:
            raise UnsupportedLayerError(f"{rotated} elements of each head are rotated, and not all")

    def _check_keys(self, known: Metadata) -> None:
        """Raise `UnsupportedLayerError` for what would change answers and is not read."""
        scaling = known.get("rope.scaling.type")
        is_read = self._architecture == "gemma3" and scaling == "linear"
        if scaling not in (None, "none") and not is_read:
            raise UnsupportedLayerError(f"its rotary positions are scaled ({scaling})")
        for name in _FACTORS if scaling is None else ():  # llama.cpp takes them as linear then
            if (factor := known.get(name)) not in (None, 0, 1):
                raise UnsupportedLayerError(f"its rotary positions are scaled ({name} {factor})")
        if not known.get("attention.causal", True):
            raise UnsupportedLayerError("its tokens see tokens after them")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {
            name: tuple(int(side) for side in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """The dtypes of floats; float32 of what is quantized."""
        return [_FLOATS.get(self._type(name), torch.float32) for name in names]

    def tensor(self, name: str) -> Tensor:
        """The tensor in float32, in memory of its own; raises `UnsupportedModelError`."""
        entry = self._tensors[name]
        try:
            data = self._gguf.quants.dequantize(self._rows(name), entry.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{name} is of the format {self._type(name)}, which the package gguf does not read"
            ) from error
        found = torch.from_numpy(data.astype("float32")).view(self.shapes[name])
        # llama.cpp keeps Gemma's norms with the 1 that the model adds to them.
        return found - 1 if "norm" in name and self._architecture.startswith("gemma") else found

    def kind(self, name: str) -> WeightKind | None:
        """The nearest kind to the tensor's own bits; None for a float."""
        own = self._type(name)
        if own in _FLOATS:
            return None
        return FORMATS.get(own, "int4" if own in _NARROW else "int8")

    def packed(self, name: str) -> GroupedValues | None:
        """The tensor in its own 4, 5 or 8 bits; None if it has others."""
        own = self._type(name)
        if own not in FORMATS:
            return None
        return read_weight(self._rows(name), own, self._gguf)

    def log(self, tied: bool) -> None:
        """Log in one line what becomes of the file's formats; in a warning where numbers change."""
        counts = Counter((self._type(n), self._becomes(n, tied)) for n in self._tensors)
        said = [f"{count} {own} {becomes}" for (own, becomes), count in sorted(counts.items())]
        changed = any(becomes.startswith(_ROUNDED) for _, becomes in counts)
        level = logging.WARNING if changed else logging.INFO
        _log.log(level, "tensors of the GGUF file: %s", ", ".join(said))

    def _becomes(self, name: str, tied: bool) -> str:
        own, kind = self._type(name), self.kind(name)
        if kind is None:
            return "stay float"
        if name == "model.embed_tokens.weight" and not tied:
            return "made float"
        if own in FORMATS:
            return f"kept as {kind}"
        is_head = name in ("lm_head.weight", "model.embed_tokens.weight")
        return f"{_ROUNDED} to {'int8' if is_head else kind}"

    def release(self) -> None:
        """Give the pages of the file back that were read: tensors are copied out of it."""
        if isinstance(self._mapped, np.memmap) and self._mapped.mode == "r":
            drop_pages(self._mapped.ctypes.data, self._mapped.nbytes)

    def _type(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def _name(self, name: str) -> str:
        found = _PLACE.fullmatch(name)
        ours = found and ARCHITECTURES[self._architecture].get(found[2])
        if not found or not ours:
            return name
        layer = "" if found[1] is None else f"model.layers.{found[1]}."
        return f"{layer}{ours}.{found[3]}"

    def _rows(self, name: str) -> Any:
        """Return rows of bytes or numbers, of Q and K in transformers' order.

        Raises `DamagedModelError` for a file that was cut off since: to read beyond its end is a
        SIGBUS.
        """
        if self._file.stat().st_size < self._mapped.nbytes:
            raise DamagedModelError(f"{self._file} was written to while it was read")
        data = self._tensors[name].data
        part = name.split(".")[-2]
        if self._architecture not in _PERMUTED or part not in ("q_proj", "k_proj"):
            return data
        heads = self._heads if part == "q_proj" else self._kv_heads
        halves = data.reshape(heads, len(data) // heads // 2, 2, *data.shape[1:])
        return halves.swapaxes(1, 2).reshape(data.shape)


_OUTPUTS = 2048  # whole panels
_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


_BITS: dict[WeightKind, Literal[4, 5, 8]] = {"int4": 4, "int5": 5, "int8": 8}


class _Blocks(NamedTuple):
    """Values `[blocks, groups, 32]` and, for each group, weight = step * value + start.

    128 is taken off a value of 8 bits first.
    """

    values: _Bytes
    step: _Floats
    start: _Floats


def read_weight(data: _Bytes, name: str, gguf: Any) -> GroupedValues:
    """A weight of rows of blocks, uint8 `[outputs, bytes]`, in one of `FORMATS`."""
    # In pieces of whole panels: a few copies of each are made on the way.
    pieces = [_read(data[at : at + _OUTPUTS], name, gguf) for at in range(0, len(data), _OUTPUTS)]
    panels, scales = (torch.cat(parts) for parts in zip(*(p[:2] for p in pieces), strict=True))
    return pieces[0]._replace(panels=panels, scales=scales)


def _read(data: _Bytes, name: str, gguf: Any) -> GroupedValues:
    size, kind, read = _FORMATS[name]
    outputs = len(data)
    blocks = read(np.ascontiguousarray(data).reshape(-1, size), gguf)
    values = blocks.values.reshape(outputs, -1)
    step, start = (part.reshape(outputs, -1) for part in (blocks.step, blocks.start))
    assert values.shape[1] == GROUP * step.shape[1]
    grid = Grid(*map(torch.from_numpy, (values, step, start)))
    return pack_groups(grid, Form(_BITS[kind], in_bytes=False))


def _halves(data: _Bytes) -> _Bytes:
    """The lower halves of the bytes, then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _spread(data: _Bytes) -> _Bytes:
    """The bits of each row's bytes, from the lowest on, as fifth bits of values."""
    return np.unpackbits(data, axis=1, bitorder="little") * np.uint8(16)


def _float(data: _Bytes) -> _Floats:
    return data.copy().view(np.float16).astype(np.float32)


def _q4_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(_halves(blocks[:, 2:]), step, -8 * step)


def _q4_1(blocks: _Bytes, _: Any) -> _Blocks:
    return _Blocks(_halves(blocks[:, 4:]), _float(blocks[:, :2]), _float(blocks[:, 2:4]))


def _q5_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(_halves(blocks[:, 6:]) | _spread(blocks[:, 2:6]), step, -16 * step)


def _q5_1(blocks: _Bytes, _: Any) -> _Blocks:
    values = _halves(blocks[:, 8:]) | _spread(blocks[:, 4:8])
    return _Blocks(values, _float(blocks[:, :2]), _float(blocks[:, 2:4]))


def _q8_0(blocks: _Bytes, _: Any) -> _Blocks:
    step = _float(blocks[:, :2])
    return _Blocks(blocks[:, 2:] ^ np.uint8(128), step, 0 * step)


def _q5_k(blocks: _Bytes, gguf: Any) -> _Blocks:
    fours = _q4_k(np.concatenate((blocks[:, :16], blocks[:, 48:]), axis=1), gguf)
    groups = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifths = (blocks[:, 16:48].reshape(-1, 1, GROUP) >> groups & np.uint8(1)) * np.uint8(16)
    return fours._replace(values=fours.values.reshape(-1, 8, GROUP) | fifths)


def _q4_k(blocks: _Bytes, gguf: Any) -> _Blocks:
    scale, least = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    step = _float(blocks[:, :2]) * scale.astype(np.float32)
    start = -_float(blocks[:, 2:4]) * least.astype(np.float32)
    pairs = blocks[:, 16:].reshape(len(blocks), 4, 1, GROUP)
    return _Blocks(np.concatenate((pairs & 15, pairs >> 4), axis=2), step, start)


_FORMATS: dict[str, tuple[int, WeightKind, Callable[[_Bytes, Any], _Blocks]]] = {
    "Q4_0": (18, "int4", _q4_0),
    "Q4_1": (20, "int4", _q4_1),
    "Q4_K": (144, "int4", _q4_k),
    "Q5_0": (22, "int5", _q5_0),
    "Q5_1": (24, "int5", _q5_1),
    "Q5_K": (176, "int5", _q5_k),
    "Q8_0": (34, "int8", _q8_0),
}
FORMATS: dict[str, WeightKind] = {name: kind for name, (_, kind, _) in _FORMATS.items()}
"""The formats whose bits are kept, and the kinds of our own that they become."""


def import_gguf(file: Path) -> Any:
    """The package; raises `UnsupportedModelError` where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file} is a GGUF file, and the package that reads it is missing: " + install("gguf")
        ) from error
    return gguf
