"""Public prefixes: what prompts of all tenants may begin with, read from the operator's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.errors import ConfigError, HeadstartError
from headstart.validation import describe

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM

__all__ = ["publish", "read_prefixes"]

Prefix = str | list[int]


def read_prefixes(files: Sequence[str]) -> dict[str, Prefix]:
    """The prefix in each file: token ids of a `.json`, or a text.

    A line end that closes the text is the editor's and left out. Raises ConfigError.
    """
    return {name: _read(Path(name)) for name in files}


def _read(file: Path) -> Prefix:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"public_prefix {str(file)!r} cannot be read: {error}") from error
    if file.suffix != ".json":
        return text.removesuffix("\n").removesuffix("\r")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"public_prefix {str(file)!r} is no JSON: {error}") from error
    if not isinstance(content, list) or not all(type(token_id) is int for token_id in content):
        raise ConfigError(
            f"public_prefix {str(file)!r} has {describe(content)}; allowed: a list of token ids"
        )
    return content


def publish(llm: AsyncLLM, prefixes: Mapping[str, Prefix]) -> None:
    """Let tenants share the prefixes. Raises ConfigError for one that has nothing to share."""
    for name, prefix in prefixes.items():
        try:
            count = llm.publish(prefix)
        except HeadstartError as error:
            raise ConfigError(f"public_prefix {name!r} cannot be used: {error}") from error
        if not count:
            raise ConfigError(
                f"public_prefix {name!r} is shorter than a block; allowed: at least "
                f"{llm.block_size} tokens"
            )
