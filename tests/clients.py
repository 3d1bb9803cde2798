"""Clients of other projects, imported on first use, as each import takes seconds.

Every test process imports all test files, but few processes need a client.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["anthropic", "import_quietly", "openai"]


class _ImportedWhenUsed:
    """A stand-in for a module, which is imported when an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest reads attributes of everything it collects
            raise AttributeError(attribute)
        return getattr(import_quietly(self._name), attribute)


def import_quietly(name: str) -> Any:
    """Import a module without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


anthropic: Any = _ImportedWhenUsed("anthropic")
openai: Any = _ImportedWhenUsed("openai")
