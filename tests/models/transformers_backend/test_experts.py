"""Experts that compute all rows: equal values, and bits that no other row changes."""

import pytest
import torch
from transformers import JetMoeConfig, JetMoeForCausalLM

from headstart.errors import UnsupportedModelError
from headstart.models.transformers_backend.decoder import (
    TransformersDecoder,
    check_rows,
    compute_all_rows,
    forward_rows,
)
from headstart.models.transformers_backend.probe import probe_model
from headstart.models.transformers_backend.recurrent import MixerStates
from tests.tiny_models import TINY, VOCABULARY

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_equal_those_of_transformers(name: str) -> None:
    tokens = torch.randint(0, VOCABULARY, (29,), generator=torch.Generator().manual_seed(2))
    places = torch.arange(29)
    reference, model = TINY[name](), TINY[name]()
    reference.set_experts_implementation("eager")
    assert compute_all_rows(model) is not None
    expected = forward_rows(reference, tokens, places, places)
    actual = forward_rows(model, tokens, places, places)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_every_family_can_be_fixed(name: str, dtype: torch.dtype) -> None:
    model = TINY[name]().to(dtype)
    model.set_attn_implementation("eager")
    before = model.config._experts_implementation
    decoder = TransformersDecoder(model, probe_model(model).layouts)
    decoder.fix_rows()  # raises if a row has other bits
    if name in MIXTURES:
        assert model.config._experts_implementation != before
        decoder.detach()
        assert model.config._experts_implementation == before


def test_a_family_whose_experts_cannot_be_replaced_is_refused() -> None:
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = JetMoeForCausalLM(config).eval()
    assert compute_all_rows(model) is None
    with pytest.raises(UnsupportedModelError, match="deterministic=True is not possible"):
        check_rows(model, MixerStates(model, ()))
