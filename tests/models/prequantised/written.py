"""Weights as AWQ and GPTQ write them, and GPTQ's product in its own words."""

import torch
from torch import Tensor

__all__ = ["Tensors", "awq", "gptq", "gptq_weight", "pack"]

Tensors = dict[str, Tensor]
"""The tensors of a module by their suffix."""


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Values below 2 ** bits `[rows, columns]` in int32 words along the columns.

    order: the columns of a word, from its lowest bits on.
    """
    fields = 32 // bits
    order = order or tuple(range(fields))
    words = values.long().view(len(values), -1, fields)[..., list(order)]
    packed = sum(words[..., at] << (bits * at) for at in range(fields))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def round_groups(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[outputs, inputs]`, steps and zeros `[outputs, groups]` of an asymmetric grid."""
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
    """What GPTQ's own product multiplies by, an element at a time."""
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
