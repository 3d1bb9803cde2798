"""Packed weights in every architecture give equal answers, and none where they are wrong."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from headstart.models.loader import load_model
from headstart.models.transformers_backend.linears import pack_linears
from headstart.models.transformers_backend.loader import load_transformers
from headstart.native import library
from headstart.weights import products
from headstart.weights.bf16 import PackedWeight
from headstart.weights.format import Embedding, Linear
from tests.models.paged import Paged
from tests.tiny_models import TINY, VOCABULARY, tiny_config

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

LINEAR = {Linear, Embedding, nn.Linear}


def tiny(name: str) -> PreTrainedModel:
    return TINY[name]().to(torch.bfloat16)


def kinds(model: PreTrainedModel) -> Counter[type]:
    return Counter(type(module) for module in model.modules() if type(module) in LINEAR)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([prompt(30)]), use_cache=False).logits[0].float()
    return out


def apart(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_packed(name: str) -> None:
    """Through attention of transformers, and through that of headstart."""
    expected = logits(tiny(name))
    model = tiny(name)
    pack_linears(model)
    assert kinds(model)[Linear] >= 1
    noise = apart(expected, logits(TINY[name]()))
    assert apart(logits(model), expected) <= 2 * noise
    paged = Paged(model)
    sequence = paged.add(prompt(30))
    for count in (13, 1, 16):
        paged.step([(sequence, count)])
    assert apart(torch.stack(sequence.logits), expected) <= 2 * noise


class ReadsItsHead(LlamaForCausalLM):
    """A model whose code takes a weight without calling the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.lm_head.weight.dtype.itemsize
        return output


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_reads_a_weight_itself_is_restored(tied: bool) -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    model = ReadsItsHead(config).to(torch.bfloat16).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    pack_linears(model)
    assert kinds(model) == {nn.Linear: 22}
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert torch.equal(logits(model), expected)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PackedWeight.multiply
    monkeypatch.setattr(
        PackedWeight,
        "multiply",
        lambda weight, x: multiply(weight, x) * (2 if weight.outputs == 80 else 1),
    )
    model = tiny("llama")
    pack_linears(model)
    assert kinds(model)[nn.Linear] == 6  # gate and up of three layers
    assert kinds(model)[Linear] == 16


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are listed by Linux alone")
def test_a_loaded_model_releases_its_file(tmp_path: Path) -> None:
    """A norm that is a view of the mapped file would hold all weights in memory a second time."""
    tiny("qwen2").save_pretrained(tmp_path)
    model = load_transformers(tmp_path, torch.bfloat16, torch.device("cpu")).module
    assert kinds(model)[Linear] == 22
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    own = load_model(tmp_path, "bfloat16")
    assert own.fallback_reason is None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_nothing_is_packed_where_kernels_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float16):
        model = TINY["llama"]().to(dtype)
        pack_linears(model)
        assert kinds(model) == {nn.Linear: 22}
    monkeypatch.setattr(products, "library", lambda: None)
    model = tiny("llama")
    pack_linears(model)
    assert kinds(model) == {nn.Linear: 22}
