"""Checks of the numbers in a config.json, and the context length.

Numbers are checked before a model is built: a billion layers would take minutes to fail, and zero
layers would give wrong answers. Keys have transformers' names. They are checked at any depth, since
a model with several parts has a configuration for each part.
"""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from headstart.errors import DamagedModelError

# Configuration keys for the longest sequence, in order of preference.
_LENGTH_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("seq_length", "n_ctx"),
)
_UNKNOWN_LENGTH = 2048
# Largest number of tokens. Rotary scaling beyond it is ignored, since the factor in a damaged file
# may be infinite.
_MAX_TOKENS = 1 << 31


def context_length(config: Any) -> int:
    """Return the number of positions that a model with this transformers configuration supports.

    With rotary types `longrope` and `dynamic`, a sequence beyond the original length changes the
    frequencies of all rows in the batch. K of a prefix would depend on later tokens and on other
    requests, so the context ends at the original length.
    """
    text = config.get_text_config()
    values = (getattr(text, name, None) for name in _LENGTH_NAMES)
    length = next((v for v in values if isinstance(v, int) and v > 0), _UNKNOWN_LENGTH)
    ropes = getattr(text, "rope_parameters", None)
    ropes = ropes if isinstance(ropes, dict) else {}
    for rope in [part for part in ropes.values() if isinstance(part, dict)] or [ropes]:
        original = rope.get("original_max_position_embeddings")
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic") and original:
            length = min(length, int(original))
        elif kind == "yarn" and original:
            length = max([length, *map(int, _extended_lengths(rope))])
    return length


def context_bound(content: Mapping[str, Any]) -> int | None:
    """Return an upper bound of `context_length` from a raw config.json; None without a length.

    Works without transformers' class for the architecture.
    """
    nested = content.get("text_config")
    lengths: list[float] = []
    for part in (content, nested if isinstance(nested, Mapping) else {}):
        lengths += [part[name] for name in _LENGTH_NAMES if isinstance(part.get(name), int)]
        for name in ("rope_scaling", "rope_parameters"):
            lengths += _extended_lengths(part.get(name))
    return int(max(lengths)) if lengths else None


def _extended_lengths(rope: object) -> list[float]:
    """Return the context lengths that scaled rotary parameters allow."""
    if not isinstance(rope, Mapping):
        return []
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor", 1.0)
    is_scaled = isinstance(original, int) and isinstance(factor, (int, float))
    lengths = [original * factor] if is_scaled and original * factor < _MAX_TOKENS else []
    return lengths + [length for value in rope.values() for length in _extended_lengths(value)]


_MAX_LAYERS = 100_000
_MAX_HEADS = 1 << 16
_MAX_WIDTH = 1 << 24

LAYER_COUNTS = frozenset(
    {
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
        *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    }
)
"""Keys whose values are numbers of layers."""

_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"),
    "num_global_key_value_heads",
)
WIDTHS = frozenset(
    {
        *("hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "ffn_dim"),
        "global_head_dim",
    }
)
"""Keys whose values are widths of layers."""

# All may be 0 in a dense model of a family with experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")

# Objects whose keys are arbitrary names: a label may be called "depth".
_FREE_NAMES = frozenset({"label2id", "id2label", "task_specific_params"})

_RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(LAYER_COUNTS, (1, _MAX_LAYERS)),
    **dict.fromkeys(_HEADS, (1, _MAX_HEADS)),
    **dict.fromkeys(WIDTHS, (1, _MAX_WIDTH)),
    **dict.fromkeys(_EXPERTS, (0, _MAX_HEADS)),
    **dict.fromkeys(("moe_intermediate_size", "hidden_size_per_layer_input"), (0, _MAX_WIDTH)),
    "num_kv_shared_layers": (0, _MAX_LAYERS),
    "eos_token_id": (-1, _MAX_TOKENS),  # -1: none
    "vocab_size": (1, _MAX_TOKENS),
    "max_position_embeddings": (1, _MAX_TOKENS),
    "n_positions": (1, _MAX_TOKENS),
}


def check_values(file: Path, content: Mapping[str, Any]) -> None:
    """Raise `DamagedModelError` if a number in a configuration is outside its range."""
    for name, value in find_values(content, _RANGES.keys()):
        minimum, maximum = _RANGES[name.rpartition(".")[2]]
        if type(value) is not int or not minimum <= value <= maximum:
            raise DamagedModelError(
                f"{file}: {name} is {value!r}; allowed: an integer from {minimum} to {maximum}"
            )


def find_values(content: Mapping[str, Any], keys: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each of these keys, in nested objects too.

    The elements of a list are yielded separately. Nulls are left out, and so are objects whose keys
    are arbitrary names.
    """
    parts: list[tuple[str, Mapping[str, Any]]] = [("", content)]
    while parts:
        prefix, part = parts.pop()
        for key, value in part.items():
            if key in _FREE_NAMES:
                continue
            if isinstance(value, Mapping):
                parts.append((f"{prefix}{key}.", value))
            elif key in keys:
                elements = value if isinstance(value, list) else [value]
                yield from ((f"{prefix}{key}", item) for item in elements if item is not None)
