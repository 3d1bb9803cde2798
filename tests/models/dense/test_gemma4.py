"""Gemma 4 in headstart's modules: K and V of other layers, and inputs of single layers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    PreTrainedConfig,
)

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.gptq import plan_quantization
from headstart.models.loader import load_model
from headstart.models.lora_files import read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from tests.models.paged import BLOCK, Paged
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import VOCABULARY, save_tiny, tiny_config, tiny_model

LENGTH = 26
FAMILIES = pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified_text"])


def random_tokens(count: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def expected_logits(reference: Any, tokens: list[int]) -> Tensor:
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def check(rows: list[Tensor], expected: Tensor) -> None:
    size = float(expected.abs().max())
    torch.testing.assert_close(torch.stack(rows), expected, rtol=0.0, atol=2e-5 * size)


def load(name: str, folder: Path) -> DecoderModel:
    model = load_model(save_tiny(name, folder), "float32")
    assert model.fallback_reason is None
    return model


def test_layers_that_read_the_k_and_v_of_others_have_no_memory(tmp_path: Path) -> None:
    layouts = load("gemma4_text", tmp_path).layouts
    local, full = (2, 16, 16, 6), (3, 24, 24, None)
    facts = [(own.kv_heads, own.key_dim, own.value_dim, own.window) for own in layouts]
    assert facts == [local, full, local]  # of six layers


@FAMILIES
def test_prompts_cut_at_every_position(name: str, tmp_path: Path) -> None:
    model, tokens = load(name, tmp_path), random_tokens(LENGTH)
    expected = expected_logits(tiny_model(tiny_config(name)), tokens)
    for cut in range(1, LENGTH):
        paged = Paged(model)
        sequence = paged.add(tokens)
        paged.step([(sequence, cut)])
        paged.step([(sequence, LENGTH - cut)])
        check(sequence.logits, expected)


@FAMILIES
@pytest.mark.parametrize("gathers", [False, True])
def test_batches_of_prompts_and_decodes(name: str, gathers: bool, tmp_path: Path) -> None:
    paged = Paged(load(name, tmp_path))
    prompts = [random_tokens(count, seed) for seed, count in enumerate((19, 9, 30))]
    sequences = [paged.add(tokens) for tokens in prompts]
    for counts in ((7, 1, 12), (1, 1, 1), (10, 6, 16), (1, 1, 1)):
        paged.step(list(zip(sequences, counts, strict=True)), contiguous_gather=gathers)
    for sequence, tokens in zip(sequences, prompts, strict=True):
        check(sequence.logits, expected_logits(tiny_model(tiny_config(name)), tokens))


@cache
def long_config() -> PreTrainedConfig:
    config = tiny_config("gemma4_text")
    config.max_position_embeddings = 4096
    return config


@cache
def expected_of_a_long_prompt() -> Tensor:
    return expected_logits(tiny_model(long_config()), random_tokens(2000))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_long_prompt_of_which_only_the_last_row_is_computed(
    kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Far beyond windows; after the layers with memory only one row remains."""
    tiny_model(long_config()).save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path, "float32"), random_tokens(2000)
    paged = Paged(model, 1 + len(tokens) // BLOCK, kv_dtype=kv_dtype)
    sequence = paged.add(tokens)
    rows = [paged.last(sequence, count) for count in (1000, 1, 298, 700, 1)]
    expected = expected_of_a_long_prompt()
    size = float(expected.abs().max())
    tolerance = 2e-5 if kv_dtype == torch.float32 else 0.05
    wanted = expected[torch.tensor([999, 1000, 1298, 1998, 1999])]
    torch.testing.assert_close(torch.stack(rows), wanted, rtol=0.0, atol=tolerance * size)


def nested_models() -> dict[str, Any]:
    """Return models with vision and audio parts, whose decoder is the tiny one."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2}
    gemma3 = Gemma3Config(
        text_config=tiny_config("gemma3"), vision_config=vision, mm_tokens_per_image=4
    )
    gemma4 = Gemma4Config(
        text_config=tiny_config("gemma4_text"),
        vision_config=vision | {"num_key_value_heads": 2, "head_dim": 8},
        audio_config=None,
    )
    return {
        "gemma3": Gemma3ForConditionalGeneration(gemma3),
        "gemma4": Gemma4ForConditionalGeneration(gemma4),
    }


@pytest.mark.parametrize(("name", "text"), [("gemma3", "gemma3"), ("gemma4", "gemma4_text")])
def test_the_decoder_of_a_model_with_a_vision_part(name: str, text: str, tmp_path: Path) -> None:
    reference = nested_models()[name].eval()
    reference.model.language_model.load_state_dict(tiny_model(tiny_config(text)).model.state_dict())
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None
    tokens = random_tokens(LENGTH)
    paged = Paged(model)
    sequence = paged.add(tokens)
    paged.step([(sequence, LENGTH)])
    check(sequence.logits, expected_logits(tiny_model(tiny_config(text)), tokens))
    assert "model.language_model.layers.0.self_attn.q_proj" in model.linear_widths()


def test_weights_of_layers_that_read_the_k_and_v_of_others_are_ignored(tmp_path: Path) -> None:
    """The checkpoints on the hub have them, from training."""
    folder = save_tiny("gemma4_text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    added = {
        name.replace("layers.0", "layers.5"): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.0.self_attn." in name and "q_" not in name and "o_" not in name
    }
    assert len(added) == 3
    save_file(tensors | added, folder / "model.safetensors", {"format": "pt"})
    assert load_model(folder, "float32").fallback_reason is None


@pytest.mark.parametrize(("kernels", "tolerance"), [("0", 0.01), ("1", 0.15)])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights(
    weights: str, kernels: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and both embeddings are rounded, and nothing else; with kernels, rows are too."""
    monkeypatch.setenv("HEADSTART_NATIVE", kernels)
    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    wide |= {"global_head_dim": 64, "hidden_size_per_layer_input": 32}
    content = tiny_config("gemma4_text").to_dict()
    content.pop("per_layer_config")
    config = Gemma4TextConfig(**content | wide)
    tiny_model(config).save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path, "float32", weights=weights), random_tokens(LENGTH)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 2:
                unpacked = model.weight(name.removesuffix(".weight"))
                assert unpacked is not None
                assert not torch.equal(parameter, unpacked.float()), name
                parameter.copy_(unpacked)
    paged = Paged(model)
    sequence = paged.add(tokens)
    paged.step([(sequence, LENGTH)])
    actual, expected = torch.stack(sequence.logits), expected_logits(reference, tokens)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < tolerance


def test_gptq_refuses_norms_of_values_and_vision(tmp_path: Path) -> None:
    save_tiny("gemma4_text", tmp_path / "float")
    nested_models()["gemma3"].save_pretrained(tmp_path / "vision")
    for name, reason in (("float", "a norm of values"), ("vision", "parts other than a decoder")):
        with pytest.raises(UnsupportedModelError, match=f"it has {reason}"):
            plan_quantization(tmp_path / name, tmp_path / "small")


@FAMILIES
def test_an_adapter_on_all_linear_layers(name: str, tmp_path: Path) -> None:
    base = save_tiny(name, tmp_path / "base")
    path = make_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    paged, tokens = Paged(load_model(base, "float32")), random_tokens(LENGTH)
    weights = read_weights(path, paged.decoder, 64)
    sequence, layers = paged.add(tokens), LoraLayers(paged.decoder)
    for count in (LENGTH - 5, 5):
        layers.begin_step([AdapterRun(ResidentAdapter(weights), count, count)])
        paged.step([(sequence, count)])
        layers.end_step()
    check(sequence.logits, Oracle(base, path).logits(tokens))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_global_key_value_heads", -1), ("global_head_dim", 0), ("num_kv_shared_layers", -2)],
        ("hidden_size_per_layer_input", -1),
    ],
)
def test_impossible_sizes_are_refused(name: str, value: int, tmp_path: Path) -> None:
    path = save_tiny("gemma4_text", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(DamagedModelError, match=f"{name} is {value}; allowed: an integer from"):
        load_model(tmp_path)
