"""Counterpart of `vllm.logger`, for programs written for vLLM."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name, with `debug_once`, `info_once`, `warning_once`, `error_once`.

    Python's `logging` configuration decides where the messages go.
    """
    logger = logging.getLogger(name)
    # `hasattr` would find the methods that transformers adds to the class `Logger`.
    if "info_once" not in vars(logger):
        for level in ("debug", "info", "warning", "error"):
            setattr(logger, f"{level}_once", _log_once(getattr(logger, level)))
    return logger


def _log_once(log: Callable[..., None]) -> Callable[..., None]:
    """Return a logger method that logs equal messages once."""
    log_text = cache(lambda text: log("%s", text, stacklevel=3))

    def log_once(message: str, *args: Any, scope: str = "process") -> None:
        log_text(message % args if args else message)

    return log_once
