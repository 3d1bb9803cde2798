"""Small functions that programs import from vLLM's modules and that need no part of an engine."""

import base64
import gc
import io
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headstart.frontend.images.colours import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["cleanup_dist_env_and_memory", "encode_image_base64", "init_logger"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, give a device's unused memory back, and stop Ray if `shutdown_ray`.

    An `LLM` keeps its memory while the program refers to it, until `close()`.
    """
    if shutdown_ray:
        import_module("ray").shutdown()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name, with `info_once` and the like as in vLLM.

    Its messages go where Python's `logging` is configured to send them.
    """
    logger = logging.getLogger(name)
    if "info_once" not in vars(logger):  # transformers gives all loggers others
        for level in ("debug", "info", "warning", "error"):
            setattr(logger, f"{level}_once", _once(getattr(logger, level)))
    return logger


def _once(log: Callable[..., None]) -> Callable[..., None]:
    """Make a method of a logger that writes equal messages once."""
    written: set[str] = set()

    def log_once(message: str, *args: Any, scope: str = "process") -> None:
        text = message % args if args else message
        if text not in written:
            written.add(text)
            log(message, *args, stacklevel=2)

    return log_once


def encode_image_base64(image: "Image", *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """Return a Pillow image as a file of this format in base64, for a `data:` URL.

    In RGB it is upright and on white where it is transparent, as a model sees it.
    """
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    shown = to_rgb(upright) if image_mode == "RGB" else upright.convert(image_mode)
    file = io.BytesIO()
    shown.save(file, format)
    return base64.b64encode(file.getvalue()).decode()
