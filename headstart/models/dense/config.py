"""The configuration of a dense decoder, read without any code of its architecture."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from headstart.models.dense.shape import OtherKind
from headstart.models.families import Family

__all__ = ["DenseConfig", "read_config"]


# Null stands for a value derived from others, or for no window and no cap.
_MAY_BE_NULL = frozenset(
    {
        *("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
        *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    }
)


class DenseConfig(PreTrainedConfig):
    """transformers' configuration of no architecture in particular.

    It brings the reading of rotary parameters, old and new, with their checks. All other keys
    become attributes.
    """

    model_type = "headstart_dense"
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int = 2048


def read_config(family: Family, content: Mapping[str, Any]) -> DenseConfig:
    """The content of a config.json, with the family's defaults; raises `OtherKind`."""
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
        return DenseConfig(**merged)
    except OtherKind:
        raise
    # Wrong values raise KeyError, TypeError, ValueError and errors of huggingface_hub's own.
    except Exception as error:
        raise OtherKind(f"its configuration is not as expected: {error}") from error


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise `OtherKind` for a value of another type than its default."""
    if name == "eos_token_id" or (value is None and name in _MAY_BE_NULL) or default is None:
        return
    wanted = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, wanted) or isinstance(value, bool) is not isinstance(default, bool):
        raise OtherKind(f"its configuration has {name} {value!r}")
