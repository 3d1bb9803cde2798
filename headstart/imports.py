"""Imports that bring torch and transformers with them: two seconds and more."""

import gc
import sys
from importlib import import_module
from types import ModuleType

__all__ = ["load_module"]


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
