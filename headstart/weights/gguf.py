"""Reader of the tensors of a GGUF file (llama.cpp's format), under transformers' names.

Weights in formats of 4, 5 and 8 bits are stored with unchanged values and float16 steps:

    Q4_0    32 weights: d, 16 bytes                     weight = d * (value - 8)
    Q4_1    32 weights: d, m, 16 bytes                  weight = d * value + m
    Q4_K    256 weights: d, dmin, 8 scales and mins     weight = d * scale * value - dmin * min
    Q8_0    32 weights: d, 32 signed bytes              weight = d * value

In Q4_0 and Q4_1, byte i has the values i and i + 16. In Q4_K, each group of 32 weights has a scale
and a min of 6 bits. Q5_0, Q5_1 and Q5_K also have the fifth bit of each value. Q5_0 and Q5_1 have 4
bytes with one bit for each weight. Q5_K has 32 bytes: bit g of byte i is for weight i of group g.

The package `gguf`, an optional dependency, reads the files.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.imports import install
from headstart.native.pages import drop_pages
from headstart.weights.checkpoint import Checkpoint
from headstart.weights.format import WeightKind
from headstart.weights.grouped import (
    GROUP,
    GroupedValues,
    PackedForm,
    QuantizationGrid,
    pack_groups,
)
from headstart.weights.scheme import UnsupportedLayerError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with a factor for the frequency of each rotated pair."""

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
_OLMO2 = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = _OLMO2 | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = _GEMMA | {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PHI3 = _NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LFM2 = _NAMES | {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "mixer.conv",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.out_proj": "mixer.out_proj",
}
_GRANITE_HYBRID = _NAMES | {
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_QWEN35 = _GRANITE_HYBRID | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "mixer.in_proj_qkv",
    "attn_gate": "mixer.in_proj_z",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_beta": "mixer.in_proj_b",
}
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral3", "qwen2", "qwen3", "granite", "smollm3"), _NAMES),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    "gemma4": _GEMMA4,
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "lfm2": _LFM2,
    "qwen35": _QWEN35,
    "granitehybrid": _GRANITE_HYBRID,
}
"""The supported architectures, with transformers' names of their tensors."""

# Architectures whose files interleave the two halves of each head of Q and K, since llama.cpp
# rotates adjacent elements together.
_PERMUTED = frozenset({"llama", "mistral3", "granite", "smollm3", "granitehybrid"})
# Architectures whose files list the number of KV heads by layer, with 0 for recurrent layers.
_KV_HEADS_BY_LAYER = frozenset({"lfm2", "granitehybrid"})
_ROPE_TENSORS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# These unsupported formats are rounded to 4 bits, other unsupported formats to 8.
_NARROW = frozenset(
    {
        *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"),
        *("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
    }
)
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
_QUERY = "model.layers.0.self_attn.q_proj.weight"
_TENSOR_NAME = re.compile(r"(?:blk\.(\d{1,9})\.)?([a-z_0-9.]+?)(\.weight|\.bias)?")
_CONVOLUTIONS = (".conv.weight", ".conv1d.weight")
_TABLES = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")
_FLAT = (".mixer.A_log", ".mixer.D", ".mixer.norm.weight")  # have two dimensions in some files


class Metadata:
    """The metadata of a file under the keys with one prefix."""

    def __init__(self, reader: Any, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` if the file has none."""
        field = self._reader.fields.get(f"{self._prefix}.{name}")
        return default if field is None else field.contents()

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number; raises `UnsupportedLayerError` for any other value."""
        value = self.get(name, default)
        if type(value) is not int:
            raise UnsupportedLayerError(
                f"its {self._prefix}.{name} is {value!r}; allowed: a whole number"
            )
        return value

    def by_layer(self, name: str, layers: int) -> list[int]:
        """Return a whole number for each layer. The file may have one number for all layers."""
        values = self.get(name)
        if not isinstance(values, list):
            return [self.count(name)] * layers
        if len(values) != layers or any(type(value) is not int for value in values):
            raise UnsupportedLayerError(
                f"its {self._prefix}.{name} is {values}; allowed: {layers} whole numbers"
            )
        return values

    def kv_heads(self, heads: int) -> int:
        """Return the number of KV heads in layers with attention."""
        value = self.get("attention.head_count_kv")
        if self._prefix not in _KV_HEADS_BY_LAYER or not isinstance(value, list):
            return self.count("attention.head_count_kv", heads) or heads
        counts = set(value) - {0}
        if len(counts) != 1:
            raise UnsupportedLayerError(f"its layers have different KV heads: {sorted(counts)}")
        return int(counts.pop())


class TiledHeads(NamedTuple):
    """Value heads in llama.cpp's order.

    The first value head of each key head comes first, then the second value head of each key head,
    and so on.
    """

    key_heads: int
    heads: int
    width: int

    def order(self, size: int) -> NDArray[np.int64]:
        """Return indices that put the elements of a file into transformers' order.

        size: the number of elements of a head.
        """
        indices = np.arange(self.heads * size).reshape(-1, self.key_heads, size)
        return indices.swapaxes(0, 1).reshape(-1)


def read_architecture(reader: Any) -> str:
    """Return a file's architecture; raises `UnsupportedLayerError` unless it is supported."""
    field = reader.fields.get("general.architecture")
    if field is None:
        raise UnsupportedLayerError("its metadata has no general.architecture")
    name = str(field.contents())
    if name not in ARCHITECTURES:
        raise UnsupportedLayerError(
            f"its architecture is {name}; allowed: {', '.join(ARCHITECTURES)}"
        )
    return name


class GGUFCheckpoint(Checkpoint):
    """The tensors of `model.gguf` in a folder.

    Raises `UnsupportedLayerError` for an architecture that is not in `ARCHITECTURES`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "model.gguf"
        self._gguf: Any = import_gguf(self._file)
        reader = self._gguf.GGUFReader(self._file)
        self._mapped = reader.data
        self._architecture = read_architecture(reader)
        metadata = Metadata(reader, self._architecture)
        self._check_keys(metadata)
        self._heads = heads = metadata.count("attention.head_count")
        self._kv_heads = metadata.kv_heads(heads) if self._architecture in _PERMUTED else 0
        self._tiled = None
        if self._architecture == "qwen35":
            values = metadata.count("ssm.time_step_rank")
            width = metadata.count("ssm.inner_size") // values
            self._tiled = TiledHeads(metadata.count("ssm.group_count"), values, width)
        self._tensors: dict[str, Any] = {}
        # The last layers are for multi-token prediction. headstart does not use them.
        num_mtp_layers = metadata.count("nextn_predict_layers", 0)
        num_layers = metadata.count("block_count") - num_mtp_layers if num_mtp_layers else None
        for tensor in reader.tensors:
            match = _TENSOR_NAME.fullmatch(tensor.name)
            if num_layers is not None and match and match[1] and int(match[1]) >= num_layers:
                continue
            if tensor.name not in _ROPE_TENSORS:
                name = self._transformers_name(tensor.name)
                if name in self._tensors:
                    raise UnsupportedLayerError(f"it has two tensors for {name}")
                self._tensors[name] = tensor
        rotated, query = metadata.get("rope.dimension_count"), self.shapes.get(_QUERY)
        if self._architecture in ("qwen35", "gemma4"):
            # Qwen3.5 rotates only a part of each head. Gemma 4's rope.dimension_count is for layers
            # with full attention, and layer 0 has a sliding window.
            rotated = None
        if rotated is not None and query is not None and rotated * heads != query[0]:
            raise UnsupportedLayerError(f"only {rotated} elements of each head are rotated")

    def _check_keys(self, metadata: Metadata) -> None:
        """Raise `UnsupportedLayerError` for unsupported settings that would change answers."""
        scaling = metadata.get("rope.scaling.type")
        is_supported = self._architecture == "gemma3" and scaling == "linear"
        if scaling not in (None, "none") and not is_supported:
            raise UnsupportedLayerError(f"its rotary positions are scaled ({scaling})")
        for name in _FACTORS if scaling is None else ():  # llama.cpp then uses linear scaling
            if (factor := metadata.get(name)) not in (None, 0, 1):
                raise UnsupportedLayerError(f"its rotary positions are scaled ({name} {factor})")
        if not metadata.get("attention.causal", True):
            raise UnsupportedLayerError("its attention is not causal")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        shapes = {
            name: tuple(int(side) for side in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        for name, shape in shapes.items():
            if name.endswith(_CONVOLUTIONS):
                shapes[name] = (shape[0], 1, *shape[1:])
            elif name.endswith(_FLAT):
                shapes[name] = (math.prod(shape),)
        return shapes

    def dtypes(self, names: Iterable[str]) -> list[torch.dtype]:
        """Return the tensors' dtypes; float32 for quantized tensors."""
        return [_FLOATS.get(self._type(name), torch.float32) for name in names]

    def tensor(self, name: str) -> Tensor:
        """Return the tensor in float32, in separate memory.

        Raises `UnsupportedModelError` for a format that the package gguf does not support.
        """
        entry = self._tensors[name]
        try:
            data = self._gguf.quants.dequantize(self._rows(name), entry.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{name} has the format {self._type(name)}, which the package gguf lacks"
            ) from error
        if (tiled := self._tiled) is not None and name.endswith(".mixer.out_proj.weight"):
            data = data[:, tiled.order(tiled.width)]
        tensor = torch.from_numpy(data.astype("float32")).view(self.shapes[name])
        if name.endswith(".A_log"):  # llama.cpp stores -exp(A_log)
            return (-tensor).log()
        # These models add 1 to the weights of norms, and llama.cpp stores the sums.
        adds_one = self._architecture in ("gemma2", "gemma3", "qwen35")
        return tensor - 1 if adds_one and "norm" in name and ".mixer." not in name else tensor

    def kind(self, name: str) -> WeightKind | None:
        type_name = self._type(name)
        if type_name in _FLOATS:
            return None
        return FORMATS.get(type_name, "int4" if type_name in _NARROW else "int8")

    def packed(self, name: str) -> GroupedValues | None:
        type_name = self._type(name)
        if type_name not in FORMATS:
            return None
        groups = None
        if (tiled := self._tiled) is not None and name.endswith(".mixer.out_proj.weight"):
            if tiled.width % GROUP:
                return None
            groups = tiled.order(tiled.width // GROUP)
        return read_weight(self._rows(name), type_name, self._gguf, groups)

    def log(self, tied: bool) -> None:
        """Log how tensors of each format are stored in memory.

        If weights are rounded again, the message is a warning.
        """
        counts = Counter((self._type(n), self._describe_storage(n, tied)) for n in self._tensors)
        texts = [
            f"{count} {type_name} {storage}"
            for (type_name, storage), count in sorted(counts.items())
        ]
        changed = any(storage.startswith(_ROUNDED) for _, storage in counts)
        level = logging.WARNING if changed else logging.INFO
        _log.log(level, "tensors of the GGUF file: %s", ", ".join(texts))

    def _describe_storage(self, name: str, tied: bool) -> str:
        type_name, kind = self._type(name), self.kind(name)
        if kind is None:
            return "stored as float"
        if name in _TABLES and not tied:
            return "converted to float"
        if type_name in FORMATS:
            return f"stored as {kind}"
        is_head = name == "lm_head.weight" or name in _TABLES
        return f"{_ROUNDED} to {'int8' if is_head else kind}"

    def release(self) -> None:
        """Release the memory of the file's pages. Tensors are copies, so they stay valid."""
        if isinstance(self._mapped, np.memmap) and self._mapped.mode == "r":
            drop_pages(self._mapped.ctypes.data, self._mapped.nbytes)

    def _type(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def _transformers_name(self, name: str) -> str:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            return name
        names, suffix = ARCHITECTURES[self._architecture], match[3] or ""
        full_name = names.get(match[2] + suffix)
        renamed = names.get(match[2]) if full_name is None else full_name
        if renamed is None:
            return name
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        return f"{layer}{renamed}{suffix if full_name is None else ''}"

    def _rows(self, name: str) -> Any:
        """Return rows of bytes or numbers, in transformers' order.

        Raises `DamagedModelError` if the file was truncated, since reading beyond its end would end
        the process by SIGBUS.
        """
        if self._file.stat().st_size < self._mapped.nbytes:
            raise DamagedModelError(f"{self._file} changed while it was read")
        data = self._tensors[name].data
        if self._tiled is not None and ".mixer." in name:
            return _untile(name.partition(".mixer.")[2], data, self._tiled)
        part = name.split(".")[-2]
        if self._architecture not in _PERMUTED or part not in ("q_proj", "k_proj"):
            return data
        heads = self._heads if part == "q_proj" else self._kv_heads
        halves = data.reshape(heads, len(data) // heads // 2, 2, *data.shape[1:])
        return halves.swapaxes(1, 2).reshape(data.shape)


def _untile(part: str, data: Any, tiled: TiledHeads) -> Any:
    """Return the rows of a part of Qwen3.5's mixer in transformers' order of heads."""
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return data[tiled.order(1)]
    if part not in ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight"):
        return data
    order = tiled.order(tiled.width)
    first = len(data) - len(order)  # the number of rows of queries and keys
    return np.concatenate((data[:first], data[first:][order]))


FORMATS: dict[str, WeightKind] = {
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q4_K": "int4",
    "Q5_0": "int5",
    "Q5_1": "int5",
    "Q5_K": "int5",
    "Q8_0": "int8",
}
"""The formats whose values are stored unchanged, and their kinds."""

_BITS: dict[WeightKind, Literal[4, 5, 8]] = {"int4": 4, "int5": 5, "int8": 8}
_OUTPUTS = 2048  # outputs that are converted at a time; a multiple of a panel
_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


def read_weight(
    data: _Bytes, name: str, gguf: Any, groups: NDArray[np.int64] | None = None
) -> GroupedValues:
    """Return a weight from rows of blocks, uint8 `[outputs, bytes]`, in one of `FORMATS`.

    groups: the index in the file of each group of 32 inputs; None if the order is the same.
    """
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    packed = []
    for first in range(0, len(data), _OUTPUTS):  # in parts, to save memory
        rows = np.ascontiguousarray(data[first : first + _OUTPUTS])
        numbers = _read_blocks(rows.reshape(-1, size), name, gguf)
        parts = [part.reshape(len(rows), -1) for part in numbers]
        if groups is not None:
            values, steps, starts = parts
            values = values.reshape(len(rows), -1, GROUP)[:, groups].reshape(values.shape)
            parts = [values, steps[:, groups], starts[:, groups]]
        grid = QuantizationGrid(*map(torch.from_numpy, parts))
        assert grid.values.shape[1] == GROUP * grid.steps.shape[1]
        packed.append(pack_groups(grid, PackedForm(_BITS[FORMATS[name]], in_bytes=False)))
    panels, scales = (torch.cat(parts) for parts in zip(*(p[:2] for p in packed), strict=True))
    return packed[0]._replace(panels=panels, scales=scales)


def _read_blocks(blocks: _Bytes, name: str, gguf: Any) -> tuple[_Bytes, _Floats, _Floats]:
    """Return values `[blocks, groups * 32]`, steps and starts: weight = step * value + start.

    With 8 bits, weight = step * (value - 128) + start.
    """
    step = _float(blocks[:, :2])
    if name == "Q8_0":
        return blocks[:, 2:] ^ np.uint8(128), step, 0 * step
    if name.endswith("_K"):
        scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
        pairs = blocks[:, -128:].reshape(-1, 4, 1, GROUP)
        values = np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, GROUP)
        if name == "Q5_K":
            groups = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
            fifths = blocks[:, 16:48].reshape(-1, 1, GROUP) >> groups & np.uint8(1)
            values |= fifths * np.uint8(16)
        start = -_float(blocks[:, 2:4]) * minimum.astype(np.float32)
        return values, step * scale.astype(np.float32), start
    # The lower halves of the bytes, then the upper halves.
    values = np.concatenate((blocks[:, -16:] & 15, blocks[:, -16:] >> 4), axis=1)
    if name.startswith("Q5"):
        fifths = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
        values |= fifths * np.uint8(16)
    if name.endswith("_1"):
        return values, step, _float(blocks[:, 2:4])
    return values, step, (-8 if name == "Q4_0" else -16) * step


def _float(data: _Bytes) -> _Floats:
    return data.copy().view(np.float16).astype(np.float32)


def import_gguf(file: Path) -> Any:
    """Return the package; raises `UnsupportedModelError` if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file} is a GGUF file, and the package that reads it is missing: " + install("gguf")
        ) from error
    return gguf
