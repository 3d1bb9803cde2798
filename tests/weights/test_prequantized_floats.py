"""Weights that stay floats in a quantized checkpoint, or when layers are quantized at load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from headstart.models.loader import load_model
from headstart.native import avx2_library, library
from headstart.weights.bf16 import Bf16Weight, PackedWeight
from tests.weights.stored import matrix_of
from tests.weights.written import AWQ, BASE, awq, save

HEAD, TABLE = "lm_head", "model.embed_tokens"
HALF = (Bf16Weight, Bf16Weight) if avx2_library() is not None else (nn.Linear, nn.Embedding)
PACKED = (PackedWeight, PackedWeight) if library() is not None else (nn.Linear, nn.Embedding)


def keep_floats(folder: Path, dtype: torch.dtype) -> None:
    """Write head and embedding in a dtype."""
    held = load_file(folder / "model.safetensors")
    held |= {name: one.to(dtype) for name, one in held.items() if name.startswith((HEAD, TABLE))}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("held", "dtype", "expected"),
    [
        (torch.bfloat16, "float32", HALF),
        (torch.float16, "float32", (nn.Linear, nn.Embedding)),  # bfloat16 does not hold them
        (torch.float16, "bfloat16", PACKED),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_floats_are_read_as_in_a_checkpoint_of_floats(
    weights: str,
    tied: bool,
    held: torch.dtype,
    dtype: str,
    expected: tuple[type, type],
    tmp_path: Path,
) -> None:
    """Regression: head and embedding were copied to float32, or left to torch.

    In bfloat16 under float32 they took twice the memory, and the head twice the time for a token.
    """
    original = save(tmp_path, LlamaConfig(**BASE, tie_word_embeddings=tied), AWQ, awq)
    keep_floats(tmp_path, held)
    model = load_model(tmp_path, dtype, weights=weights)
    for name, kind in zip((HEAD, TABLE), expected, strict=True):
        if weights == "auto" or (name == TABLE and not tied):
            assert isinstance(matrix_of(model.layer(name)), kind)
            weight = model.weight(name)
            assert weight is not None
            wanted = original.get_submodule(name).weight.bfloat16().to(held)
            assert torch.equal(weight.float(), wanted.to(getattr(torch, dtype)).float())
