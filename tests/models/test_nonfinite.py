"""A token whose embedding is not finite: only its row is lost, and it is reported."""

from pathlib import Path

import pytest
import torch

from headstart.models.dense.loader import load_dense
from headstart.models.transformers_backend.linears import pack_linears
from tests.models.paged import Paged
from tests.tiny_models import TINY

BAD = 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [True, False])
def test_only_the_row_itself_is_lost(dtype: torch.dtype, own: bool, tmp_path: Path) -> None:
    """With layers in one compiled call, layer by layer, and in torch operations."""
    model = TINY["llama"]().to(dtype)
    model.get_input_embeddings().weight.data[BAD, 3] = torch.inf
    if own:
        model.save_pretrained(tmp_path)
        engine = Paged(load_dense(tmp_path, dtype, torch.device("cpu")))
    else:
        pack_linears(model)
        engine = Paged(model)
    prompt, other = [3, 4, 5, 6, 9, 10], [11, 12, 13]
    clean, neighbor = engine.add(prompt), engine.add(other)
    engine.step([(clean, 6), (neighbor, 3)])
    assert engine.backend.nonfinite_rows() == []
    bad, same = engine.add([*prompt[:4], BAD, 10]), engine.add(other)
    engine.step([(bad, 6), (same, 3)])
    assert engine.backend.nonfinite_rows() == [4, 5]
    for actual, expected in zip(
        bad.logits[:4] + same.logits, clean.logits[:4] + neighbor.logits, strict=True
    ):
        assert torch.equal(actual, expected)
    assert not any(bool(row.isfinite().all()) for row in bad.logits[4:])
