"""Silences transformers while it loads; headstart checks and raises what it would print."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

_SILENT = 50  # logging.CRITICAL


@contextmanager
def silence_transformers() -> Iterator[None]:
    """A context without transformers' progress bars and log lines; restores the settings."""
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
