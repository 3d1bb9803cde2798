"""The probe accepts every model that works, and none that does not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MptConfig,
    MptForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    XLMRobertaXLConfig,
    XLMRobertaXLForCausalLM,
    XmodConfig,
    XmodForCausalLM,
)
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from headstart.attention import AttentionOptions, LayerLayout, register
from headstart.attention.register import LayerCall
from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.transformers_backend import probe as paged_kv
from headstart.models.transformers_backend.probe import check_config, probe_model
from tests.tiny_models import TINY, VOCABULARY, tiny_config

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (RobertaConfig, RobertaForCausalLM),
        (RobertaPreLayerNormConfig, RobertaPreLayerNormForCausalLM),
        (XLMRobertaXLConfig, XLMRobertaXLForCausalLM),
        (XmodConfig, XmodForCausalLM),
    ],
)
def test_models_whose_positions_do_not_begin_at_zero_are_refused(config: Any, family: Any) -> None:
    torch.manual_seed(0)
    model = family(config(**{**SMALL, "pad_token_id": 1}, is_decoder=True)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=1.3 * weight.shape[-1] ** -0.5)
    if isinstance(model, XmodForCausalLM):
        model.set_default_language("en_XX")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="does not count positions from 0"):
        probe_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_good_models_pass_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check_config(tiny_config(name))
    layouts, mixers = probe_model(TINY[name]().to(dtype))
    assert not mixers
    config = tiny_config(name)
    assert len(layouts) == config.num_hidden_layers
    if name == "deepseek_v3":
        assert set(layouts) == {LayerLayout(kv_heads=6, key_dim=18, value_dim=14)}
        return
    layers = [config] * len(layouts)
    if getattr(config, "is_heterogeneous", False):
        layers = [config.per_layer_config[index] for index in range(len(layouts))]
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    for layout, layer, kind in zip(layouts, layers, kinds, strict=True):
        heads = getattr(layer, "num_key_value_heads", layer.num_attention_heads)
        dim = getattr(layer, "head_dim", None) or 48 // 6
        assert layout == LayerLayout(
            heads, dim, dim, window if kind == "sliding_attention" else None
        )


def test_the_probe_restores_transformers_attention() -> None:
    model = TINY["llama"]()
    before = set(register.AttentionInterface._global_mapping)
    probe_model(model)
    assert model.config._attn_implementation == "eager"
    assert set(register.AttentionInterface._global_mapping) == before


# Errors of an attention that ignores one of a layer's options.


def without(option: str) -> Callable[[LayerCall], AttentionOptions]:
    read = register.read_options

    def forgetful(call: LayerCall) -> AttentionOptions:
        options = {key: value for key, value in call.keywords.items() if key != option}
        return read(call._replace(keywords=options))

    return forgetful


@pytest.mark.parametrize(
    ("name", "option", "dtype"),
    [
        ("granite", "scaling", torch.float32),
        ("granite", "scaling", torch.bfloat16),
        ("gemma2", "softcap", torch.float32),
        ("gpt_oss", "s_aux", torch.float32),
        ("gpt_oss", "s_aux", torch.bfloat16),
        ("mistral", "sliding_window", torch.float32),
        ("mistral", "sliding_window", torch.bfloat16),
    ],
    ids=str,
)
def test_attention_that_ignores_an_option_is_detected(
    name: str, option: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY[name]().to(dtype)
    monkeypatch.setattr(register, "read_options", without(option))
    with pytest.raises(UnsupportedModelError, match="does not compute the same over paged K/V"):
        probe_model(model)


def test_a_window_that_the_layer_does_not_pass_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one far wider than the prompt of the check: it is read from the mask's rule."""
    config = tiny_config("mistral")
    config.sliding_window = 100
    model = type(TINY["mistral"]())(config).eval()
    probe_model(model)
    monkeypatch.setattr(paged_kv, "read_options", without("sliding_window"))
    monkeypatch.setattr(register, "read_options", without("sliding_window"))
    with pytest.raises(UnsupportedModelError, match=r"mask of layer 0 .*window: None"):
        probe_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_besides_keys_and_values_is_detected(dtype: torch.dtype) -> None:
    """A token shift, as in RWKV: a row takes half of the row before it in the batch."""

    class Shift(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.cat([hidden[:, :1], (hidden[:, 1:] + hidden[:, :-1]) / 2], dim=1)

    model = TINY["llama"]()
    model.model.layers[1].mlp = Shift()
    with pytest.raises(UnsupportedModelError, match="more than their K and V"):
        probe_model(model.to(dtype))


def test_a_mask_with_a_custom_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_other(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row - column) % 64 != 63  # beyond the prompt of the check

    def odd_mask(**kwargs: Any) -> Any:
        return create_causal_mask(**kwargs, and_mask_function=every_other)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", odd_mask)
    with pytest.raises(UnsupportedModelError, match="does not fit its call of attention"):
        probe_model(TINY["llama"]())


def test_logits_that_are_not_finite_are_detected() -> None:
    model = TINY["llama"]()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.inf
    with pytest.raises(UnsupportedModelError, match=r"not finite in torch\.float32"):
        probe_model(model)


def test_weights_that_are_nan_are_named() -> None:
    """Regression: the error suggested another dtype, which changes nothing."""
    model = TINY["llama"]()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = math.nan
    with pytest.raises(DamagedModelError, match=r"layers\.1\.mlp\.up_proj\.weight has .* NaN"):
        probe_model(model)


def test_a_near_tie_of_experts_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows may differ by any amount, many may not."""
    differences = paged_kv.relative_errors

    def few(logits: Tensor, expected: Tensor) -> Tensor:
        return differences(logits, expected) + (torch.arange(len(logits)) % 6 == 0).float()

    def many(logits: Tensor, expected: Tensor) -> Tensor:
        return differences(logits, expected) + (torch.arange(len(logits)) % 3 == 0).float()

    monkeypatch.setattr(paged_kv, "relative_errors", few)
    probe_model(TINY["mixtral"]())
    monkeypatch.setattr(paged_kv, "relative_errors", many)
    with pytest.raises(UnsupportedModelError):
        probe_model(TINY["mixtral"]())


# Architectures of transformers that cannot work.


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "T5 is an encoder-decoder"),
        (Llama4TextConfig(**SMALL), "chunk"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_by_configuration(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)


UNSUPPORTED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bloom": (lambda: BloomForCausalLM(BloomConfig(**SMALL)), "takes no position_ids.*ALiBi"),
    "mpt": (
        lambda: MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=99)),
        "takes no position_ids.*ALiBi",
    ),
    "falcon": (
        lambda: FalconForCausalLM(FalconConfig(**SMALL, alibi=True)),
        "does not take its attention from transformers' AttentionInterface",
    ),
    "rwkv": (
        lambda: RwkvForCausalLM(RwkvConfig(**SMALL, attention_hidden_size=32)),
        "takes no position_ids",
    ),
    "recurrent_gemma": (
        lambda: RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(
                **SMALL | {"num_key_value_heads": 1},
                block_types=["recurrent", "attention"],
                lru_width=32,
            )
        ),
        "layer 0 of .* is of type 'linear_attention' and does not use transformers' cache of state",
    ),
    "diffllama": (
        lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL)),
        r"2 called attention \(4 calls in one pass\)",
    ),
    "doge": (lambda: DogeForCausalLM(DogeConfig(**SMALL)), "custom attention mask or bias"),
    "bert": (lambda: BertLMHeadModel(BertConfig(**SMALL)), "is not causal"),
    "llama4": (
        lambda: Llama4ForCausalLM(
            Llama4TextConfig(
                **SMALL,
                attention_chunk_size=32,
                num_local_experts=2,
                intermediate_size_mlp=48,
                layer_types=["chunked_attention", "chunked_attention"],
            )
        ),
        "mask of layer 0",
    ),
}


def full_attention_llama4(max_length: int, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with rotary-free layers that scale their queries by rows, 40 at a time."""
    config = Llama4TextConfig(
        **SMALL | {"max_position_embeddings": max_length},
        intermediate_size_mlp=48,
        moe_layers=[],
        layer_types=["full_attention"] * 2,
        no_rope_layers=[1, 0],
        floor_scale=40,
    )
    return Llama4ForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_that_are_scaled_by_their_row_are_detected(dtype: torch.dtype) -> None:
    """Rows of 24 tokens do not show it: the scale is 1 up to position 38."""
    reason = r"queries of layer 1 from the index of a row.*at positions 61 to 63"
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(full_attention_llama4(64, dtype))
    assert len(probe_model(full_attention_llama4(39, dtype)).layouts) == 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_length_that_the_model_cannot_reach_is_detected(name: str) -> None:
    """Tables of learned positions end; angles are computed for any position."""
    model = TINY[name]()
    model.config.max_position_embeddings = 300
    if name == "llama":
        probe_model(model)
        return
    with pytest.raises(UnsupportedModelError, match="fails at positions 297 to 299, the last"):
        probe_model(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_angles_that_depend_on_the_length_pass_until_they_change(kind: str) -> None:
    config = tiny_config("llama")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 100
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.rope_parameters = rope
    probe_model(type(TINY["llama"]())(config).eval())


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refused_by_the_model_itself(name: str) -> None:
    """No configuration needs to be read to detect these models."""
    build, reason = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(build().eval())
