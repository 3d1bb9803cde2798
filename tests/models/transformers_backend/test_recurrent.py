"""Recurrent layers in transformers' modules: states are cut, forked and saved; no answer changes.

The oracle is transformers' pass over the whole prompt, without a cache.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from headstart.errors import UnsupportedAdapterError, UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.loader import load_model
from headstart.models.lora_files import read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.probe import check_config, probe_model
from tests.models.paged import Paged
from tests.models.states import StateTests, run_long_prompt
from tests.models.stepper import BLOCK, LENGTH, Part, Stepper, check, expected_logits, random_tokens
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import EACH_MIXER, RECURRENT, save_tiny, tiny_config, tiny_model


@cache
def load(name: str, dtype: torch.dtype = torch.float32) -> TransformersDecoder:
    config = tiny_config(name)
    check_config(config)
    model = tiny_model(config).to(dtype)
    layers = probe_model(model)
    return TransformersDecoder(model, layers.layouts, mixers=layers.mixers)


@pytest.fixture(params=RECURRENT)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> DecoderModel:
    return load(name)


def test_layers_of_each_kind_are_detected(name: str, model: DecoderModel) -> None:
    kinds = tiny_config(name).layer_types
    attention = [kind for kind in kinds if kind in ("full_attention", "hybrid")]
    assert len(model.layouts) == len(attention)
    recurrent = [kind for kind in kinds if kind in ("linear_attention", "conv", "hybrid")]
    assert len(model.state_layouts) == len(recurrent)


class TestStates(StateTests):
    """Tests of transformers' modules."""


def test_a_prompt_of_several_chunks(name: str, model: DecoderModel) -> None:
    """Longer than the chunks in which modules compute a recurrence."""
    logits = run_long_prompt(model, 200, (0, 130, 131, 200))
    reference = expected_logits(name, random_tokens(200))
    size = float(reference.abs().max())
    torch.testing.assert_close(logits, reference, rtol=0.0, atol=1e-4 * size)


@pytest.mark.parametrize("name", EACH_MIXER)
def test_half_precision_stays_near_full(name: str) -> None:
    tokens, stepper = random_tokens(LENGTH), Stepper(load(name, torch.bfloat16))
    logits = [
        stepper.step({0: Part(tokens[start:end], start, 2 if start else -1, 2)})
        for start, end in pairwise((0, 9, 10, LENGTH))
    ]
    expected = expected_logits(name, tokens)
    error = (torch.cat(logits) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 20 * torch.finfo(torch.bfloat16).eps


def test_whole_blocks_have_the_same_bits_from_any_state(name: str) -> None:
    """In deterministic mode a pass is one block, padded after the known tokens."""
    model = load(name)
    model.fix_rows()
    tokens = random_tokens(3 * BLOCK)

    def run(between: int, padding: int) -> Tensor:
        stepper = Stepper(model, sequences=2, length=3 * BLOCK)
        rows = []
        for number in range(3):
            start = number * BLOCK
            part = tokens[start : start + BLOCK].clone()
            if number == 2 and padding:
                part[-padding:] = 0
            source, target = (number % 2 + 2 if number else -1), (number + 1) % 2 + 2
            rows.append(stepper.step({0: Part(part, start, source, target)}))
            for seed in range(between):
                stepper.step({1: Part(random_tokens(BLOCK, seed), 0, -1, 0)})
        return torch.cat(rows)

    logits = run(0, 0)
    assert torch.equal(run(2, 0), logits)
    assert torch.equal(run(1, 5)[:-5], logits[:-5])
    check(logits, expected_logits(name, random_tokens(3 * BLOCK)))
    model.detach()


def test_detaching_restores_the_modules_of_transformers(name: str) -> None:
    model = load(name)
    Stepper(model).step({0: Part(random_tokens(3), 0, -1, 0)})
    model.detach()
    with torch.no_grad():
        logits = model.module(random_tokens(LENGTH).unsqueeze(0), use_cache=False).logits[0]
    check(logits, expected_logits(name, random_tokens(LENGTH)))


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "lfm2_moe"])
def test_adapters_of_attention_apply_and_of_mixers_do_not(family: str, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    paged = Paged(load_model(base, "float32"))
    path = make_adapter(base, tmp_path / "mixers", target_modules="all-linear")
    with pytest.raises(UnsupportedAdapterError, match=r"allowed: adapters of other layers"):
        read_weights(path, paged.decoder, 64)
    path = make_adapter(base, tmp_path / "attention", target_modules=["q_proj", "v_proj"])
    weights = read_weights(path, paged.decoder, 64)
    tokens = random_tokens(LENGTH).tolist()
    sequence, layers = paged.add(tokens), LoraLayers(paged.decoder)
    for count in (LENGTH - 5, 5):
        layers.begin_step([AdapterRun(ResidentAdapter(weights), count, count)])
        paged.step([(sequence, count)])
        layers.end_step()
    check(torch.stack(sequence.logits), Oracle(base, path).logits(tokens))


@pytest.mark.parametrize(
    ("name", "weights"),
    [*((name, "auto") for name in RECURRENT), *((name, "int8") for name in EACH_MIXER)],
)
def test_checkpoints_are_loaded(name: str, weights: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    loaded = load_model(folder, "float32", weights=weights)
    assert isinstance(loaded, TransformersDecoder)
    tokens = random_tokens(LENGTH)
    logits, expected = (
        Stepper(loaded).step({0: Part(tokens, 0, -1, 0)}),
        expected_logits(name, tokens),
    )
    if weights == "auto":
        check(logits, expected)
    else:
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert 0 < float(error.median()) < 0.2


def test_the_text_part_of_a_checkpoint_with_vision(tmp_path: Path) -> None:
    text = tiny_config("qwen3_5_moe_text")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"out_hidden_size": 48})
    whole = Qwen3_5MoeForConditionalGeneration(config)
    part = tiny_model(text)
    whole.model.language_model.load_state_dict(part.model.state_dict())
    whole.lm_head.load_state_dict(part.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32")
    assert not model.takes_images
    logits = Stepper(model).step({0: Part(random_tokens(LENGTH), 0, -1, 0)})
    check(logits, expected_logits("qwen3_5_moe_text", random_tokens(LENGTH)))


# Errors are detected before a model serves.


def test_another_state_between_tokens_is_detected() -> None:
    """A token shift in the place of an MLP stores no state in the cache."""

    class Shift(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.cat([hidden[:, :1], (hidden[:, 1:] + hidden[:, :-1]) / 2], dim=1)

    model = tiny_model(tiny_config("olmo_hybrid"))
    model.model.layers[1].mlp = Shift()
    with pytest.raises(UnsupportedModelError, match="more than their K, V and states"):
        probe_model(model)


def test_a_mixer_that_needs_more_than_its_rows_is_refused() -> None:
    model = tiny_model(tiny_config("lfm2_moe"))
    layer = model.model.layers[0].conv
    kind = type(layer)

    class Scaled(kind):
        def forward(self, hidden_states: Tensor, scale: Tensor, **options: Any) -> Tensor:
            return super().forward(hidden_states, **options) * scale

    layer.__class__ = Scaled

    def pass_scale(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        return args, options | {"scale": options["hidden_states"][..., :1]}

    layer.register_forward_pre_hook(pass_scale, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"takes tensors in addition .* scale"):
        probe_model(model)


def test_a_mixer_that_drops_its_state_is_detected() -> None:
    model = tiny_model(tiny_config("qwen3_next"))
    layer = model.model.layers[2].linear_attn

    class Forgetful(type(layer)):
        def forward(
            self, hidden_states: Tensor, cache_params: Any = None, **options: Any
        ) -> Tensor:
            out = super().forward(hidden_states, cache_params, **options)
            if cache_params is not None:
                cache_params.layers[self.layer_idx].recurrent_states[0].mul_(0.5)
            return out

    layer.__class__ = Forgetful
    with pytest.raises(UnsupportedModelError, match="does not compute the same"):
        probe_model(model)
