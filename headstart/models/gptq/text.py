"""The text that shows what a model's layers are given: windows of its tokens."""

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.errors import ConfigError
from headstart.models.silence_transformers import silence_transformers

__all__ = ["cut_windows", "describe_text", "read_text"]

LENGTH = 512  # tokens of a window
_MOST = 32  # windows
_LEAST = 4
_CHARACTERS = 4_000_000


def describe_text(file: Path | None) -> str:
    """What a text is called."""
    return "Python's help topics" if file is None else str(file)


def read_text(file: Path | None) -> str:
    """The text of a file, its first 4 million characters, or of the topics of Python's `help()`.

    Raises `ConfigError` for a file that cannot be read, or is not UTF-8.
    """
    if file is None:
        try:
            topics: dict[str, str] = import_module("pydoc_data.topics").topics
        except ImportError as error:
            raise ConfigError(
                "this Python has no help topics to calibrate on: give --text"
            ) from error
        return "\n\n".join(topics.values())
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(_CHARACTERS)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"text {file} cannot be read: {why}; allowed: a file in UTF-8") from error


def cut_windows(text: str, told: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Tensor:
    """Windows int64 `[windows, tokens]` from all over the text, at most 32 of 512 tokens.

    Each begins with the token that the tokenizer puts before a text, if any. longest: tokens of the
    model's context. Raises `ConfigError` for a text of fewer than 2,048 tokens.
    """
    with silence_transformers():  # it warns of texts that are longer than the context
        lead = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
        tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    length = max(1, min(LENGTH, longest) - len(lead))
    least = _LEAST * LENGTH
    if len(tokens) < least:
        raise ConfigError(f"{told} has {len(tokens):,} tokens; allowed: {least:,} and more")
    whole = len(tokens) // length
    count = min(whole, _MOST * LENGTH // length)
    starts = [at * whole // count * length for at in range(count)]
    cut = torch.stack([tokens[at : at + length] for at in starts])
    return torch.cat((torch.tensor(lead, dtype=torch.int64).expand(count, -1), cut), dim=1)
