"""Weights as AWQ, GPTQ and compressed-tensors write them, and a plain product of GPTQ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.weights.layout import QuantizedWeight
from headstart.weights.prequantized import Grouped, read_grouped
from headstart.weights.scheme import Scheme

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

__all__ = [
    "AWQ",
    "BASE",
    "COMPRESSED",
    "GPTQ",
    "Quantize",
    "Tensors",
    "awq",
    "compressed",
    "compressed_config",
    "decompressed",
    "gptq",
    "gptq_weight",
    "pack",
    "read",
    "save",
    "scheme",
    "scheme_of",
]

VOCABULARY = 160
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}

Tensors = dict[str, Tensor]
"""The tensors of a module by their suffix."""
Quantize = Callable[[Tensor], Tensors]
"""Makes the tensors of a module for its weight."""


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack values below 2 ** bits `[rows, columns]` in int32 words along the columns.

    order: the columns of a word, from its lowest bits on.
    """
    fields = 32 // bits
    order = order or tuple(range(fields))
    words = values.long().view(len(values), -1, fields)[..., list(order)]
    packed = sum(words[..., at] << (bits * at) for at in range(fields))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def round_groups(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values `[outputs, inputs]`, steps and zeros of an asymmetric grid.

    Steps and zeros have the shape `[outputs, groups]`.
    """
    groups = weight.view(len(weight), -1, group)
    low, high = (end.unsqueeze(-1) for end in groups.aminmax(dim=-1))
    steps = ((high - low).clamp_min(1e-5) / ((1 << bits) - 1)).half()
    zeros = (-low / steps).round().clamp(0, (1 << bits) - 1)
    values = (groups / steps + zeros).round().clamp(0, (1 << bits) - 1)
    return values.view_as(weight), steps.squeeze(-1), zeros.squeeze(-1)


def awq(weight: Tensor) -> Tensors:
    values, steps, zeros = round_groups(weight, 4, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": pack(values.T, 4, order),
        "qzeros": pack(zeros.T, 4, order),
        "scales": steps.T.contiguous(),
    }


def gptq(
    weight: Tensor, bits: int = 4, group: int = 32, less: int = 1, shuffled: bool = False
) -> Tensors:
    order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
    values, steps, zeros = round_groups(weight[:, order], bits, group)
    back = order.argsort()
    return {
        "qweight": pack(values[:, back], bits).T.contiguous(),
        "qzeros": pack((zeros - less).clamp_min(0).T, bits),
        "scales": steps.T.contiguous(),
        "g_idx": (back // group).int(),
        "bias": torch.zeros(len(weight), dtype=torch.float16),
    }


def gptq_weight(parts: Tensors, bits: int, less: int) -> Tensor:
    """Return the weight of GPTQ's product, computed an element at a time."""
    rows, outputs = parts["qweight"].shape
    fields = 32 // bits
    weight = torch.empty(outputs, rows * fields)
    words, zeros = parts["qweight"].tolist(), parts["qzeros"].tolist()
    for i in range(rows * fields):
        g = int(parts["g_idx"][i])
        for o in range(outputs):
            value = (words[i // fields][o] >> bits * (i % fields)) & ((1 << bits) - 1)
            zero = (zeros[g][o // fields] >> bits * (o % fields)) & ((1 << bits) - 1)
            weight[o, i] = (value - zero - less) * float(parts["scales"][g, o])
    return weight


def scheme_of(**weights: Any) -> Any:
    inputs = weights.pop("inputs", None)
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, **weights}
    return QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)


def compressed(scheme: Any, layout: str, weight: Tensor) -> Tensors:
    """Compress by the library, with steps and zeros of the smallest and largest number."""
    weight_arguments = scheme.weights
    group = weight_arguments.group_size or weight.shape[1]
    groups = weight.view(len(weight), -1, group)
    half = 1 << (weight_arguments.num_bits - 1)
    parts: Tensors = {"weight": weight}
    if weight_arguments.symmetric:
        parts["weight_scale"] = (groups.abs().amax(-1) / (half - 0.5)).bfloat16()
    else:
        low, high = groups.aminmax(dim=-1)
        steps = ((high - low) / (2 * half - 1)).bfloat16()
        parts["weight_scale"] = steps
        parts["weight_zero_point"] = (-half - low / steps).round().clamp(-half, half - 1).char()
    done: Tensors = BaseCompressor.get_value_from_registry(layout).compress(parts, scheme)
    return {name: part.contiguous() for name, part in done.items()}


def decompressed(scheme: Any, layout: str, parts: Tensors) -> Tensor:
    done = BaseCompressor.get_value_from_registry(layout).decompress(dict(parts), scheme)
    weight: Tensor = done["weight"]
    return weight


def save(folder: Path, config: Any, scheme: dict[str, Any], quantize: Quantize) -> Any:
    """Save a model whose linear layers but the head are quantized; return it in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "_proj" in name and name.endswith(".weight"):
            tensors |= {f"{module}.{part}": content for part, content in quantize(tensor).items()}
        elif name not in tensors:
            tensors[name] = tensor.to(torch.bfloat16)
    if hasattr(config, "use_sliding_window"):  # the family has biases
        tensors |= {n: t.bfloat16() for n, t in model.state_dict().items() if n.endswith("bias")}
    content = config.to_dict() | {"quantization_config": scheme, "dtype": "bfloat16"}
    content |= {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def in_groups(group: int = 32, **about: Any) -> dict[str, Any]:
    return {"bits": 4, "group_size": group, **about}


AWQ = in_groups(quant_method="awq", version="gemm", zero_point=True)
GPTQ = in_groups(quant_method="gptq", desc_act=False, sym=False)
COMPRESSED: dict[str, tuple[str, Any]] = {
    "w4 in 32": ("pack-quantized", scheme_of(strategy="group", group_size=32)),
    "w4 in 64, zeros": (
        "pack-quantized",
        scheme_of(strategy="group", group_size=64, symmetric=False),
    ),
    "w4 channel": ("pack-quantized", scheme_of(strategy="channel")),
    "w4 in 16": ("pack-quantized", scheme_of(strategy="group", group_size=16)),
    "w8 in 32": ("pack-quantized", scheme_of(strategy="group", group_size=32, num_bits=8)),
    "w8 channel": ("pack-quantized", scheme_of(strategy="channel", num_bits=8)),
    "w8a8": (
        "int-quantized",
        scheme_of(
            strategy="channel",
            num_bits=8,
            inputs={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        ),
    ),
}


def compressed_config(kind: str) -> dict[str, Any]:
    layout, scheme = COMPRESSED[kind]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }


def read(scheme: Scheme, shape: tuple[int, int], parts: Tensors) -> Grouped:
    [bits], [group] = scheme.bits, scheme.groups
    each = shape[1] if group == -1 else group
    return read_grouped(scheme, QuantizedWeight(shape, bits, each, {}), parts)


def scheme(method: Any, bits: int = 4, group: int = 32, **more: Any) -> Scheme:
    return Scheme(method, frozenset({bits}), frozenset({group}), **more)
