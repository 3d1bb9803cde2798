"""Packed and fused parts in every architecture: the same answers, and no part where it is wrong."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headstart.models.fused import FusedLayer, FusedMLP, FusedNorm
from headstart.models.loader import load_model
from headstart.models.lora.files import LoraPair, LoraWeights
from headstart.models.lora.modules import AdapterRun, LoraLayers
from headstart.models.lora.stack import ResidentAdapter
from headstart.models.packed import PackedEmbedding, PackedLinear, PackedWeight
from headstart.models.zoo import swap
from headstart.models.zoo.loader import load_transformers
from headstart.models.zoo.swap import accelerate
from headstart.native import library
from tests.models.paged import Paged
from tests.tiny_models import TINY, VOCABULARY, tiny_config

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

LINEAR = {PackedLinear, PackedEmbedding, nn.Linear}
FUSED = {FusedLayer, FusedMLP, FusedNorm}

# Layers, MLPs and norms of each tiny model that may be fused; the others are none of Llama's.
EXPECTED: dict[str, tuple[int, int, int]] = {
    "llama": (3, 3, 7),
    "mistral": (3, 3, 7),
    "qwen2": (3, 3, 7),
    "qwen3": (3, 3, 13),
    "qwen3_moe": (0, 0, 13),
    "gemma2": (0, 0, 0),  # its norms add 1 to their weights, its activation is GELU
    "gemma3": (0, 0, 0),
    "phi3": (0, 0, 7),  # gate and up are one child
    "mixtral": (0, 0, 7),
    "gpt_oss": (0, 0, 7),
    "olmo2": (0, 3, 13),  # its norms stand behind attention and MLP
    "granite": (0, 3, 7),  # it scales what it adds to the residual
    "cohere2": (0, 3, 0),  # its norms take the mean off
    "starcoder2": (0, 0, 0),
    "gpt_neox": (0, 0, 0),
    "opt": (0, 0, 0),
    "gpt2": (0, 0, 0),
    "smollm3": (2, 3, 7),  # one of three layers knows no positions
    "glm4": (0, 0, 13),
    "deepseek_v3": (0, 3, 13),  # two of its MLPs are the experts that all share
}


def tiny(name: str) -> PreTrainedModel:
    return TINY[name]().to(torch.bfloat16)


def kinds(model: PreTrainedModel) -> Counter[type]:
    modules = list(model.modules())
    found = Counter(type(module) for module in modules if type(module) in LINEAR)
    return found + Counter(
        type(module.forward) for module in modules if type(module.forward) in FUSED
    )


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([prompt(30)]), use_cache=False).logits[0].float()
    return out


def apart(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_packed_and_fused(name: str) -> None:
    """Through transformers' own attention, through ours with fused layers, and with fusion off."""
    expected = logits(tiny(name))
    model = tiny(name)
    fusion = accelerate(model)
    found = kinds(model)
    assert tuple(found[kind] for kind in (FusedLayer, FusedMLP, FusedNorm)) == EXPECTED[name]
    assert found[PackedLinear] >= 1
    noise = apart(expected, logits(TINY[name]()))
    assert apart(logits(model), expected) <= 2 * noise
    paged = Paged(model, fusion=fusion)
    for enabled in (True, False):
        fusion.enabled = enabled
        sequence = paged.add(prompt(30))
        for count in (13, 1, 16):
            paged.step([(sequence, count)])
        assert apart(torch.stack(sequence.logits), expected) <= 2 * noise


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_a_fused_step_is_bitwise_the_same_in_any_company(name: str) -> None:
    model = tiny(name)
    paged = Paged(model, fusion=accelerate(model))
    alone, first = paged.add(prompt(12)), paged.add(prompt(12))
    other = paged.add(prompt(40)[20:])
    for count in (8, 4):
        paged.step([(alone, count)], contiguous_gather=True)
        torch.set_num_threads(2)
        paged.step([(other, 5), (first, count)], contiguous_gather=True)
        torch.set_num_threads(1)
    assert torch.equal(torch.stack(alone.logits), torch.stack(first.logits))


def test_fused_layers_are_used_in_steps_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2")
    fusion = accelerate(model)
    paged = Paged(model, fusion=fusion)
    calls: Counter[str] = Counter()
    multiply = PackedWeight.multiply

    def spy(weight: PackedWeight, x: Tensor) -> Tensor:
        calls["child"] += 1
        return multiply(weight, x)

    monkeypatch.setattr(PackedWeight, "multiply", spy)
    sequence = paged.add(prompt(10))
    paged.step([(sequence, 5)])
    assert calls["child"] == 1  # the LM head
    fusion.enabled = False
    paged.step([(sequence, 5)])
    assert calls["child"] == 2 + 3 * 7


def test_adapters_reach_the_layers_inside_fused_ones() -> None:
    """A fused part calls no child, so a step with adapters has fusion off, and only such a step."""
    model = tiny("llama")
    paged = Paged(model, fusion=accelerate(model))
    name = "model.layers.1.self_attn.q_proj"
    assert paged.decoder.linear_widths()[name] == (48, 48)
    down = torch.full((2, 48), 0.5, dtype=torch.bfloat16)
    pair = LoraPair(down, down.t().contiguous())
    adapter = ResidentAdapter(LoraWeights("a", {name: pair}))
    layers = LoraLayers(paged.decoder)
    found = []
    for chosen in (None, adapter, None):
        sequence = paged.add(prompt(10))
        layers.begin_step([AdapterRun(chosen, 10, 10)])
        assert paged.decoder.fusion.enabled is (chosen is None)
        paged.step([(sequence, 10)])
        layers.end_step()
        found.append(torch.stack(sequence.logits))
    plain, adapted, again = found
    assert apart(adapted, plain) > 0.1
    assert torch.equal(again, plain)


class ReadsItsHead(LlamaForCausalLM):
    """A model whose own code takes a weight without calling the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.lm_head.weight.dtype.itemsize
        return output


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_reads_a_weight_itself_gets_all_back(tied: bool) -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    model = ReadsItsHead(config).to(torch.bfloat16).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    accelerate(model)
    assert kinds(model) == {nn.Linear: 22}
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert torch.equal(logits(model), expected)


def doubled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 2


@pytest.mark.parametrize(
    ("child", "lost"),
    [
        ("model.layers.1.mlp", (1, 1, 0)),
        ("model.layers.1.self_attn.o_proj", (1, 0, 0)),
        ("model.layers.1.post_attention_layernorm", (1, 0, 1)),
        ("model.norm", (0, 0, 1)),
    ],
)
def test_a_part_that_computes_otherwise_is_left_alone(
    child: str, lost: tuple[int, int, int]
) -> None:
    """Names and children say Llama, the numbers do not."""
    model = tiny("llama")
    module = model.get_submodule(child)
    if isinstance(module, nn.Linear):
        module = model.get_submodule("model.layers.1.self_attn")
        attend = module.forward
        module.forward = lambda **kwargs: (attend(**kwargs)[0] * 2, None)
    else:
        module.forward = doubled(module.forward)
    expected = logits(model)
    accelerate(model)
    found = kinds(model)
    left = tuple(
        had - found[kind]
        for had, kind in zip(EXPECTED["llama"], (FusedLayer, FusedMLP, FusedNorm), strict=True)
    )
    assert left == lost
    assert apart(logits(model), expected) < 0.02


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PackedWeight.multiply
    monkeypatch.setattr(
        PackedWeight,
        "multiply",
        lambda weight, x: multiply(weight, x) * (2 if weight.outputs == 80 else 1),
    )
    model = tiny("llama")
    accelerate(model)
    assert kinds(model)[nn.Linear] == 6  # gate and up of three layers
    assert kinds(model)[PackedLinear] == 16


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are listed by Linux alone")
def test_a_loaded_model_lets_its_file_go(tmp_path: Path) -> None:
    """A norm that is a view of the mapped file would keep all weights in memory a second time."""
    tiny("qwen2").save_pretrained(tmp_path)
    model = load_transformers(tmp_path, torch.bfloat16, torch.device("cpu")).module
    assert kinds(model)[FusedLayer] == 3
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    own = load_model(tmp_path, "bfloat16")
    assert own.fallback_reason is None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_nothing_is_swapped_where_kernels_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float16):
        model = TINY["llama"]().to(dtype)
        accelerate(model)
        assert kinds(model) == {nn.Linear: 22}
    monkeypatch.setattr(swap, "library", lambda: None)
    model = tiny("llama")
    accelerate(model)
    assert kinds(model) == {nn.Linear: 22}


def test_a_norm_of_rows_in_another_dtype_is_the_modules_own() -> None:
    norm = LlamaRMSNorm(64).to(torch.bfloat16)
    rows = torch.randn(3, 64)
    assert torch.equal(FusedNorm(norm)(rows), norm(rows))
