"""Loading of tokenizers through transformers; importing this module takes a second."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.families import MODEL_TYPES
from headstart.models.files import read_json

_SILENT = 50  # logging.CRITICAL


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and log lines in a context."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_ENCODING = ("__call__", "_encode_plus", "encode")


def load_auto_tokenizer(folder: Path, settings: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder with a vocabulary. settings: its tokenizer_config.json.

    Raises `DamagedModelError` or `UnsupportedModelError`.
    """
    custom_code = settings.get("auto_map") or {}  # a list in old files
    needs_custom_code = isinstance(custom_code, list) or "AutoTokenizer" in custom_code
    options = _config_option(folder) if settings.get("tokenizer_class") else {}
    try:
        with silence_transformers():
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
    # transformers raises KeyError, TypeError, ValueError, OSError; tokenizers a bare Exception.
    except Exception as error:
        reason = " ".join(str(error).split())
        if needs_custom_code:
            raise UnsupportedModelError(
                f"the tokenizer in {folder} needs custom code, which is not run"
            ) from error
        if (folder / "tokenizer.json").is_file():
            read_json(folder / "tokenizer.json")  # raises a better error if it is not JSON
        elif isinstance(error, ImportError) or "sentencepiece" in reason:
            raise UnsupportedModelError(
                f"the tokenizer in {folder} has no tokenizer.json and cannot be converted: {reason}"
            ) from error
        raise DamagedModelError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded


class RotaryConfig(PreTrainedConfig):
    """A configuration for any architecture. transformers checks its rotary parameters.

    All keys become attributes.
    """

    model_type = "headstart_dense"
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int = 2048


def _config_option(folder: Path) -> dict[str, Any]:
    """Return the argument `config` for AutoTokenizer if headstart's own modules run the model.

    Without this argument, transformers imports the architecture's configuration, which takes
    seconds.
    """
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        return {}
    config: Any = PreTrainedConfig()
    config.tokenizer_class = content.get("tokenizer_class")
    config.model_type, config._name_or_path = kind, str(folder)
    return {"config": config}


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the tokenizer of the package `tokenizers`; None unless it alone determines the ids."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    classes = takewhile(lambda kind: kind is not PreTrainedTokenizerFast, type(tokenizer).__mro__)
    backend = tokenizer.backend_tokenizer
    is_changed = any(name in vars(kind) for kind in classes for name in _ENCODING)
    is_set = backend.truncation is not None or backend.padding is not None
    if is_changed or is_set or backend.encode_special_tokens != tokenizer.split_special_tokens:
        return None
    return backend
