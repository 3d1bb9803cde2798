"""Generated LoRA adapters in PEFT's format, with a visible effect on answers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headstart.models.decoder import DecoderModel
from headstart.models.lora_files import CONFIG_NAME, WEIGHTS_NAME

_RANK = 4
_SIZE = 0.01  # of the random matrices: enough to change K/V, too little to change answers


def write_adapter(model: DecoderModel, folder: Path, tokens: tuple[int, int], seed: int) -> None:
    """Write an adapter that swaps two tokens in the model's answers.

    It swaps two rows of the output layer, an update of rank 2. It also adds random matrices to
    attention layers.
    """
    head = model.output_layer
    assert head is not None
    weight = model.weight(head)
    assert weight is not None
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for layer, widths in model.linear_widths().items():
        if layer.endswith(("q_proj", "v_proj")):
            down = torch.randn(_RANK, widths.inputs, generator=generator)
            up = torch.randn(widths.outputs, _RANK, generator=generator)
            matrices[layer] = (down * _SIZE, up * _SIZE)
    rows = torch.tensor(tokens)
    swapped = torch.zeros(len(weight), 2)
    swapped[rows] = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    matrices[head] = (weight[rows].float().cpu(), swapped)
    folder.mkdir()
    tensors = {
        f"base_model.model.{layer}.lora_{side}.weight": matrix
        for layer, pair in matrices.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / WEIGHTS_NAME)
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "rank_pattern": {head: 2},
        "alpha_pattern": {head: 2},
        "target_modules": sorted(matrices),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2), encoding="utf-8")
