"""The longest sequence that a model supports, from its configuration."""

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["context_bound", "context_length"]

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
