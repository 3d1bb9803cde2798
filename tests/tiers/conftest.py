"""Fixtures of the tests of tiers."""

from types import SimpleNamespace

import pytest

from tests.tiers.stores import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the time of pauses; event loops of servers in other threads have separate clocks."""
    clock = Clock()
    module = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("headstart.tiers.store.time", module)
    return clock
