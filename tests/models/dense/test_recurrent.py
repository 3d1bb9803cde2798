"""Families with recurrent layers: states are cut, forked and saved, and no answer changes."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from headstart.errors import UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.gptq import plan_quantization
from headstart.models.loader import load_model
from headstart.models.lora_files import read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from tests.models.paged import Paged
from tests.models.states import StateTests, run_long_prompt
from tests.models.stepper import LENGTH, Part, Stepper, check, expected_logits, random_tokens
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import HYBRIDS, save_tiny, tiny_config, tiny_model


@pytest.fixture(params=HYBRIDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, tmp_path: Path) -> DecoderModel:
    loaded = load_model(save_tiny(name, tmp_path), "float32")
    assert loaded.fallback_reason is None
    return loaded


@pytest.fixture(params=["kernels", "torch"])
def computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.dict(os.environ, HEADSTART_NATIVE="1" if request.param == "kernels" else "0"):
        yield


def test_layers_of_each_kind_are_counted(name: str, model: DecoderModel) -> None:
    kinds = tiny_config(name).layer_types
    attention = [kind for kind in kinds if kind == "full_attention"]
    assert len(model.layouts) == len(attention)
    assert len(model.state_layouts) == len(kinds) - len(attention)


@pytest.mark.usefixtures("computed_by")
class TestStates(StateTests):
    """Tests of headstart's modules, with kernels and without."""


@pytest.mark.usefixtures("computed_by")
def test_a_long_prompt(name: str, model: DecoderModel) -> None:
    model.max_model_len = 4096
    logits = run_long_prompt(model, 3000, (0, 1024, 1025, 2091, 3000))
    expected = expected_logits(name, random_tokens(3000))
    size = float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=2e-4 * size)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_stay_near(weights: str, name: str, tmp_path: Path) -> None:
    model = load_model(save_tiny(name, tmp_path), "float32", weights=weights)
    tokens = random_tokens(LENGTH)
    expected = expected_logits(name, tokens)
    actual = Stepper(model).step({0: Part(tokens, 0, -1, 0)})
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < (0.12 if weights == "int8" else 0.4)


def test_hooks_see_all_rows_of_a_mixer(name: str, model: DecoderModel) -> None:
    """Adapters change a mixer's linear layers by hooks."""
    mixers = [part for part in model.linear_widths() if "in_proj" in part]
    assert mixers
    seen: list[int] = []
    model.layer(mixers[-1]).register_forward_hook(lambda _, rows, out: seen.append(len(rows[0])))
    model.calls_each_layer = True
    Stepper(model).step({0: Part(random_tokens(LENGTH), 0, -1, 0)}, last=True)
    assert seen == [LENGTH]


def test_an_adapter_on_all_linear_layers(name: str, tmp_path: Path) -> None:
    base = save_tiny(name, tmp_path / "base")
    path = make_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    paged = Paged(load_model(base, "float32"))
    weights = read_weights(path, paged.decoder, 64)
    assert any("in_proj" in layer for layer in weights.pairs)
    tokens = random_tokens(LENGTH).tolist()
    sequence, layers = paged.add(tokens), LoraLayers(paged.decoder)
    for count in (LENGTH - 5, 5):
        layers.begin_step([AdapterRun(ResidentAdapter(weights), count, count)])
        paged.step([(sequence, count)])
        layers.end_step()
    check(torch.stack(sequence.logits), Oracle(base, path).logits(tokens))


def save_with_vision(folder: Path) -> None:
    """Write Qwen3.5 with a vision part, and with the decoder of the tiny model."""
    text = tiny_config("qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"out_hidden_size": 48})
    whole = Qwen3_5ForConditionalGeneration(config)
    part = tiny_model(text)
    whole.model.language_model.load_state_dict(part.model.state_dict())
    whole.lm_head.load_state_dict(part.lm_head.state_dict())
    whole.save_pretrained(folder)


def test_the_decoder_of_a_model_with_vision(tmp_path: Path) -> None:
    """Qwen3.5's checkpoints have a vision part and further tensors, which are not read."""
    save_with_vision(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any("visual" in tensor for tensor in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    model, tokens = load_model(tmp_path, "float32"), random_tokens(LENGTH)
    assert model.fallback_reason is None and not model.takes_images
    actual = Stepper(model).step({0: Part(tokens, 0, -1, 0)})
    check(actual, expected_logits("qwen3_5_text", tokens))
    assert "model.language_model.layers.0.linear_attn.out_proj" in model.linear_widths()


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_adapter_of_the_decoder_or_of_the_whole_model(
    is_whole: bool, body: str, tmp_path: Path
) -> None:
    """Their names differ, in the file and where the configuration names layers in full."""
    text = save_tiny("qwen3_5_text", tmp_path / "text")
    path = make_adapter(
        text, tmp_path / "adapter", target_modules=r"model\.layers\.[01]\..*\.(out|o|up)_proj"
    )
    model = load_model(text, "float32")
    expected = read_weights(path, model, 64)
    if is_whole:
        save_with_vision(tmp_path / "whole")
        model = load_model(tmp_path / "whole", "float32")
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    renamed = {
        name.replace("model.model.layers", f"model.{body}layers"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    pattern = body.replace(".", r"\\.")
    config.write_text(config.read_text().replace(r"model\\.layers", rf"{pattern}layers"))
    weights = read_weights(path, model, 64)
    names = {name.replace("language_model.", "") for name in weights.pairs}
    assert names == expected.pairs.keys() and weights.pairs.keys() <= model.linear_widths().keys()
    assert (weights.digest == expected.digest) is not is_whole
    assert len(names) == 4


def test_gptq_refuses_recurrent_layers(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "float")
    with pytest.raises(UnsupportedModelError, match="it has recurrent layers; allowed: attention"):
        plan_quantization(tmp_path / "float", tmp_path / "small")
