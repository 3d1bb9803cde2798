"""Silence while transformers loads something: we check and raise what it would print."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

_SILENT = 50  # logging.CRITICAL


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Without transformers' progress bars and log lines; the caller's settings come back."""
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
