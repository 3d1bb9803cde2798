"""A token whose embedding is not finite: its row is lost, told of, and nobody else's."""

import pytest
import torch

from headstart.models.zoo.simplify import simplify
from headstart.models.zoo.swap import accelerate
from tests.models.paged import Paged
from tests.tiny_models import TINY

BAD = 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plain", [True, False])
def test_only_the_row_itself_is_lost(dtype: torch.dtype, plain: bool) -> None:
    """With fused layers in one compiled call, layer by layer, and in torch operations."""
    model = TINY["llama"]().to(dtype)
    model.get_input_embeddings().weight.data[BAD, 3] = torch.inf
    engine = Paged(model, fusion=accelerate(model))
    if plain:
        engine.decoder.detach()
        simplify(engine.decoder)
        engine.decoder.attach(engine.backend)
    prompt, other = [3, 4, 5, 6, 9, 10], [11, 12, 13]
    clean, neighbour = engine.add(prompt), engine.add(other)
    engine.step([(clean, 6), (neighbour, 3)])
    assert engine.backend.nonfinite_rows() == []
    bad, same = engine.add([*prompt[:4], BAD, 10]), engine.add(other)
    engine.step([(bad, 6), (same, 3)])
    assert engine.backend.nonfinite_rows() == [4, 5]
    for found, expected in zip(
        bad.logits[:4] + same.logits, clean.logits[:4] + neighbour.logits, strict=True
    ):
        assert torch.equal(found, expected)
    assert not any(bool(row.isfinite().all()) for row in bad.logits[4:])
