"""The families of dense decoders that headstart runs in its own modules, as data.

A family is described by its differences from Llama: position and rounding of norms, biases, sliding
windows, rotary positions, widths of layers, multipliers, caps, fused projections, and recurrent
mixers (`headstart.models.hybrids`). A `Family` has transformers' default values of its config.json,
and properties that config.json lacks. `read_shape` makes a `DecoderShape` from both. Models of
other families run through transformers.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headstart.models.hybrids import HYBRIDS
from headstart.models.shapes import LLAMA, Family, LayerInputs, LayerShape, uniform_layers
from headstart.weights.scheme import UnsupportedLayerError


class UnknownFamilyError(UnsupportedLayerError):
    """Raised for a `model_type` that is not in `MODEL_TYPES`."""


def _attention_layers(kinds: Iterable[str], window: int | None) -> list[LayerShape]:
    return [LayerShape(window if kind == "sliding_attention" else None) for kind in kinds]


def _mistral_layers(config: Any) -> list[LayerShape]:
    # Ministral has the model_type mistral too, but sets layer_types.
    kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
    return _attention_layers(kinds, config.sliding_window)


def _enabled_window(config: Any) -> int | None:
    """Return the window of sliding-window layers; None if `use_sliding_window` is false."""
    if config.use_sliding_window:
        return config.sliding_window  # type: ignore[no-any-return]
    if "sliding_attention" in (config.layer_types or ()):
        raise UnsupportedLayerError("it has sliding-window layers, but windows are disabled")
    return None


def _qwen_layers(config: Any) -> list[LayerShape]:
    """Return layers; by default, layers from `max_window_layers` on have a sliding window."""
    kinds = config.layer_types or [
        "full_attention" if index < config.max_window_layers else "sliding_attention"
        for index in range(config.num_hidden_layers)
    ]
    return _attention_layers(kinds, _enabled_window(config))


def _smollm3_layers(config: Any) -> list[LayerShape]:
    """Return layers; by default, every fourth layer has no rotary positions."""
    rotates = config.no_rope_layers
    if rotates is None:
        interval = config.no_rope_layer_interval
        rotates = [(index + 1) % interval != 0 for index in range(config.num_hidden_layers)]
    window = _enabled_window(config)
    kinds = config.layer_types or [
        "full_attention" if rotated else "sliding_attention" for rotated in rotates
    ]
    return [
        LayerShape(window if kind == "sliding_attention" else None, "" if rotated else None)
        for kind, rotated in zip(kinds, rotates, strict=False)
    ]


def _gemma2_layers(config: Any) -> list[LayerShape]:
    kinds = config.layer_types or [
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(config.num_hidden_layers)
    ]
    return _attention_layers(kinds, config.sliding_window)


def _gemma3_layers(config: Any) -> list[LayerShape]:
    """Return layers whose rotary positions depend on their type."""
    return [
        LayerShape(config.sliding_window if kind == "sliding_attention" else None, kind)
        for kind in config.layer_types
    ]


def _prepare_gemma3(content: dict[str, Any]) -> None:
    interval = content.pop("sliding_window_pattern", 6)
    content["layer_types"] = content.get("layer_types") or [
        "sliding_attention" if (index + 1) % interval else "full_attention"
        for index in range(content["num_hidden_layers"])
    ]
    rope = dict(content.get("rope_parameters") or {})
    full = dict(rope.get("full_attention") or {}) | (content.pop("rope_scaling", None) or {})
    sliding = dict(rope.get("sliding_attention") or {})
    for part in (full, sliding):
        part.setdefault("rope_type", part.get("type", "default"))
    full.setdefault("rope_theta", content.pop("rope_theta", 1_000_000.0))
    sliding.setdefault("rope_theta", content.pop("rope_local_base_freq", 10_000.0))
    content["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}


def _prepare_phi3(content: dict[str, Any]) -> None:
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope"):
        raise UnsupportedLayerError(f"its rotary positions are {kind}")


def _derive_gemma(config: Any) -> dict[str, Any]:
    scalar = getattr(config, "query_pre_attn_scalar", None) or config.head_dim
    return {
        "scaling": scalar**-0.5,
        "embedding_scale": config.hidden_size**0.5,
        "rounded_embedding_scale": True,
    }


def _derive_gemma2(config: Any) -> dict[str, Any]:
    return _derive_gemma3(config) | {"softcap": config.attn_logit_softcapping}


def _derive_gemma3(config: Any) -> dict[str, Any]:
    return _derive_gemma(config) | {"logit_softcap": config.final_logit_softcapping}


def _prepare_gemma4(content: dict[str, Any]) -> None:
    count = content.setdefault("num_hidden_layers", _GEMMA4["num_hidden_layers"])
    kinds = content.get("layer_types") or [
        "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(count)
    ]
    content["layer_types"] = [*kinds[:-1], "full_attention"]
    if not content.get("rope_parameters"):
        content["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        }
    if content.get("use_bidirectional_attention") == "vision":  # affects only images
        content["use_bidirectional_attention"] = None
    if "per_layer_config" in content:
        _unify_layers(content)
    elif not content.get("attention_k_eq_v"):
        content["num_global_key_value_heads"] = None


def _unify_layers(content: dict[str, Any]) -> None:
    """Replace `per_layer_config` by the older keys for layers with full attention."""
    by_layer = content.pop("per_layer_config") or {}
    full = {
        str(index) for index, kind in enumerate(content["layer_types"]) if kind == "full_attention"
    }
    changes: dict[str, Any] = next(iter(by_layer.values()), {})
    if by_layer and (
        {str(index) for index in by_layer} != full
        or any(other != changes for other in by_layer.values())
        or changes.keys() - {"head_dim", "num_key_value_heads"}
    ):
        raise UnsupportedLayerError(f"its per_layer_config is {by_layer}")
    content["global_head_dim"] = changes.get("head_dim")
    content["num_global_key_value_heads"] = changes.get("num_key_value_heads")


def _derive_gemma4(config: Any) -> dict[str, Any]:
    width = getattr(config, "hidden_size_per_layer_input", None)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    unused = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {
        "scaling": 1.0,
        "embedding_scale": config.hidden_size**0.5,
        "rounded_embedding_scale": True,
        "layer_inputs": LayerInputs(config.vocab_size_per_layer_input, width) if width else None,
        "logit_softcap": config.final_logit_softcapping,
        "ignored": tuple(
            f"model.layers.{index}.self_attn.{part}."
            for index in range(first, config.num_hidden_layers)
            for part in unused
        ),
    }


def _gemma4_layers(config: Any) -> list[LayerShape]:
    """Return layers; the last `num_kv_shared_layers` read K and V of earlier layers."""
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedLayerError(f"it has {config.num_experts} experts")
    width = getattr(config, "hidden_size_per_layer_input", None)
    if width and config.vocab_size_per_layer_input < config.vocab_size:
        raise UnsupportedLayerError("vocab_size_per_layer_input is smaller than vocab_size")
    first = config.num_hidden_layers - config.num_kv_shared_layers
    sources = {kind: index for index, kind in enumerate(config.layer_types[: max(first, 0)])}
    layers = []
    for index, kind in enumerate(config.layer_types):
        is_full = kind == "full_attention"
        if index >= first and kind not in sources:
            raise UnsupportedLayerError(
                f"its layer {index} needs K and V of an earlier {kind} layer, but there is none"
            )
        layers.append(
            LayerShape(
                window=None if is_full else config.sliding_window,
                angles=kind,
                kv_heads=config.num_global_key_value_heads if is_full else None,
                head_dim=config.global_head_dim if is_full else None,
                intermediate_size=config.intermediate_size
                * (2 if config.use_double_wide_mlp and index >= first else 1),
                source=sources[kind] if index >= first else None,
                keys_are_values=is_full and config.attention_k_eq_v,
            )
        )
    return layers


_QWEN2 = LLAMA | {
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
_GEMMA2 = LLAMA | {
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
_GEMMA4 = LLAMA | {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
_GEMMA4_FACTS = {
    "norm": "olmo",
    "norms": "around",
    "head_norms": "head",
    "value_norm": True,
    "layer_scalars": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults=LLAMA),
    "mistral": Family(
        defaults=LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        layers=_mistral_layers,
    ),
    "qwen2": Family(
        defaults=_QWEN2,
        facts={"qkv_bias": True, "o_bias": False},
        layers=_qwen_layers,
    ),
    "qwen3": Family(
        defaults=_QWEN2 | {"head_dim": 128},
        facts={"head_norms": "head"},
        layers=_qwen_layers,
    ),
    "smollm3": Family(
        defaults=LLAMA
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
        layers=_smollm3_layers,
    ),
    "gemma2": Family(
        defaults=_GEMMA2,
        facts={"norm": "gemma", "norms": "around"},
        derive=_derive_gemma2,
        layers=_gemma2_layers,
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
        facts={"norm": "gemma", "norms": "around", "head_norms": "head"},
        derive=_derive_gemma3,
        layers=_gemma3_layers,
        prepare=_prepare_gemma3,
    ),
    "gemma4_text": Family(
        defaults=_GEMMA4
        | {
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        facts=_GEMMA4_FACTS,
        derive=_derive_gemma4,
        layers=_gemma4_layers,
        prepare=_prepare_gemma4,
    ),
    "gemma4_unified_text": Family(
        defaults=_GEMMA4 | {"sliding_window": 1024, "max_position_embeddings": 262144},
        facts=_GEMMA4_FACTS,
        derive=_derive_gemma4,
        layers=_gemma4_layers,
        prepare=_prepare_gemma4,
    ),
    "phi3": Family(
        defaults=LLAMA
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
        facts={"fused": True, "partial_rotary": True},
        layers=lambda config: uniform_layers(config, config.sliding_window),
        prepare=_prepare_phi3,
    ),
    "olmo2": Family(
        defaults=LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        facts={"norm": "olmo", "norms": "after", "head_norms": "row", "exact_angles": True},
    ),
    **HYBRIDS,
}
"""Families by transformers' `model_type`."""


class NestedFamily(NamedTuple):
    """The text decoder of a model with several parts. headstart's modules run only the decoder.

    text: the decoder's `model_type`. others: prefixes of the other parts' tensors. tied: the
    default of `tie_word_embeddings`.
    """

    text: str
    others: tuple[str, ...]
    tied: bool = False


_GEMMA_OTHERS = ("vision_tower.", "multi_modal_projector.")
_GEMMA4_OTHERS = (
    *("model.vision_tower.", "model.embed_vision.", "model.vision_embedder."),
    *("model.audio_tower.", "model.embed_audio."),
)
NESTED = {
    "qwen3_5": NestedFamily("qwen3_5_text", ("model.visual.",)),
    "gemma3": NestedFamily(
        "gemma3_text", (*_GEMMA_OTHERS, *(f"model.{name}" for name in _GEMMA_OTHERS)), tied=True
    ),
    "gemma4": NestedFamily("gemma4_text", _GEMMA4_OTHERS, tied=True),
    "gemma4_unified": NestedFamily("gemma4_unified_text", _GEMMA4_OTHERS, tied=True),
}
"""Models with several parts, by transformers' `model_type`."""

MODEL_TYPES = FAMILIES.keys() | NESTED.keys()
"""The `model_type` of every model that runs in headstart's own modules."""
