"""Counterpart of `vllm.multimodal.utils`, for programs written for vLLM."""

import base64
import io
from typing import TYPE_CHECKING

from headstart.frontend.images.decoding import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["encode_image_base64"]


def encode_image_base64(image: "Image", *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """Return a Pillow image as a file of this format in base64, for a `data:` URL.

    The image is rotated as its EXIF data says. In RGB, transparent parts become white, as in the
    input of a model.
    """
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    converted = to_rgb(upright) if image_mode == "RGB" else upright.convert(image_mode)
    file = io.BytesIO()
    converted.save(file, format)
    return base64.b64encode(file.getvalue()).decode()
