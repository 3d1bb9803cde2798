"""Families with recurrent layers, as data.

Granite is here too, since Granite 4 H (with recurrent layers) has the same multipliers.
"""

import math
from typing import Any

from headstart.models.shapes import (
    LLAMA,
    ConvShape,
    DeltaShape,
    Family,
    LayerShape,
    MixerShape,
    ScanShape,
)
from headstart.weights.scheme import UnsupportedLayerError

# Old keys of LFM2 that transformers does not read.
_LFM2_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
    *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
    *("conv_use_xavier_init", "num_heads", "theta", "use_pos_enc", "hidden_act"),
)


def _prepare_lfm2(content: dict[str, Any]) -> None:
    for name in _LFM2_UNUSED:
        content.pop(name, None)
    attention = content.pop("full_attn_idxs", None)
    if content.get("layer_types") is None:
        count = content.get("num_hidden_layers", _LFM2["num_hidden_layers"])
        indices = range(count) if attention is None else attention
        content["layer_types"] = [
            "full_attention" if index in indices else "conv" for index in range(count)
        ]
    content["rms_norm_eps"] = content.pop("norm_eps", _LFM2["norm_eps"])
    if "tie_embedding" in content:
        content["tie_word_embeddings"] = content.pop("tie_embedding")
    inner = content.pop("block_ff_dim", content.get("intermediate_size"))
    inner = _LFM2["intermediate_size"] if inner is None else inner
    factor = content.get("block_ffn_dim_multiplier", 1.0)
    multiple = content.get("block_multiple_of", _LFM2["block_multiple_of"])
    if content.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if factor is not None:
            inner = -(-int(factor * inner) // multiple) * multiple
    content["intermediate_size"] = inner


_ATTENTION = LayerShape()


def _hybrid_layers(
    config: Any, mixer: MixerShape, attention: LayerShape = _ATTENTION
) -> list[LayerShape]:
    recurrent = LayerShape(angles=None, mixer=mixer)
    return [attention if kind == "full_attention" else recurrent for kind in config.layer_types]


def _lfm2_layers(config: Any) -> list[LayerShape]:
    return _hybrid_layers(config, ConvShape(config.conv_L_cache, config.conv_bias))


# Keys of Qwen3.5 that do not affect its decoder.
_QWEN35_UNUSED = (
    *("attn_output_gate", "full_attention_interval", "mamba_ssm_dtype", "mlp_only_layers"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "partial_rotary_factor"),
)


def _prepare_qwen35(content: dict[str, Any]) -> None:
    if content.get("layer_types") is None:
        interval = content.get("full_attention_interval", 4)
        count = content.get("num_hidden_layers", _QWEN35["num_hidden_layers"])
        content["layer_types"] = [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(count)
        ]
    rope = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    rope.setdefault("partial_rotary_factor", content.get("partial_rotary_factor", 0.25))
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)  # the three M-RoPE positions of a text token are equal
    content["rope_parameters"] = rope
    for name in ("rope_scaling", *_QWEN35_UNUSED):
        content.pop(name, None)


def _qwen35_layers(config: Any) -> list[LayerShape]:
    mixer = DeltaShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    if mixer.heads % mixer.key_heads:
        raise UnsupportedLayerError(
            f"its recurrent layers have {mixer.heads} heads and {mixer.key_heads} heads of keys"
        )
    return _hybrid_layers(config, mixer)


_GRANITE_UNUSED = (
    *("mamba_chunk_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    *("intermediate_size", "normalization_function", "init_method", "logical_types"),
)
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _prepare_granite_hybrid(content: dict[str, Any]) -> None:
    kinds = content.pop("layers_block_type", None) or content.get("layer_types")
    if kinds is None:
        count = content.get("num_hidden_layers", LLAMA["num_hidden_layers"])
        kinds = ["linear_attention"] * count
    content["layer_types"] = [_OLD_KINDS.get(kind, kind) for kind in kinds]
    for name in _GRANITE_UNUSED:
        content.pop(name, None)
    shared = content.get("shared_intermediate_size")
    content["intermediate_size"] = (
        _GRANITE_HYBRID["shared_intermediate_size"] if shared is None else shared
    )
    if content.get("mamba_d_head") == "auto":
        content["mamba_d_head"] = None


def _granite_hybrid_layers(config: Any) -> list[LayerShape]:
    if config.num_local_experts:
        raise UnsupportedLayerError(f"it has {config.num_local_experts} experts")
    heads, groups = config.mamba_n_heads, config.mamba_n_groups
    inner = config.mamba_expand * config.hidden_size
    head_dim = config.mamba_d_head or inner // heads
    if heads % groups or head_dim * heads != inner:
        raise UnsupportedLayerError(
            f"its Mamba-2 layers have {heads} heads of width {head_dim} in {groups} groups"
        )
    limits = config.time_step_limit or (0.0, math.inf)
    # transformers writes infinity as an object.
    shortest, longest = (float(x["__float__"] if isinstance(x, dict) else x) for x in limits)
    mixer = ScanShape(
        heads,
        head_dim,
        groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_conv_bias,
        config.mamba_proj_bias,
        (shortest, longest),
    )
    attention = LayerShape(angles="" if config.position_embedding_type == "rope" else None)
    return _hybrid_layers(config, mixer, attention)


def _derive_granite(config: Any) -> dict[str, Any]:
    return {
        "scaling": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_divisor": float(config.logits_scaling),
    }


_LFM2 = LLAMA | {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "layer_types": None,
}
_LFM2_NAMES = {
    "norm": "embedding_norm",
    "mixer": "conv",
    "mlp": "feed_forward",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}

_QWEN35 = LLAMA | {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
_GRANITE = LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GRANITE_HYBRID = _GRANITE | {
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "position_embedding_type": None,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": None,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
    "split_mlp": False,
}
_GRANITE_NAMES = {
    "mixer": "mamba",
    "mlp": "shared_mlp",
    "gate_up_proj": "input_linear",
    "down_proj": "output_linear",
}


def _derive_granite_hybrid(config: Any) -> dict[str, Any]:
    # GGUF files have separate weights for gate and up. Other files have one weight for both.
    return _derive_granite(config) | {"fused_mlp": not config.split_mlp}


HYBRIDS: dict[str, Family] = {
    "granite": Family(defaults=_GRANITE, derive=_derive_granite),
    "lfm2": Family(
        defaults=_LFM2,
        facts={"head_norms": "head", "names": _LFM2_NAMES},
        layers=_lfm2_layers,
        prepare=_prepare_lfm2,
        kinds=frozenset({"full_attention", "conv"}),
    ),
    "qwen3_5_text": Family(
        defaults=_QWEN35,
        facts={
            "norm": "gemma",
            "head_norms": "head",
            "partial_rotary": True,
            "gated": True,
            "names": {"mixer": "linear_attn"},
            "ignored": ("mtp.",),
        },
        layers=_qwen35_layers,
        prepare=_prepare_qwen35,
        kinds=frozenset({"full_attention", "linear_attention"}),
    ),
    "granitemoehybrid": Family(
        defaults=_GRANITE_HYBRID,
        facts={"names": _GRANITE_NAMES},
        derive=_derive_granite_hybrid,
        layers=_granite_hybrid_layers,
        prepare=_prepare_granite_hybrid,
        kinds=frozenset({"full_attention", "linear_attention"}),
    ),
}
"""Families by transformers' `model_type`."""
