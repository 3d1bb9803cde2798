"""The configuration of a dense decoder, read without any code of its architecture."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from headstart.imports import load_module
from headstart.models.families import Family
from headstart.weights.scheme import UnsupportedLayerError

__all__ = ["DenseConfig", "read_config"]


# Null stands for a value derived from others, or for no window and no cap.
_MAY_BE_NULL = frozenset(
    {
        *("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
        *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    }
)


# Keys beside a family's defaults that change nothing here, or are read by name.
_HARMLESS = frozenset(
    {
        *("architectures", "transformers_version", "dtype", "torch_dtype", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "use_mrope", "rope_scaling"),
        *("attention_dropout", "initializer_range", "pretraining_tp", "layer_types", "rope_theta"),
        *("sliding_window", "use_sliding_window", "max_window_layers"),
    }
)
_THETA = 10_000.0  # of rotary positions, where nothing says another
_WINDOWS = frozenset({"full_attention", "sliding_attention"})


class DenseConfig(SimpleNamespace):
    """The keys of a config.json as attributes, for angles that are not scaled."""

    def get_text_config(self) -> "DenseConfig":
        """This one: a dense decoder has no other part."""
        return self


def read_config(family: Family, content: Mapping[str, Any]) -> Any:
    """The content of a config.json, with the family's defaults; raises `UnsupportedLayerError`.

    A `DenseConfig`, or transformers' own for keys that only transformers knows how to read. To
    import it takes a second, which most models need not wait for.
    """
    for name, default in family.defaults.items():
        if name in content:
            _check_type(name, content[name], default)
    prepared = {name: value for name, value in content.items() if name != "model_type"}
    try:
        family.prepare(prepared)
        merged = {**family.defaults, **prepared}
        merged["head_dim"] = merged["head_dim"] or (
            merged["hidden_size"] // merged["num_attention_heads"]
        )
        plain = _read_plain(family, merged)
        if plain is not None:
            return plain
        return load_module("headstart.models.dense.scaled_rotary").RotaryConfig(**merged)
    except (UnsupportedLayerError, MemoryError):
        raise
    # Wrong values raise KeyError, TypeError, ValueError and errors of huggingface_hub's own.
    except Exception as error:
        raise UnsupportedLayerError(f"its configuration is not as expected: {error}") from error


def _read_plain(family: Family, merged: Mapping[str, Any]) -> DenseConfig | None:
    """The configuration; None if it says what is not read here."""
    if merged.keys() - family.defaults.keys() - _HARMLESS:
        return None
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    theta = merged.get("rope_theta", _THETA)
    angles = {"rope_theta": theta, **(merged.get("rope_parameters") or {})}
    kind, theta = angles.pop("rope_type", "default"), angles.pop("rope_theta")
    is_scaled = merged.get("rope_scaling") or angles or kind != "default"
    if is_scaled or type(theta) not in (int, float):
        return None
    layers = merged.get("layer_types")
    if layers is not None and not (
        isinstance(layers, list)
        and len(layers) == merged["num_hidden_layers"]
        and all(isinstance(layer, str) and layer in _WINDOWS for layer in layers)
    ):
        return None
    kept = merged.get("dtype") or merged.get("torch_dtype")
    dtype = getattr(torch, kept, kept) if isinstance(kept, str) else kept
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return None
    found = {"rope_parameters": {"rope_theta": theta, "rope_type": kind}, "layer_types": layers}
    return DenseConfig(**{**merged, **found, "dtype": dtype})


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise `UnsupportedLayerError` for a value of another type than its default."""
    if name == "eos_token_id" or (value is None and name in _MAY_BE_NULL) or default is None:
        return
    wanted = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, wanted) or isinstance(value, bool) is not isinstance(default, bool):
        raise UnsupportedLayerError(f"its configuration has {name} {value!r}")
