"""Loads a model's tokenizer; names the file that is missing or broken."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.families import FAMILIES
from headstart.models.files import find_folder, read_json
from headstart.models.silence_transformers import silence_transformers

__all__ = ["load_tokenizer"]

# Each of these files holds a vocabulary. Without one transformers does not always raise: for some
# architectures it makes a tokenizer of a single token.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
_SETTINGS = "tokenizer_config.json"


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase | None:
    """Load a model's tokenizer by local path or hub name; None if the model has none.

    Raises `ModelNotFoundError` (no such folder, no such name, no network), `DamagedModelError`
    (a file is broken, or there are settings without a vocabulary) or `UnsupportedModelError` (it
    needs code of its own, or a package that is missing).
    """
    folder = find_folder(model)
    has_settings = (folder / _SETTINGS).is_file()
    settings = read_json(folder / _SETTINGS) if has_settings else {}
    if not any(found for pattern in _VOCABULARIES for found in folder.glob(pattern)):
        if has_settings:
            raise DamagedModelError(
                f"{folder} has a {_SETTINGS} but no vocabulary: none of {', '.join(_VOCABULARIES)}"
            )
        return None
    own_code = settings.get("auto_map") or {}  # older ones hold the tokenizer's names alone
    named = _name_architecture(folder) if settings.get("tokenizer_class") else {}
    return _load(folder, isinstance(own_code, list) or "AutoTokenizer" in own_code, named)


def _name_architecture(folder: Path) -> dict[str, Any]:
    """AutoTokenizer's argument `config`, if the architecture is one that has no code to import.

    transformers only looks at the names in it where the tokenizer's class is known, and takes
    seconds to import the architecture's own configuration.
    """
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        return {}
    config: Any = PreTrainedConfig()
    config.tokenizer_class = content.get("tokenizer_class")
    config.model_type, config._name_or_path = kind, str(folder)
    return {"config": config}


def _load(folder: Path, needs_own_code: bool, named: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        with silence_transformers():
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **named
            )
    # transformers raises KeyError, TypeError, ValueError, OSError; tokenizers a bare Exception.
    except Exception as error:
        reason = " ".join(str(error).split())
        if needs_own_code:
            raise UnsupportedModelError(
                f"the tokenizer in {folder} brings code of its own, which is not run"
            ) from error
        if (folder / "tokenizer.json").is_file():
            read_json(folder / "tokenizer.json")  # raises if this is the reason
        elif isinstance(error, ImportError) or "sentencepiece" in reason:
            raise UnsupportedModelError(
                f"the tokenizer in {folder} has no tokenizer.json and cannot be converted: {reason}"
            ) from error
        raise DamagedModelError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded
