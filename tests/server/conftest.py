"""Servers that the tests of a process share."""

import functools
import ssl
from collections.abc import Iterator

import pytest

from tests.server.running import Running, running
from tests.server.templates import HERMES, THINKING, model_with
from tests.small_demos import ASSETS
from tests.tiny_vision import save_tiny_vision


@pytest.fixture(autouse=True, scope="session")
def _certificates_are_read_once() -> Iterator[None]:
    """Cache the TLS context, as every client loads all authorities in 20 to 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a server of a model whose template has tools in Hermes' format."""
    with running(model_with(HERMES, tmp_path_factory.mktemp("hermes"), source=ASSETS)) as server:
        yield server


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a server of a model whose prompts start its reasoning."""
    folder = tmp_path_factory.mktemp("thinking")
    with running(model_with(THINKING, folder, source=ASSETS)) as server:
        yield server


@pytest.fixture(scope="session")
def image_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a server of a vision model with random weights."""
    with running(save_tiny_vision("llava", tmp_path_factory.mktemp("llava"))) as server:
        yield server
