"""Imports that take seconds, since they bring torch and transformers, or find nothing."""

import gc
import sys
from importlib import import_module
from types import ModuleType

__all__ = ["install", "load_module"]


def install(extra: str) -> str:
    """What to type for the packages of an extra; the end of an error's text.

    No index has headstart, so `pip install headstart[...]` would find nothing, or another package.
    """
    return f'pip install ".[{extra}]" in the folder of the clone'


def load_module(name: str) -> ModuleType:
    """Import a module without looking for garbage meanwhile.

    What 3,000 modules define stays for good. Looking through it again and again took a quarter of
    the time, and every full collection later, 0.1 s in the middle of some step: so it is set aside.
    What was garbage by then would stay for good as well: it is collected before.
    """
    if name in sys.modules:
        return import_module(name)  # waits, where another thread is still at it
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
