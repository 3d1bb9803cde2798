"""One server for the tests of a process."""

from collections.abc import Iterator

import pytest

from tests.server.running import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as server:
        yield server
