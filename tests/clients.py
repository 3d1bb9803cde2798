"""Other people's clients, imported when a test first uses them: each takes seconds and more.

Every process of the tests imports all files of tests, and few of these processes need a client.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["anthropic", "import_quietly", "openai"]


class _ImportedWhenUsed:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for its own in everything it collects
            raise AttributeError(attribute)
        return getattr(import_quietly(self._name), attribute)


def import_quietly(name: str) -> Any:
    """Import a module without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


anthropic: Any = _ImportedWhenUsed("anthropic")
openai: Any = _ImportedWhenUsed("openai")
