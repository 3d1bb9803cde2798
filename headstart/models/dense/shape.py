"""What a dense decoder is, except its weights."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from headstart.weights.scheme import UnsupportedLayerError

__all__ = [
    "Activation",
    "DecoderShape",
    "LayerShape",
    "NormKind",
    "UnknownFamilyError",
]

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


class LayerShape(NamedTuple):
    """What may differ from layer to layer.

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
    """What the scores q·k are multiplied by."""
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
