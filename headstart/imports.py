"""Imports that take seconds, since they bring torch and transformers, or find nothing."""

import gc
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType, ModuleType

__all__ = ["install", "load_module"]

# transformers imports torchao wherever it is installed: it warns of kernels for other machines, and
# torch of the way in which it registers its classes.
_WARNS_ON_IMPORT = ("torchao", "torch.utils._pytree")
_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def install(extra: str) -> str:
    """What to type for the packages of an extra; the end of an error's text.

    No index has headstart, so `pip install headstart[...]` would find nothing, or another package.
    """
    return f'pip install ".[{extra}]" in the folder of the clone'


def load_module(name: str) -> ModuleType:
    """Import a module without looking for garbage meanwhile, and without others' warnings.

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
        with _silent_packages():
            module = import_module(name)
        if was_enabled:
            _clear_frames()
        return module
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def _silent_packages() -> Iterator[None]:
    """A context in which optional packages log no warning, unless their logger has a level."""
    loggers = [logging.getLogger(name) for name in _WARNS_ON_IMPORT]
    silenced = [logger for logger in loggers if logger.level == logging.NOTSET]
    for logger in silenced:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in silenced:
            logger.setLevel(logging.NOTSET)


def _clear_frames() -> None:
    """Clear the frames that the import left behind, of which some hold themselves.

    Such a one (torch.fx has them) would stay for good with all frames that it was called from: what
    the callers of `load_module` hold, the first engine of a process among it. To collect all
    garbage for that would take several times as long.
    """
    for one in gc.get_objects(generation=0):  # what is older was collected, and is older now
        if type(one) is FrameType and not one.f_code.co_flags & _MAY_GO_ON:
            with suppress(RuntimeError):  # it runs
                one.clear()
