"""Deadlines of operations with several calls: images, resets, and closing."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.tiers.disk import DiskStore
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import Faults
from headstart.tiers.transfers import OBJECT_BLOCK, OBJECTS, Loader, ObjectStore, Saver
from headstart.tiers.worker import GuardedStore, StoreChain
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, blocks, disk, held, name, names
from tests.tiers.test_threads import FOREVER, Gate, Store, call, everything


def test_an_image_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: Callable[..., None]
) -> None:
    """Regression: its parts are loaded by three calls, each of which waited for a deadline."""
    limits(deadline=0.3)
    with closing(DiskStore(tmp_path, OBJECTS, 1 << 30)) as disk:
        store = GuardedStore(disk)
        saver = Saver(StoreChain([store]), 1 << 30, Faults("a test"))
        objects = ObjectStore([store], saver)
        objects.save(b"image", bytes(3 * OBJECT_BLOCK), 0.5)
        assert saver.flush(FOREVER) and call(lambda job: objects.load(b"image", job)) is not None
        find, load = disk.find, disk.load
        monkeypatch.setattr(disk, "find", lambda names: time.sleep(0.2) or find(names))
        monkeypatch.setattr(disk, "load", lambda names: time.sleep(0.2) or load(names))
        assert call(lambda job: objects.load(b"image", job)) is None
        assert store.faults.counts == {"it does not answer": 1}
        saver.close(FOREVER)


def test_calls_that_are_late_together_are_a_miss(limits: Callable[..., None]) -> None:
    gate = Gate("load")
    limits(deadline=0.01)
    store = GuardedStore(Store(gate))
    result = call(lambda job: store.call(job, lambda s: s.find([]) + len(list(s.load([]))), None))
    assert result is None
    assert store.faults.counts == {"it does not answer": 1} and store.is_stuck
    gate.opened.set()


def test_a_reset_may_take_longer_than_a_lookup(limits: Callable[..., None]) -> None:
    limits(deadline=0.01)
    gate = Gate("clear")
    store = GuardedStore(Store(gate))
    threading.Timer(0.2, gate.opened.set).start()
    assert call(store.clear)


def test_a_server_removes_many_keys_at_once() -> None:
    pytest.importorskip("redis")
    orders: list[tuple[bytes, ...]] = []
    store = RemoteStore("redis://127.0.0.1:1", MODEL)
    keys = [b"prefix " + name(number) for number in range(2500)]
    store._client = SimpleNamespace(
        scan_iter=lambda **_: iter(keys), unlink=lambda *some: orders.append(some)
    )
    assert store.clear()
    assert [key for some in orders for key in some] == keys
    assert len(orders) == 3


def test_a_late_call_opens_nothing_of_a_closed_folder(tmp_path: Path) -> None:
    store = disk(tmp_path)
    assert store.save(blocks(range(4))) == 4
    store.close()
    assert store.find(names(range(4))) == held(store, range(4)) == 0
    assert store.save(blocks(range(4, 8))) == store.remove(names(range(4))) == 0
    assert not store.clear()
    store.touch(names(range(4)))
    store.forget_damaged(names(range(4)))
    assert not store._files and not store._indexes
    assert not store.faults.counts
    with closing(disk(tmp_path)) as again:
        assert held(again, range(8)) == 4


def test_a_store_with_a_late_call_is_closed_once_that_returns(limits: Callable[..., None]) -> None:
    gate, closed = Gate("find"), threading.Event()
    store = GuardedStore(Store(lambda method: closed.set() if method == "close" else gate(method)))
    limits(deadline=0.01)
    assert not call(lambda job: store.find(names(range(9)), job))
    store.close(0.0)
    assert not closed.wait(0.05), "a call is in it"
    gate.opened.set()
    assert closed.wait(FOREVER)


def test_a_store_is_not_closed_during_a_load() -> None:
    """Otherwise a file would be closed while a thread reads it."""
    gate, closed = Gate("block"), threading.Event()
    inner = Store(lambda method: closed.set() if method == "close" else gate(method))
    store = GuardedStore(inner)
    loader = Loader(StoreChain([store]), 1 << 20, lambda count: FOREVER, Faults("a test"))
    loader.start(names(range(3)), everything)
    assert gate.reached.wait(FOREVER)
    loader.close(0.0)
    store.close(0.0)
    assert not closed.wait(0.05)
    gate.opened.set()
    assert closed.wait(FOREVER)


def test_closing_has_one_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, allowed = 1000.0, []

    def close(timeout: float) -> None:
        nonlocal now
        allowed.append(timeout)
        now += 4.0

    with closing(make_llm(save_smallest(tmp_path / "m"), cache_dir=str(tmp_path / "k"))) as llm:
        tiers = llm.engine.tiers
        assert tiers is not None
        with monkeypatch.context() as patch:
            clock = SimpleNamespace(monotonic=lambda: now)
            patch.setattr("headstart.engine.tiering.tiers.time", clock)
            stores = (*tiers._tiers, *tiers._object_tiers)
            for part in (*tiers._savers, tiers._loader, *stores):
                patch.setattr(part, "close", close)
            tiers.close()
    assert allowed == [10.0, 6.0, 2.0, 0.0, 0.0]


def test_repeated_closes_of_an_engine_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its driver closes it twice, and the exit of Python once more: 30 s for a silent store."""
    now, waited = 100.0, []

    def close(loader: Loader, timeout: float) -> None:
        nonlocal now
        waited.append(timeout)
        now += timeout  # its thread never returns from the store

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now, time=lambda: now)
    monkeypatch.setattr("headstart.engine.tiering.tiers.time", clock)
    monkeypatch.setattr(Loader, "close", close)
    llm = make_llm(save_smallest(tmp_path / "model"), cache_dir=str(tmp_path / "kept"))
    llm.close()
    llm.close()
    assert waited[0] == 10.0 and len(waited) > 1 and set(waited[1:]) == {0.0}
