"""vLLM's small functions behave as in vLLM."""

import base64
import gc
import io
import logging
import weakref
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headstart import envs
from headstart.distributed import cleanup_dist_env_and_memory
from headstart.logger import init_logger
from headstart.multimodal.utils import encode_image_base64


class Records(logging.Handler):
    """A handler that stores its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_logger_writes_equal_messages_once() -> None:
    logger: Any = init_logger("some.program")
    assert logger is init_logger("some.program") is logging.getLogger("some.program")
    handler = Records()
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    logger.info("read %d", 1)
    for number in (1, 1, 2):
        logger.info_once("read %d", number)
        logger.warning_once("careful", scope="local")
    messages = [record.getMessage() for record in handler.records]
    assert messages == ["read 1", "read 1", "careful", "read 2"]
    names = {record.funcName for record in handler.records}
    assert names == {"test_a_logger_writes_equal_messages_once"}


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_is_encoded_as_a_model_sees_it(form: str) -> None:
    clear = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    clear.getexif()[0x0112] = 6  # to be turned by 90 degrees
    file = io.BytesIO(base64.b64decode(encode_image_base64(clear, format=form)))
    encoded = Image.open(file)
    assert (encoded.format, encoded.mode, encoded.size) == (form, "RGB", (2, 4))
    assert np.asarray(encoded).min() == 255


def test_an_image_is_encoded_in_another_mode() -> None:
    clear = Image.new("RGBA", (4, 2), (255, 0, 0, 9))
    data = base64.b64decode(encode_image_base64(clear, image_mode="RGBA"))
    assert Image.open(io.BytesIO(data)).tobytes() == clear.tobytes()


def test_cleaning_up_collects_garbage() -> None:
    class Node:
        itself: "Node"

    node = Node()
    node.itself = node
    reference = weakref.ref(node)
    gc.disable()
    try:
        del node
        cleanup_dist_env_and_memory()
    finally:
        gc.enable()
    assert reference() is None


def test_a_variable_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_NATIVE", raising=False)
    assert (envs.HEADSTART_NATIVE, envs.is_set("HEADSTART_NATIVE")) == ("1", False)
    monkeypatch.setenv("HEADSTART_NATIVE", "0")
    assert (envs.HEADSTART_NATIVE, envs.is_set("HEADSTART_NATIVE")) == ("0", True)
