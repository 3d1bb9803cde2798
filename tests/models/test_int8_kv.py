"""K and V in 8 bits for every architecture: transformers' layers over rounded rows, in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.attention.register import LayerCall, read_options, register, unregister
from tests.attention.rows import reference
from tests.models.paged import Paged
from tests.models.test_oracle import PIECES, prompts
from tests.tiny_models import TINY


def rounded(rows: Tensor) -> Tensor:
    """Round `[tokens, heads, width]` to steps of a head's largest magnitude over 127."""
    exact = rows.double().numpy()
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert (step > 0).all()
    return torch.from_numpy(np.rint(exact / step) * step)


def attend_to_rounded(call: LayerCall) -> Tensor:
    query, key, value = (rows[0].transpose(0, 1) for rows in (call.query, call.key, call.value))
    out = reference(query, rounded(key), rounded(value), read_options(call))
    return out.unsqueeze(0).to(query.dtype)


@pytest.fixture
def attention() -> Iterator[str]:
    name = register(attend_to_rounded)
    yield name
    unregister(name)


def logits(model: PreTrainedModel, attention: str, prompt: list[int]) -> Tensor:
    model.set_attn_implementation(attention)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_rounded_rows(name: str, attention: str) -> None:
    """A number halfway between two steps may be rounded to the other one, which is rare."""
    model, paged = TINY[name](), Paged(TINY[name](), kv_dtype=torch.int8)
    sequences = [paged.add(prompt) for prompt in prompts()]
    for counts in PIECES:
        paged.step([(s, n) for s, n in zip(sequences, counts, strict=True) if n])
    largest = []
    for sequence in sequences:
        ours = torch.stack(sequence.logits)
        expected = logits(model, attention, sequence.token_ids)
        plain = logits(model, "eager", sequence.token_ids)
        off = (ours - expected).abs().max() / plain.abs().max()
        cost = (ours - plain).abs().max() / plain.abs().max()
        print(f"{name}: off by {off:.1e}, where 8 bits cost {cost:.1e}")
        assert cost > 1e-3, "rounding changes nothing: the test proves nothing"
        assert off < cost / 5
        largest.append(float(off))
    assert min(largest) < 1e-5
