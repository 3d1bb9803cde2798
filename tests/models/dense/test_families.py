"""The table of families agrees with transformers: defaults, and values derived from them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from headstart.models.config_values import context_length
from headstart.models.dense.loader import DenseConfig, read_config
from headstart.models.dense.modules import read_frequencies
from headstart.models.families import FAMILIES
from headstart.models.shapes import DecoderShape, read_shape
from headstart.weights.scheme import UnsupportedLayerError
from tests.tiny_models import save_tiny, tiny_config

# Keys that a family's configuration class does not have: they say that the family has no such part.
OF_OTHERS = {"mlp_bias", "attention_bias", "head_dim", "hidden_act", "max_window_layers"}
OF_OTHERS |= {"rms_norm_eps", "split_mlp"}
BY_KIND = {"gemma3_text", "gemma4_text", "gemma4_unified_text"}  # have angles by kind of layer
OLD = {"global_head_dim", "num_global_key_value_heads"}  # which transformers reads and drops

# Of the keys that transformers writes, those that are in the config.json of models.
KEPT = {key for family in FAMILIES.values() for key in family.defaults}
KEPT |= {"architectures", "dtype", "rope_parameters", "layer_types", "eos_token_id", "use_cache"}
KEPT |= {"per_layer_config"}


def new_config(name: str) -> Any:
    """Return an empty configuration of transformers, whose per-layer keys are readable."""
    config: Any = CONFIG_MAPPING[name]()
    config.allow_global_per_layer_attribute_access = True
    return config


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs = new_config(name)
    for key, ours in FAMILIES[name].defaults.items():
        if key == "rope_theta":
            assert theirs.rope_parameters["rope_theta"] == ours
        elif key == "partial_rotary_factor":
            assert theirs.rope_parameters.get(key, 1.0) == ours
        elif key in OLD and name in BY_KIND:
            full = theirs.per_layer_config[theirs.layer_types.index("full_attention")]
            assert key == "num_global_key_value_heads" or full.head_dim == ours
        elif not (ours is None or (key in OF_OTHERS and not hasattr(theirs, key))):
            assert getattr(theirs, key) == ours or key == "sliding_window", key


# Experts, and a model without attention, are refused.
EMPTY: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["mamba"] * 31 + ["attention"],
    }
}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_configuration_has_the_family_s_values(name: str) -> None:
    """All derived values: head dim, windows, layers without angles, scaling."""
    theirs = new_config(name)
    content = {"num_hidden_layers": theirs.num_hidden_layers, **EMPTY.get(name, {})}
    shape = read_shape(FAMILIES[name], read_config(FAMILIES[name], content))
    heads = theirs.num_attention_heads
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert shape.kv_heads == (theirs.num_key_value_heads or heads)
    assert [layer.window is not None for layer in shape.layers] == windows(theirs)
    assert {layer.window for layer in shape.layers} <= {None, theirs_window(theirs)}


def theirs_window(config: PreTrainedConfig) -> int | None:
    return getattr(config, "sliding_window", None)


def windows(config: Any) -> list[bool]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [theirs_window(config) is not None] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds]


def shape_of(name: str, **changes: Any) -> DecoderShape:
    content = tiny_config(name).to_dict() | changes
    return read_shape(FAMILIES[content["model_type"]], read_config(FAMILIES[name], content))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "relu6"}, "activation is relu6"),
        ("gemma2", {"use_bidirectional_attention": True}, "attention is not causal"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "describes 1 of its 3 layers"),
        ("llama", {"num_key_value_heads": 4}, "6 heads for queries and 4 for K and V"),
        ("llama", {"head_dim": 7}, "of width 7"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'"),
        ("llama", {"attention_bias": 1}, "attention_bias 1"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps None"),
        ("llama", {"rms_norm_eps": float("inf")}, "its epsilon inf"),
        ("qwen2", {"is_causal": False}, "attention is not causal"),
        ("mistral", {"sliding_window": 0}, "its window is 0"),
        ("phi3", {"sliding_window": "5"}, "its window is '5'"),
        ("phi3", {"sliding_window": True}, "its window is True"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "windows are disabled"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "windows are disabled"),
    ],
)
def test_configurations_of_no_family(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=reason):
        shape_of(name, **changes)


def test_mistral_may_name_layers_without_a_window() -> None:
    """Ministral, of model type mistral, has such layers.

    Regression: all its layers had the window.
    """
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = shape_of("mistral", layer_types=kinds, sliding_window=5).layers
    assert [layer.window for layer in layers] == [5, None, 5]


def test_a_key_of_another_family_changes_nothing() -> None:
    assert shape_of("llama", hidden_activation="gelu").activation == "silu"


@pytest.mark.parametrize(
    ("name", "rope", "reason"),
    [
        ("llama", {"rope_type": "default", "partial_rotary_factor": 0.5}, "a part of a head"),
        ("qwen3", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "a part"),
        ("qwen2", {"full_attention": {"rope_theta": 5.0}, "rope_theta": 1e4}, "layer to layer"),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 128,
            },
            "its rotary positions have factors for",
        ),
    ],
)
def test_unsupported_rotary_positions_of_a_family(
    name: str, rope: dict[str, Any], reason: str
) -> None:
    content = tiny_config(name).to_dict() | {"rope_parameters": {"rope_theta": 1e4, **rope}}
    config = read_config(FAMILIES[name], content)
    with pytest.raises(UnsupportedLayerError, match=reason):
        read_frequencies(config, "", read_shape(FAMILIES[name], config))


PLAIN = sorted(FAMILIES.keys() - {*BY_KIND, "phi3"})  # these have other angles


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": 7.5e5}},
        {"rope_parameters": None, "rope_theta": 123},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 99.0},
        {"dtype": None, "torch_dtype": "float16", "eos_token_id": [1, 2]},
        {"layer_types": ["full_attention"] * 3, "architectures": None},
    ],
)
def test_a_plain_configuration_is_read_as_by_transformers(
    name: str, changes: dict[str, Any]
) -> None:
    family, content = FAMILIES[name], tiny_config(name).to_dict()
    content = {key: value for key, value in content.items() if key in KEPT} | changes
    results = []
    for extra in ({}, {"unknown_key": 1}):  # transformers reads configurations with unknown keys
        config = read_config(family, content | extra)
        assert isinstance(config, DenseConfig) is not bool(extra)
        shape = read_shape(family, config)
        frequencies = read_frequencies(config, "", shape)
        facts = (shape, frequencies.scale, context_length(config), config.dtype)
        results.append((*facts, config.eos_token_id, frequencies.values.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["gemma3", "gemma4_text", "phi3", "qwen3_5_text"])
def test_a_file_of_transformers_is_plain(name: str, tmp_path: Path) -> None:
    """Regression: Gemma 3 and Phi-3 have keys without effect, and took a second to read."""
    content = json.loads((save_tiny(name, tmp_path) / "config.json").read_text())
    assert isinstance(read_config(FAMILIES[content["model_type"]], content), DenseConfig)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": None, "torch_dtype": "float16", "eos_token_id": [1, 2]},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_theta": 77},
            }
        },
    ],
)
def test_angles_by_kind_of_layer_are_plain(name: str, changes: dict[str, Any]) -> None:
    content = tiny_config(name).to_dict() | changes
    family = FAMILIES[content["model_type"]]
    content = {key: value for key, value in content.items() if key in KEPT}
    results = []
    for extra in ({}, {"unknown_key": 1}):
        config = read_config(family, content | extra)
        assert isinstance(config, DenseConfig) is not bool(extra)
        shape = read_shape(family, config)
        kinds = [read_frequencies(config, kind, shape) for kind in sorted(config.rope_parameters)]
        facts = (shape, context_length(config), config.dtype, config.eos_token_id)
        results.append((*facts, [(kind.values.tolist(), kind.scale) for kind in kinds]))
    assert results[0] == results[1]


GEMMA4 = tiny_config("gemma4_text").to_dict()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_moe_block": True, "num_experts": 4}, "it has 4 experts"),
        ({"use_bidirectional_attention": "all"}, "attention is not causal"),
        ({"num_kv_shared_layers": 5}, "its layer 1 needs K and V of an earlier"),
        ({"vocab_size_per_layer_input": 130}, "per_layer_input is smaller than vocab_size"),
        ({"per_layer_config": {"1": {"head_dim": 24}}}, "its per_layer_config is"),
        (
            {"per_layer_config": {at: {"intermediate_size": 8} for at in "135"}},
            "its per_layer_config is",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "its rotary positions are linear",
        ),
    ],
)
def test_unsupported_configurations_of_gemma4(changes: dict[str, Any], reason: str) -> None:
    family = FAMILIES["gemma4_text"]
    with pytest.raises(UnsupportedLayerError, match=reason):
        config = read_config(family, GEMMA4 | changes)
        read_frequencies(config, "full_attention", read_shape(family, config))


def test_gemma4_may_have_separate_keys_for_global_heads() -> None:
    family = FAMILIES["gemma4_text"]
    content = {key: value for key, value in GEMMA4.items() if key != "per_layer_config"}
    content |= {"global_head_dim": 24, "num_global_key_value_heads": 3}
    content |= {"use_bidirectional_attention": "vision"}  # between the rows of an image
    shapes = [read_shape(family, read_config(family, c)) for c in (content, GEMMA4)]
    assert shapes[0] == shapes[1]
    assert [shapes[0].kv_widths(at) for at in (0, 1)] == [(2, 16), (3, 24)]
    content["attention_k_eq_v"] = False  # then the number of heads is not read
    assert read_shape(family, read_config(family, content)).kv_widths(1) == (2, 24)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": "10"}},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention"]},
        {"dtype": "no dtype"},
        {"per_layer_config": {}},
    ],
)
def test_unusual_configurations_are_read_by_transformers(changes: dict[str, Any]) -> None:
    content = {key: value for key, value in tiny_config("llama").to_dict().items() if key in KEPT}
    try:
        config = read_config(FAMILIES["llama"], content | changes)
    except UnsupportedLayerError:
        return  # as transformers refuses it
    assert isinstance(config, PreTrainedConfig)


@pytest.mark.parametrize(("part", "is_plain"), [(1.0, True), (0.5, False)])
def test_phi3_may_rotate_a_part_of_a_head(part: float, is_plain: bool) -> None:
    """Regression: its defaults have the key, so transformers read every file."""
    content = {key: value for key, value in tiny_config("phi3").to_dict().items() if key in KEPT}
    content |= {"rope_parameters": None, "partial_rotary_factor": part}
    results = []
    for extra in ({}, {"unknown_key": 1}):
        config = read_config(FAMILIES["phi3"], content | extra)
        assert isinstance(config, DenseConfig) == (is_plain and not extra)
        shape = read_shape(FAMILIES["phi3"], config)
        values = read_frequencies(config, "", shape).values
        assert len(values) == shape.head_dim * part // 2
        results.append((shape, values.tolist(), context_length(config)))
    assert results[0] == results[1]


def test_gemma3_accepts_the_key_type_for_a_kind() -> None:
    changes = {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}}
    content = tiny_config("gemma3").to_dict() | changes
    config = read_config(FAMILIES["gemma3_text"], content)
    shape = read_shape(FAMILIES["gemma3_text"], config)
    scaled = read_frequencies(config, "full_attention", shape).values
    assert float(scaled[0]) == 1 / 8
