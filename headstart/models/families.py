"""The families of dense decoders that headstart runs in its own modules, as data.

All are Llama's layer with a few facts changed: where the norms stand and how they round, biases,
norms of queries and keys, windows and rotary positions by layer, multipliers and caps, fused
projections, tied heads. A family is the defaults of its config.json (transformers' own, a test
compares them) and properties that config.json does not contain. `read_shape` makes one
`DecoderShape` of both. Everything that differs in other ways runs through transformers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headstart.weights.scheme import UnsupportedLayerError

NormKind = Literal["llama", "gemma", "olmo"]
"""llama: rounds, then multiplies by the weight. gemma: multiplies by 1 + weight, then rounds.
olmo: multiplies by the weight, then rounds."""

NormPlaces = Literal["before", "after", "around"]
"""Where attention and MLP have their norms: of their inputs, of their outputs, or of both."""

HeadNorms = Literal["head", "row"]
"""Norms of queries and keys: of each head, or of all heads together."""

Activation = Literal["silu", "gelu", "gelu_tanh"]


class UnknownFamilyError(UnsupportedLayerError):
    """Raised for a model whose `model_type` is none of them."""


class ConvShape(NamedTuple):
    """A gated convolution of each channel over its last `width` inputs."""

    width: int
    bias: bool


class LayerShape(NamedTuple):
    """The facts that may differ from layer to layer.

    window: a row sees itself and the `window - 1` tokens before it; None for all. angles: the kind
    of the layer's rotary positions; None for a layer without. mixer: the recurrent mixer of a layer
    without attention.
    """

    window: int | None = None
    angles: str | None = ""
    mixer: ConvShape | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """All that a dense decoder is, except its weights. Widths are numbers of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    epsilon: float
    activation: Activation
    scaling: float
    """Factor of the scores q·k."""
    tied: bool
    """The LM head is the embedding's weight."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    """One weight for queries, keys and values, and one for gate and up."""
    norm: NormKind = "llama"
    norms: NormPlaces = "before"
    head_norms: HeadNorms | None = None
    partial_rotary: bool = False
    """A part of a head may be rotated."""
    exact_angles: bool = False
    """Angles are float32 in every dtype of the weights."""
    softcap: float | None = None
    """Cap of the scores."""
    embedding_scale: float | None = None
    rounded_embedding_scale: bool = False
    """The scale of embeddings is rounded to their dtype first."""
    residual_scale: float | None = None
    logit_divisor: float | None = None
    logit_softcap: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """The family's names of parts that Llama names otherwise, or does not have."""

    def number(self, index: int) -> int:
        """Return the number of earlier layers of this one's kind: with attention, or recurrent."""
        is_recurrent = self.layers[index].mixer is not None
        return sum((layer.mixer is not None) == is_recurrent for layer in self.layers[:index])

    def path(self, name: str) -> str:
        """Return the family's form of a dotted name in Llama's names."""
        return ".".join(self.names.get(part, part) for part in name.split("."))


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of a family from Llama.

    defaults: of the keys of its config.json. facts: of a shape. derive: further facts, from the
    configuration. prepare: makes new-style keys of old ones, in place. kinds: its layers' types.
    """

    defaults: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    layers: Callable[[Any], list[LayerShape]] = lambda config: _alike(config, None)
    prepare: Callable[[dict[str, Any]], None] = lambda content: None
    kinds: frozenset[str] = frozenset({"full_attention", "sliding_attention"})


def _alike(config: Any, window: int | None) -> list[LayerShape]:
    return [LayerShape(window)] * config.num_hidden_layers


def _all_windows(config: Any) -> list[LayerShape]:
    return _alike(config, config.sliding_window)


def _windows_of_kinds(config: Any, kinds: list[str]) -> list[LayerShape]:
    return [
        LayerShape(config.sliding_window if kind == "sliding_attention" else None) for kind in kinds
    ]


def _windows_unless_full(config: Any) -> list[LayerShape]:
    """Read `layer_types` too, as Ministral has them, which calls itself mistral."""
    kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
    return _windows_of_kinds(config, kinds)


def _switched_window(config: Any) -> int | None:
    """Return the window of layers that have one; None if none may have one."""
    if config.use_sliding_window:
        return config.sliding_window  # type: ignore[no-any-return]
    if "sliding_attention" in (config.layer_types or ()):
        raise UnsupportedLayerError("it has layers with a window, and windows are disabled")
    return None


def _last_windows(config: Any) -> list[LayerShape]:
    """Windows in the layers from `max_window_layers` on, if they are switched on."""
    window = _switched_window(config)
    kinds = config.layer_types or [
        "full_attention" if at < config.max_window_layers else "sliding_attention"
        for at in range(config.num_hidden_layers)
    ]
    return [LayerShape(window if kind == "sliding_attention" else None) for kind in kinds]


def _every_fourth_without_angles(config: Any) -> list[LayerShape]:
    rotates = config.no_rope_layers
    if rotates is None:
        every = config.no_rope_layer_interval
        rotates = [(at + 1) % every != 0 for at in range(config.num_hidden_layers)]
    window = _switched_window(config)
    kinds = config.layer_types or [
        "full_attention" if rotated else "sliding_attention" for rotated in rotates
    ]
    return [
        LayerShape(window if kind == "sliding_attention" else None, "" if rotated else None)
        for kind, rotated in zip(kinds, rotates, strict=False)
    ]


def _alternating(config: Any) -> list[LayerShape]:
    kinds = config.layer_types or [
        "full_attention" if at % 2 else "sliding_attention"
        for at in range(config.num_hidden_layers)
    ]
    return _windows_of_kinds(config, kinds)


def _by_kind(config: Any) -> list[LayerShape]:
    """Give layers with a window separate angles, as in Gemma 3."""
    return [
        LayerShape(config.sliding_window if kind == "sliding_attention" else None, kind)
        for kind in config.layer_types
    ]


def _prepare_gemma3(content: dict[str, Any]) -> None:
    every = content.pop("sliding_window_pattern", 6)
    content["layer_types"] = content.get("layer_types") or [
        "sliding_attention" if (at + 1) % every else "full_attention"
        for at in range(content["num_hidden_layers"])
    ]
    angles = dict(content.get("rope_parameters") or {})
    full = dict(angles.get("full_attention") or {}) | (content.pop("rope_scaling", None) or {})
    near = dict(angles.get("sliding_attention") or {})
    for part in (full, near):
        part.setdefault("rope_type", part.get("type", "default"))
    full.setdefault("rope_theta", content.pop("rope_theta", 1_000_000.0))
    near.setdefault("rope_theta", content.pop("rope_local_base_freq", 10_000.0))
    content["rope_parameters"] = {"full_attention": full, "sliding_attention": near}


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


def _convolutions(config: Any) -> list[LayerShape]:
    conv = ConvShape(config.conv_L_cache, config.conv_bias)
    return [
        LayerShape(angles=None, mixer=conv) if kind == "conv" else LayerShape()
        for kind in config.layer_types
    ]


def _prepare_phi3(content: dict[str, Any]) -> None:
    angles = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = angles.get("rope_type", angles.get("type", "default"))
    if kind not in ("default", "longrope"):  # su and yarn are names of old versions for longrope
        raise UnsupportedLayerError(f"its rotary positions are {kind}")


def _gemma(config: Any) -> dict[str, Any]:
    scalar = getattr(config, "query_pre_attn_scalar", None) or config.head_dim
    return {
        "scaling": scalar**-0.5,
        "embedding_scale": config.hidden_size**0.5,
        "rounded_embedding_scale": True,
    }


def _gemma2(config: Any) -> dict[str, Any]:
    caps = {
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }
    return _gemma(config) | caps


def _gemma3(config: Any) -> dict[str, Any]:
    return _gemma(config) | {"logit_softcap": config.final_logit_softcapping}


def _granite(config: Any) -> dict[str, Any]:
    return {
        "scaling": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_divisor": float(config.logits_scaling),
    }


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA2 = _LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}

_LFM2 = _LLAMA | {
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

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults=_LLAMA),
    "mistral": Family(
        defaults=_LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        facts={"qkv_bias": False, "o_bias": False, "mlp_bias": False},
        layers=_windows_unless_full,
    ),
    "qwen2": Family(
        defaults=_QWEN2,
        facts={"qkv_bias": True, "o_bias": False, "mlp_bias": False},
        layers=_last_windows,
    ),
    "qwen3": Family(
        defaults=_QWEN2 | {"head_dim": 128},
        facts={"head_norms": "head", "mlp_bias": False},
        layers=_last_windows,
    ),
    "smollm3": Family(
        defaults=_LLAMA
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "eos_token_id": 128001,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
        },
        layers=_every_fourth_without_angles,
    ),
    "gemma2": Family(
        defaults=_GEMMA2,
        facts={"norm": "gemma", "norms": "around", "mlp_bias": False},
        derive=_gemma2,
        layers=_alternating,
    ),
    "gemma3_text": Family(
        defaults=_GEMMA2
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        facts={"norm": "gemma", "norms": "around", "head_norms": "head", "mlp_bias": False},
        derive=_gemma3,
        layers=_by_kind,
        prepare=_prepare_gemma3,
    ),
    "phi3": Family(
        defaults=_LLAMA
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        facts={
            "fused": True,
            "partial_rotary": True,
            "qkv_bias": False,
            "o_bias": False,
            "mlp_bias": False,
        },
        layers=_all_windows,
        prepare=_prepare_phi3,
    ),
    "granite": Family(
        defaults=_LLAMA
        | {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        derive=_granite,
    ),
    "olmo2": Family(
        defaults=_LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        facts={
            "norm": "olmo",
            "norms": "after",
            "head_norms": "row",
            "exact_angles": True,
            "mlp_bias": False,
        },
    ),
    "lfm2": Family(
        defaults=_LFM2,
        facts={
            "head_norms": "head",
            "qkv_bias": False,
            "o_bias": False,
            "mlp_bias": False,
            "names": _LFM2_NAMES,
        },
        layers=_convolutions,
        prepare=_prepare_lfm2,
        kinds=frozenset({"full_attention", "conv"}),
    ),
}
"""By transformers' `model_type`."""


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def read_shape(family: Family, config: Any) -> DecoderShape:
    """Return the shape that a configuration describes, with its family's defaults.

    Raises `UnsupportedLayerError` for what headstart's own modules do not do.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None)
    if both_ways or getattr(config, "is_causal", True) is False:
        raise UnsupportedLayerError("its tokens see later tokens")
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    name = getattr(config, key)
    if name not in _ACTIVATIONS:
        raise UnsupportedLayerError(f"its activation is {name}")
    others = set(config.layer_types or ()) - family.kinds
    if others:
        raise UnsupportedLayerError(f"it has layers of type {', '.join(map(repr, sorted(others)))}")
    layers = tuple(family.layers(config))
    heads, count = config.num_attention_heads, config.num_hidden_layers
    if len(layers) < count:
        raise UnsupportedLayerError(
            f"its configuration describes {len(layers)} of its {count} layers"
        )
    if all(layer.mixer is not None for layer in layers[:count]):
        raise UnsupportedLayerError("none of its layers has attention")
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedLayerError(
            f"it has {heads} heads, {kv_heads} for K and V, of width {head_dim}"
        )
    if any(layer.window is not None and not _is_count(layer.window) for layer in layers):
        raise UnsupportedLayerError(f"its window is {config.sliding_window!r}")
    facts: dict[str, Any] = {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "scaling": head_dim**-0.5,
        **family.facts,
        **family.derive(config),
    }
    if not 0 < facts["scaling"] < math.inf or not 0 < config.rms_norm_eps < math.inf:
        raise UnsupportedLayerError(
            f"its scaling is {facts['scaling']}, its epsilon {config.rms_norm_eps}"
        )
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers[:count],
        epsilon=float(config.rms_norm_eps),
        activation=_ACTIVATIONS[name],
        tied=config.tie_word_embeddings,
        **facts,
    )
