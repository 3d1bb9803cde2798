"""Loading of a model's tokenizer; errors name the missing or broken file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from headstart.errors import DamagedModelError
from headstart.imports import load_module
from headstart.models.files import find_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""A model's tokenizer. Importing its type takes a second, so only type checkers do it."""

# Files with a vocabulary. Without such a file, transformers does not always raise an error: for
# some architectures it makes a tokenizer with a single token.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
_SETTINGS = "tokenizer_config.json"


def has_vocabulary(folder: Path) -> bool:
    """Return True if a model's folder has a file from which a tokenizer can be made."""
    return any(match for pattern in _VOCABULARIES for match in folder.glob(pattern))


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase | None:
    """Load a model's tokenizer by local path or hub name; None if the model has none.

    Raises `ModelNotFoundError`, `DamagedModelError` for a broken file or settings without a
    vocabulary, or `UnsupportedModelError` for custom code or a missing package.
    """
    folder = find_folder(model)
    has_settings = (folder / _SETTINGS).is_file()
    settings = read_json(folder / _SETTINGS) if has_settings else {}
    if not has_vocabulary(folder):
        if has_settings:
            raise DamagedModelError(
                f"{folder} has a {_SETTINGS} but no vocabulary: none of {', '.join(_VOCABULARIES)}"
            )
        return None
    # transformers takes a second to import.
    loader = load_module("headstart.models.transformers_tools")
    loaded: PreTrainedTokenizerBase = loader.load_auto_tokenizer(folder, settings)
    return loaded
