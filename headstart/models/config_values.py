"""The numbers of a config.json: checks before anything is built from them, and the context length.

A model with a billion layers would take minutes to build and fail; one with zero layers would
answer from its embeddings alone. The keys are those of transformers' configurations, at any depth:
a model of several parts has a configuration for each.
"""

from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headstart.errors import DamagedModelError

__all__ = [
    "LAYER_COUNTS",
    "WIDTHS",
    "check_experts",
    "check_values",
    "context_bound",
    "context_length",
    "find_values",
]


# Configuration keys for the longest sequence, in order of preference.
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_UNKNOWN_LENGTH = 2048
_MOST_TOKENS = 1 << 31  # a factor may be infinite


class Config(Protocol):
    """The part of transformers' configuration that is read here."""

    def get_text_config(self) -> Any: ...


def context_length(config: Config) -> int:
    """The number of positions that a model supports.

    If the rotary frequencies depend on the length of the longest sequence in the batch (`longrope`,
    `dynamic`), K of a prefix would depend on later tokens and on other requests. Such a model is
    used up to the length for which the frequencies are constant.
    """
    text = config.get_text_config()
    length = _UNKNOWN_LENGTH
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            length = value
            break
    for rope in _rope_parameters(text):
        original = rope.get("original_max_position_embeddings")
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic") and original:
            length = min(length, int(original))
        elif kind == "yarn" and original:
            length = max([length, *map(int, _stretched(rope))])
    return length


def context_bound(content: Mapping[str, Any]) -> int | None:
    """A length that `context_length` does not exceed; None where a config.json does not say.

    For what is to be known before a model is loaded: it needs no code of the architecture.
    """
    nested = content.get("text_config")
    found: list[float] = []
    for part in (content, nested if isinstance(nested, Mapping) else {}):
        found += [part[name] for name in _LENGTH_NAMES if isinstance(part.get(name), int)]
        for name in ("rope_scaling", "rope_parameters"):
            found += _stretched(part.get(name))
    return int(max(found)) if found else None


def _stretched(rope: object) -> list[float]:
    """The length that rotary parameters stretch the first one to, if they do."""
    if not isinstance(rope, Mapping):
        return []
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor", 1.0)
    is_given = isinstance(original, int) and isinstance(factor, (int, float))
    here = [original * factor] if is_given and original * factor < _MOST_TOKENS else []
    return here + [length for value in rope.values() for length in _stretched(value)]


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One dict per kind of layer, or one for all layers."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


class _Range(NamedTuple):
    """An allowed range; both ends are included."""

    least: int
    most: int


_MOST_LAYERS = 100_000
_MOST_HEADS = 1 << 16
_MOST_WIDTH = 1 << 24
_MOST_TOKENS = 1 << 31

LAYER_COUNTS = frozenset(
    {
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
        *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    }
)
"""The keys of layer counts."""

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads")
WIDTHS = frozenset({"hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "ffn_dim"})
"""The keys of layer widths."""

_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
_ASKED = "num_experts_per_tok"  # a dense model of a family with experts may have zeros

# Keys below these are the user's own words or options of `generate`: a label may be "depth".
_FREE_NAMES = frozenset({"label2id", "id2label", "task_specific_params"})

_RANGES: dict[str, _Range] = {
    **dict.fromkeys(LAYER_COUNTS, _Range(1, _MOST_LAYERS)),
    **dict.fromkeys(_HEADS, _Range(1, _MOST_HEADS)),
    **dict.fromkeys(WIDTHS, _Range(1, _MOST_WIDTH)),
    **dict.fromkeys((*_EXPERTS, _ASKED), _Range(0, _MOST_HEADS)),
    "moe_intermediate_size": _Range(0, _MOST_WIDTH),
    "eos_token_id": _Range(-1, _MOST_TOKENS),  # -1: none
    "vocab_size": _Range(1, _MOST_TOKENS),
    "max_position_embeddings": _Range(1, _MOST_TOKENS),
    "n_positions": _Range(1, _MOST_TOKENS),
}


def check_values(file: Path, content: Mapping[str, Any]) -> None:
    """Raise `DamagedModelError` for the first number of a configuration outside its range."""
    for name, value in find_values(content, _RANGES.keys()):
        least, most = _RANGES[name.rpartition(".")[2]]
        if type(value) is not int or not least <= value <= most:
            raise DamagedModelError(
                f"{file}: {name} is {value!r}; it must be an integer from {least} to {most}"
            )


def check_experts(file: Path, content: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise `DamagedModelError` if a part has experts, and a token is to ask none of them.

    tensors: the names of all tensors. They tell for a part that does not say how many it has.
    """
    counts = [(name.rpartition(".")[0], count) for name, count in find_values(content, _EXPERTS)]
    for name, asked in find_values(content, {_ASKED}):
        own = [count for part, count in counts if part == name.rpartition(".")[0]]
        has_experts = any(own) if own else any("experts." in tensor for tensor in tensors)
        if asked == 0 and has_experts:
            raise DamagedModelError(
                f"{file}: {name} is 0, and the model has experts; it must be at least 1"
            )


def find_values(content: Mapping[str, Any], keys: Set[str]) -> Iterator[tuple[str, Any]]:
    """The values under these keys by dotted name, in nested objects too.

    Each element of a list (one number per layer) is yielded separately. Nulls are left out, and so
    are objects with free keys: the names of labels and of tasks.
    """
    left: list[tuple[str, Mapping[str, Any]]] = [("", content)]
    while left:
        prefix, part = left.pop()
        for key, value in part.items():
            if key in _FREE_NAMES:
                continue
            if isinstance(value, Mapping):
                left.append((f"{prefix}{key}.", value))
            elif key in keys:
                elements = value if isinstance(value, list) else [value]
                yield from ((f"{prefix}{key}", found) for found in elements if found is not None)
