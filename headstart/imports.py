"""Imports at run time, of slow modules and optional packages."""

import gc
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType, ModuleType

# transformers imports torchao if it is installed. torchao warns about kernels for other machines.
# torch warns about the way in which torchao registers its classes.
_WARNS_ON_IMPORT = ("torchao", "torch.utils._pytree")
_MAY_CONTINUE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def install(extra: str) -> str:
    """Return the command that installs an extra from the clone: no package index has headstart."""
    return f'pip install ".[{extra}]" in the folder of the clone'


def load_module(name: str) -> ModuleType:
    """Import a module with garbage collection off, and without warnings of optional packages.

    An engine imports about 3,000 modules, whose objects are never freed. Scanning them would take
    a quarter of the import time, and 0.1 s of a later step. So the objects are frozen after the
    import. Garbage is collected before the import.
    """
    if name in sys.modules:
        return import_module(name)  # waits if another thread is importing it
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect()
    gc.disable()
    try:
        with _silent_packages():
            module = import_module(name)
        if was_enabled:
            # Some imports, such as torch.fx's, leave stack frames in reference cycles. A frozen
            # frame would keep its caller's objects alive, such as a process's first engine. So
            # clear these frames. Collecting all garbage would take several times as long.
            for entry in gc.get_objects(generation=0):  # the objects of this import
                if type(entry) is FrameType and not entry.f_code.co_flags & _MAY_CONTINUE:
                    with suppress(RuntimeError):  # the frame is still running
                        entry.clear()
        return module
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def _silent_packages() -> Iterator[None]:
    """Silence warnings of optional packages in a context, unless the user set a level."""
    loggers = [logging.getLogger(name) for name in _WARNS_ON_IMPORT]
    silenced = [logger for logger in loggers if logger.level == logging.NOTSET]
    for logger in silenced:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in silenced:
            logger.setLevel(logging.NOTSET)
