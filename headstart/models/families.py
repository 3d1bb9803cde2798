"""The families of dense decoders that headstart runs in its own modules, as data.

All are Llama's layer with a few facts changed: where the norms stand and how they round, biases,
norms of queries and keys, windows and rotary positions by layer, multipliers and caps, fused
projections, tied heads. transformers' configuration class reads config.json; a family adds the
facts that no key states. `read_shape` makes one `DecoderShape` of both. Everything that differs in
other ways runs through transformers.
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
    """A model whose `model_type` is not in `FAMILIES`."""


class LayerShape(NamedTuple):
    """The facts that may differ from layer to layer.

    window: a row sees itself and the `window - 1` tokens before it; None for all. angles: the kind
    of the layer's rotary positions, a key of `DecoderShape.angles`; None for a layer without.
    """

    window: int | None = None
    angles: str | None = ""


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
    """The differences of a family from Llama that no key of config.json states.

    facts: fields of a shape. derive: further fields, from the configuration. has_windows: layers
    may have a sliding window. angles_by_kind: full and sliding attention have separate angles.
    activation: the key of the activation.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    has_windows: bool = False
    angles_by_kind: bool = False
    activation: str = "hidden_act"


def _gemma(config: Any) -> dict[str, Any]:
    return {
        "scaling": (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
        "embedding_scale": config.hidden_size**0.5,
        "rounded_embedding_scale": True,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "scaling": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_divisor": float(config.logits_scaling),
    }


_NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
_GEMMA = {"norm": "gemma", "norms": "around", "mlp_bias": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(facts=_NO_BIAS, has_windows=True),
    "qwen2": Family(facts=_NO_BIAS | {"qkv_bias": True}, has_windows=True),
    "qwen3": Family(facts={"head_norms": "head", "mlp_bias": False}, has_windows=True),
    "smollm3": Family(has_windows=True),
    "gemma2": Family(facts=_GEMMA, derive=_gemma, has_windows=True, activation="hidden_activation"),
    "gemma3_text": Family(
        facts=_GEMMA | {"head_norms": "head"},
        derive=lambda config: _gemma(config) | {"softcap": None},
        has_windows=True,
        angles_by_kind=True,
        activation="hidden_activation",
    ),
    "phi3": Family(facts=_NO_BIAS | {"fused": True, "partial_rotary": True}, has_windows=True),
    "granite": Family(derive=_granite),
    "olmo2": Family(
        facts={
            "norm": "olmo",
            "norms": "after",
            "head_norms": "row",
            "exact_angles": True,
            "mlp_bias": False,
        }
    ),
}
"""By transformers' `model_type`."""


def _read_layers(family: Family, config: Any) -> tuple[LayerShape, ...]:
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) if family.has_windows else None
    kinds = getattr(config, "layer_types", None)
    others = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise UnsupportedLayerError(f"it has layers of type {', '.join(map(repr, sorted(others)))}")
    if kinds is None or not family.has_windows:
        kinds = ["full_attention" if window is None else "sliding_attention"] * count
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedLayerError("it has layers with a window, and windows are switched off")
    if window is not None and (type(window) is not int or window < 1):
        raise UnsupportedLayerError(f"its window is {window!r}")
    rotated = getattr(config, "no_rope_layers", None) or [True] * count
    if min(len(kinds), len(rotated)) < count:
        raise UnsupportedLayerError(f"its configuration does not describe all {count} layers")
    return tuple(
        LayerShape(
            window if kind == "sliding_attention" else None,
            (kind if family.angles_by_kind else "") if rotates else None,
        )
        for kind, rotates in zip(kinds, rotated, strict=False)
    )[:count]


def read_shape(family: Family, config: Any) -> DecoderShape:
    """Return the shape that transformers' configuration of a family describes.

    Raises `UnsupportedLayerError` for what headstart's own modules do not do.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None)
    if both_ways or getattr(config, "is_causal", True) is False:
        raise UnsupportedLayerError("its tokens see tokens after them")
    activation = getattr(config, family.activation)
    if activation not in _ACTIVATIONS:
        raise UnsupportedLayerError(f"its activation is {activation}")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedLayerError(
            f"it has {heads} heads, {kv_heads} for K and V, of width {head_dim}"
        )
    bias = getattr(config, "attention_bias", False)
    facts: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
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
        layers=_read_layers(family, config),
        epsilon=float(config.rms_norm_eps),
        activation=_ACTIVATIONS[activation],
        tied=config.tie_word_embeddings,
        **facts,
    )
