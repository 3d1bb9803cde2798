"""The shape of a decoder, read from a configuration by the rules of its family."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headstart.weights.scheme import UnsupportedLayerError

NormKind = Literal["llama", "gemma", "olmo"]
"""llama: round, then multiply by the weight. gemma: multiply by 1 + weight, then round.
olmo: multiply by the weight, then round."""

NormPlaces = Literal["before", "after", "around"]
"""Norms before attention and MLP, after them, or both."""

HeadNorms = Literal["head", "row"]
"""Norms of queries and keys: over each head, or over all heads together."""

Activation = Literal["silu", "gelu", "gelu_tanh"]


class ConvShape(NamedTuple):
    """A gated convolution of each channel over its last `width` inputs."""

    width: int
    bias: bool


class DeltaShape(NamedTuple):
    """The gated delta rule, after a convolution over the last `width` inputs."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int


class ScanShape(NamedTuple):
    """Mamba-2's selective scan, after a convolution over the last `width` inputs."""

    heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    conv_bias: bool
    bias: bool
    limits: tuple[float, float]


MixerShape = ConvShape | DeltaShape | ScanShape


class LayerShape(NamedTuple):
    """The properties that may differ between layers.

    window: a token attends to itself and the `window - 1` tokens before it; None for full
    attention. angles: the name of the layer's rotary positions, "" if all layers have the same;
    None for a layer without rotary positions. mixer: the recurrent mixer that replaces attention.
    kv_heads, head_dim, intermediate_size: None for the decoder's values. source: the earlier layer
    whose K and V this layer reads; None for a layer that computes K and V. keys_are_values: the
    projection of keys also computes the values.
    """

    window: int | None = None
    angles: str | None = ""
    mixer: MixerShape | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    source: int | None = None
    keys_are_values: bool = False


class LayerInputs(NamedTuple):
    """A second embedding of each token. Every layer reads `width` elements of it."""

    vocab_size: int
    width: int


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A dense decoder without its weights. Widths are numbers of elements."""

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
    """Factor of the attention scores q·k."""
    tied: bool
    """The LM head shares the embedding's weight."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    """One weight for queries, keys and values, and one for gate and up."""
    fused_mlp: bool = False
    """One weight for gate and up."""
    gated: bool = False
    """The output of attention is multiplied by sigmoid(gate). q_proj returns query and gate."""
    norm: NormKind = "llama"
    norms: NormPlaces = "before"
    head_norms: HeadNorms | None = None
    value_norm: bool = False
    """The values of each head are divided by their root mean square."""
    partial_rotary: bool = False
    """The configuration may rotate only a part of each head."""
    exact_angles: bool = False
    """Cosines and sines are float32, whatever the dtype of the weights."""
    softcap: float | None = None
    """Soft cap of the attention scores."""
    embedding_scale: float | None = None
    rounded_embedding_scale: bool = False
    """The scale of embeddings is rounded to their dtype first."""
    residual_scale: float | None = None
    layer_scalars: bool = False
    """The output of each layer is multiplied by a number from the checkpoint."""
    layer_inputs: LayerInputs | None = None
    logit_divisor: float | None = None
    logit_softcap: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """The family's module names by Llama's names, or by headstart's if Llama lacks the module."""
    ignored: tuple[str, ...] = ()
    """Prefixes of a checkpoint's tensors that do not belong to the decoder."""

    def number(self, index: int) -> int:
        """Return the layer's index among the layers with attention, or among the recurrent layers.

        A layer that reads another layer's K and V has that layer's index, and is not counted.
        """
        layer = self.layers[index]
        if layer.source is not None:
            return self.number(layer.source)
        kinds = [(other.mixer is not None, other.source) for other in self.layers[:index]]
        return kinds.count((layer.mixer is not None, None))

    def kv_widths(self, index: int) -> tuple[int, int]:
        """Return the number of K/V heads of a layer, and their width."""
        layer = self.layers[index]
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    def path(self, name: str) -> str:
        """Return the family's dotted name of a module, by Llama's dotted name."""
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

    defaults: default values of the keys of its config.json. facts: fields of `DecoderShape`.
    derive: returns more fields from a configuration. layers: returns the layers of a configuration.
    prepare: replaces old keys of a config.json by new keys. kinds: the allowed types of layers.
    """

    defaults: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    layers: Callable[[Any], list[LayerShape]] = lambda config: uniform_layers(config, None)
    prepare: Callable[[dict[str, Any]], None] = lambda content: None
    kinds: frozenset[str] = frozenset({"full_attention", "sliding_attention"})


def uniform_layers(config: Any, window: int | None) -> list[LayerShape]:
    """Return layers with attention that all have this window."""
    return [LayerShape(window)] * config.num_hidden_layers


LLAMA: dict[str, Any] = {
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
"""The defaults of Llama's config.json, on which the defaults of all families are based."""


def read_shape(family: Family, config: Any) -> DecoderShape:
    """Return the shape of the decoder that a configuration describes.

    Raises `UnsupportedLayerError` for features that headstart's own modules lack.
    """
    is_bidirectional = getattr(config, "use_bidirectional_attention", None)
    if is_bidirectional or getattr(config, "is_causal", True) is False:
        raise UnsupportedLayerError("its attention is not causal")
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    name = getattr(config, key)
    if name not in _ACTIVATIONS:
        raise UnsupportedLayerError(f"its activation is {name}")
    if kinds := set(config.layer_types or ()) - family.kinds:
        raise UnsupportedLayerError(f"it has layers of type {', '.join(map(repr, sorted(kinds)))}")
    layers = tuple(family.layers(config))
    heads, count = config.num_attention_heads, config.num_hidden_layers
    if len(layers) < count:
        raise UnsupportedLayerError(
            f"its configuration describes {len(layers)} of its {count} layers"
        )
    if all(layer.mixer is not None for layer in layers[:count]):
        raise UnsupportedLayerError("none of its layers has attention")
    if _ACTIVATIONS[name] != "silu" and any(layer.mixer is not None for layer in layers):
        raise UnsupportedLayerError(f"its activation is {name}")
    kv_heads, head_dim = config.num_key_value_heads or heads, config.head_dim
    for layer in (LayerShape(), *layers):
        kv_count, width = layer.kv_heads or kv_heads, layer.head_dim or head_dim
        if heads % kv_count or width % 2:
            raise UnsupportedLayerError(
                f"it has {heads} heads for queries and {kv_count} for K and V, of width {width}"
            )
    windows = {layer.window for layer in layers} - {None}
    if any(type(window) is not int or window < 1 for window in windows):
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
            f"its scaling is {facts['scaling']}, its epsilon {config.rms_norm_eps}; allowed: "
            "positive finite numbers"
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
