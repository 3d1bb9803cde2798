"""Shapes of families, from the configurations that transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from headstart.models.dense.loader import describe_decoder
from headstart.models.dense.modules import read_frequencies
from headstart.models.families import FAMILIES, DecoderShape, read_shape
from headstart.models.transformers_tools import read_config
from headstart.weights.scheme import UnsupportedLayerError
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_configuration_is_the_family_s_own(name: str) -> None:
    """All that transformers derives: head dim, windows, layers without angles, scaling."""
    theirs: Any = CONFIG_MAPPING[name]()
    shape = read_shape(FAMILIES[name], read_config({"model_type": name}))
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


def shape_of(folder: Path, name: str, **changes: Any) -> DecoderShape:
    content = tiny_config(name).to_dict() | changes
    (folder / "config.json").write_text(json.dumps(content))
    return describe_decoder(folder)[0].shape


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "relu6"}, "activation is relu6"),
        ("gemma2", {"use_bidirectional_attention": True}, "see tokens after them"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "num_hidden_layers"),
        ("llama", {"num_key_value_heads": 4}, "6 heads, 4 for K and V"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("llama", {"attention_bias": 1}, "attention_bias"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("inf")}, "its epsilon inf"),
        ("qwen2", {"is_causal": False}, "see tokens after them"),
        ("mistral", {"sliding_window": 0}, "its window is 0"),
        ("phi3", {"sliding_window": "5"}, "sliding_window"),
        ("phi3", {"sliding_window": True}, "sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "windows are switched off"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "not describe all 3 layers"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "windows are switched off"),
    ],
)
def test_what_is_of_no_family(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedLayerError, match=reason):
        shape_of(tmp_path, name, **changes)


def test_mistral_may_name_layers_without_a_window(tmp_path: Path) -> None:
    """Ministral has them, and calls itself mistral: all its layers had the window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = shape_of(tmp_path, "mistral", layer_types=kinds, sliding_window=5).layers
    assert [layer.window for layer in layers] == [5, None, 5]


def test_a_key_of_another_family_changes_nothing(tmp_path: Path) -> None:
    assert shape_of(tmp_path, "llama", hidden_activation="gelu").activation == "silu"


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
            "factor",
        ),
    ],
)
def test_rotary_positions_that_a_family_does_not_have(
    name: str, rope: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedLayerError, match=reason):
        shape_of(tmp_path, name, rope_parameters={"rope_theta": 1e4, **rope})


def test_gemma3_takes_a_kind_called_type() -> None:
    changes = {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}}
    content = tiny_config("gemma3").to_dict() | changes
    config = read_config(content)
    shape = read_shape(FAMILIES["gemma3_text"], config)
    scaled = read_frequencies(config, "full_attention", shape).values
    assert float(scaled[0]) == 1 / 8
