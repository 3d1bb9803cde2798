"""Threads that save and load: no call waits for ever, whatever stores, closes and cancels do."""

import gc
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headstart.cache import BlockHash
from headstart.tiers.store import BlockStore, Faults, LoadedBlock, StoredBlock
from headstart.tiers.transfers import Loader, LoadJob, Saver
from headstart.tiers.worker import GuardedStore, Job, StoreChain, Worker
from tests.tiers.stores import MODEL, block, blocks, name, names, payload

FOREVER = 20.0  # seconds that nothing here takes
SIZE = MODEL.block_bytes
ERRORS = [RuntimeError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit]


class Store(BlockStore):
    """A store that has every block.

    before: called with a method's name when it begins, and with each block.
    """

    tier = "test"
    block_seconds = 0.0

    def __init__(self, before: Callable[[str], None] = lambda method: None) -> None:
        self.before = before
        self.faults = Faults("a test's store")
        self.saved: list[BlockHash] = []
        self.touched: list[BlockHash] = []
        self.numbers = {name(number): number for number in range(200)}

    def find(self, names: Sequence[BlockHash]) -> int:
        self.before("find")
        return len(names)

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        self.before("load")
        for one in names:
            self.before("block")
            yield LoadedBlock("test", memoryview(payload(self.numbers[one])))

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        self.before("save")
        self.saved += [block.name for block in blocks]
        return len(blocks)

    def touch(self, names: Sequence[BlockHash]) -> None:
        self.before("touch")
        self.touched += names

    def clear(self) -> bool:
        self.before("clear")
        return True

    def close(self) -> None:
        self.before("close")


class Gate:
    """A gate that holds a thread at a method until it is opened."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, method: str) -> None:
        if method == self.method:
            self.reached.set()
            assert self.opened.wait(FOREVER)


def fails_once(method: str, error: type[BaseException]) -> Callable[[str], None]:
    errors = iter([error("on purpose")])

    def before(reached: str) -> None:
        if reached == method and (error := next(errors, None)) is not None:
            raise error

    return before


def everything(count: int) -> int:
    return count


def arrived(loader: Loader, job: LoadJob) -> int:
    """Take all blocks of a job, before all others; return how many there were."""
    loader.prefer(job)
    count = 0
    while True:
        done = job.done
        if taken := len(loader.take(job, 3)):
            count += taken
        elif done:
            return count
        else:
            loader.wait(FOREVER)


@contextmanager
def ending(name: str) -> Iterator[None]:
    """Wait for the threads of this name that began within the block, also abandoned ones."""
    earlier = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - earlier:
        if thread.name == name:
            thread.join(FOREVER)
            assert not thread.is_alive()


def call(work: Callable[[Job], Any]) -> Any:
    """Return the result of store calls that a worker makes."""
    return Worker("a test", Faults("a test"), "a call failed").call(work, None)


def guarded(*stores: BlockStore | GuardedStore) -> StoreChain:
    return StoreChain(
        [one if isinstance(one, GuardedStore) else GuardedStore(one) for one in stores]
    )


@contextmanager
def loading(
    store: BlockStore | GuardedStore,
    max_bytes: int = 1 << 20,
    compute: Callable[[int], float] = lambda blocks: FOREVER,
    faults: Faults | None = None,
) -> Iterator[Loader]:
    loader = Loader(guarded(store), max_bytes, compute, faults or Faults("a test"))
    with ending("headstart-load"):
        try:
            yield loader
        finally:
            loader.close(FOREVER)


@contextmanager
def saving(
    store: BlockStore, max_bytes: int = 1 << 20, faults: Faults | None = None
) -> Iterator[Saver]:
    saver = Saver(guarded(store), max_bytes, faults or Faults("a test"))
    with ending("headstart-saver"):
        try:
            yield saver
        finally:
            saver.close(FOREVER)


@pytest.fixture(autouse=True)
def small_chunks(limits: Callable[..., None]) -> None:
    limits(chunk_bytes=2 * SIZE)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["find", "load", "block"])
def test_a_failed_load_ends_and_the_next_one_runs(method: str, error: type[BaseException]) -> None:
    with loading(Store(fails_once(method, error))) as loader:
        first, second = (loader.start(names(range(20)), everything) for _ in range(2))
        assert arrived(loader, first) < 20
        assert arrived(loader, second) == 20


def test_the_choice_of_blocks_may_fail(logged: list[logging.LogRecord]) -> None:
    with loading(Store()) as loader:
        assert arrived(loader, loader.start(names(range(9)), lambda found: 1 // 0)) == 0
        assert arrived(loader, loader.start(names(range(9)), lambda found: 4)) == 4
    assert any("a load failed" in record.getMessage() for record in logged)


def fail(method: str) -> None:
    raise RuntimeError(f"{method}, on purpose")


def test_errors_of_a_store_are_logged_once_a_minute(logged: list[logging.LogRecord]) -> None:
    """Regression: every load and every save logged a line with its traceback."""
    faults = Faults("a test")
    with loading(Store(fail), faults=faults) as loader, saving(Store(fail), faults=faults) as saver:
        for number in range(20):
            assert arrived(loader, loader.start(names(range(9)), everything)) == 0
            saver.offer([block(number)])
            assert saver.flush(FOREVER)
        assert faults.counts == {"a load failed": 20, "blocks could not be saved": 20}
    lines = [record.getMessage() for record in logged]
    assert len(lines) == 2 and all("on purpose" in line for line in lines)


@pytest.mark.parametrize("method", ["find", "load", "block"])
def test_a_loader_is_closed_while_a_store_blocks(method: str) -> None:
    gate = Gate(method)
    with loading(Store(gate)) as loader:
        jobs = [loader.start(names(range(20)), everything) for _ in range(3)]
        assert gate.reached.wait(FOREVER)
        loader.close(0.0)
        assert all(job.done for job in jobs), "they are over"
        assert loader.start(names(range(3)), everything).done
        loader.wait(FOREVER)
        gate.opened.set()


def test_a_loader_is_closed_while_it_waits_for_blocks_to_be_taken() -> None:
    with loading(Store(), max_bytes=SIZE) as loader:
        job = loader.start(names(range(20)), everything)
        while not job.arrived:
            loader.wait(FOREVER)
        loader.close(FOREVER)
        assert job.done


@pytest.mark.parametrize("max_bytes", [0, 1, SIZE, 5 * SIZE])
def test_blocks_larger_than_the_limit_arrive_one_by_one(max_bytes: int) -> None:
    with loading(Store(), max_bytes) as loader:
        for _ in range(5):
            assert arrived(loader, loader.start(names(range(20)), everything)) == 20
    with saving(store := Store(), max_bytes) as saver:
        while saver.num_saved != 20:
            for one in blocks(range(20)):
                if one.name not in store.saved:
                    saver.offer([one])
            assert saver.flush(FOREVER)


def test_thousands_of_jobs_are_cancelled_at_any_time() -> None:
    chance = random.Random(1)
    with loading(Store(), 4 * SIZE) as loader:
        jobs: list[LoadJob] = []
        for _ in range(3000):
            jobs.append(loader.start(names(range(chance.randint(1, 12))), everything))
            if len(jobs) > 8:
                job = jobs.pop(chance.randrange(len(jobs)))
                if chance.random() < 0.7:
                    loader.take(job, 2)
                loader.cancel(job)
                assert job.done and not job.arrived
        for job in jobs:
            assert arrived(loader, job) <= 12
        assert loader.queued_bytes == 0
        assert arrived(loader, loader.start(names(range(12)), everything)) == 12


def test_threads_that_cannot_be_started_fail_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with loading(Store()) as loader, saving(store := Store()) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert loader.start(names(range(3)), everything).done
            saver.offer(blocks(range(3)))
            assert not saver.flush(0.0)
        assert arrived(loader, loader.start(names(range(3)), everything)) == 3
        saver.offer(blocks(range(3, 6)))
        assert saver.flush(FOREVER) and store.saved == names(range(6))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["save", "touch"])
def test_a_failed_save_affects_no_other(method: str, error: type[BaseException]) -> None:
    with saving(store := Store(fails_once(method, error))) as saver:
        for first in (0, 10):
            saver.offer(blocks(range(first, first + 10)))
            saver.touch(names(range(3)))
            assert saver.flush(FOREVER)
        assert store.saved[-10:] == names(range(10, 20))
        assert saver.has_space(1 << 20), "the failed save no longer waits"


def test_a_saver_is_closed_while_the_store_blocks() -> None:
    gate = Gate("save")
    with saving(store := Store(gate)) as saver:
        saver.offer([block(0)])
        assert gate.reached.wait(FOREVER)
        saver.offer(blocks(range(1, 5)))
        assert not saver.flush(0.0)
        saver.close(0.0)
        assert saver.num_dropped == 4 and not saver.offer([block(9)])
        gate.opened.set()
    assert store.saved == [name(0)]


def test_dropped_blocks_are_not_saved_later() -> None:
    gate = Gate("save")
    with saving(store := Store(gate)) as saver:
        saver.offer([block(0)])
        assert gate.reached.wait(FOREVER)
        saver.offer(blocks(range(1, 5)))
        saver.touch(names(range(5)))
        assert not saver.drop(0.0), "one is being saved"
        gate.opened.set()
        assert saver.drop(FOREVER) and saver.flush(FOREVER)
        assert store.saved == [name(0)] and not store.touched
        assert saver.queued_bytes == 0
        saver.offer([block(9)])
    assert store.saved == [name(0), name(9)]


def test_each_stored_block_is_reported_once() -> None:
    class Small(Store):
        """Has every second block already, and takes one."""

        def find(self, names: Sequence[BlockHash]) -> int:
            had = [self.numbers[one] % 2 == 0 or self.numbers[one] == 1 for one in names]
            return [*had, False].index(False)

        def save(self, blocks: Sequence[StoredBlock]) -> int:
            return 1

    for store, had in ((Store(), range(6)), (Small(), (0, 1, 2, 4))):
        with saving(store) as saver:
            saver.offer(blocks(range(6)))
            assert saver.flush(FOREVER) and not saver.is_saving
            assert saver.take_saved() == names(had) and saver.take_saved() == []
            saver.touch(names([9]))
            assert saver.flush(FOREVER) and saver.drop(FOREVER)
            assert saver.take_saved() == [], "all was to be forgotten"


def test_offers_from_many_threads_while_one_closes() -> None:
    with saving(store := Store()) as saver:

        def offer(first: int) -> None:
            for number in range(first, first + 50):
                saver.offer([block(number)])
                saver.touch([name(number)])

        threads = [threading.Thread(target=offer, args=(50 * at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        saver.close(FOREVER)
        for thread in threads:
            thread.join(FOREVER)
    assert len(store.saved) + saver.num_dropped == 200


def test_a_process_that_was_forked_waits_for_no_saver() -> None:
    gate = Gate("save")
    with saving(Store(gate)) as saver:
        saver.offer(blocks(range(3)))
        assert gate.reached.wait(FOREVER)
        if (child := os.fork()) == 0:
            began = time.monotonic()
            saver.flush(10 * FOREVER)
            os._exit(int(time.monotonic() - began > FOREVER / 2))
        assert os.waitpid(child, 0)[1] == 0
        gate.opened.set()


def test_an_emptied_queue_returns_its_memory(limits: Callable[..., None]) -> None:
    """Regression: up to 400 MB stayed resident after all blocks were saved."""
    limits(drain_bytes=6 * SIZE)
    alive: list[weakref.ref[np.ndarray[Any, Any]]] = []
    drained: list[int] = []

    def offer(saver: Saver, numbers: range) -> None:
        for number in numbers:
            data = np.frombuffer(payload(number), np.uint8).copy()
            alive.append(weakref.ref(data))
            assert saver.offer([block(number)._replace(payload=data.data)])

    def look() -> None:
        gc.collect()
        drained.append(sum(reference() is not None for reference in alive))

    gate = Gate("save")
    saver = Saver(guarded(Store(gate)), 1 << 20, Faults("a test"), look)
    offer(saver, range(10))
    gate.opened.set()
    assert saver.flush(FOREVER)
    assert drained == [0], "called once, when all blocks are released"
    offer(saver, range(10, 12))
    assert saver.flush(FOREVER)
    assert drained == [0], "two blocks are not worth it"
    saver.close(FOREVER)


def test_a_worker_abandons_no_call_of_another_worker() -> None:
    """Regression: the other worker's thread ended, and no thread did its jobs."""
    changed, moved, gate = threading.Condition(), threading.Event(), Gate("find")
    first, second = (
        Worker(title, Faults("a test"), "a call failed", changed) for title in ("first", "second")
    )
    store = GuardedStore(Store(gate))

    def move(job: Job) -> bool:
        job.work = lambda job: store.find(names(range(1)), job) < 0
        with changed:
            first.jobs.remove(job)
            second.submit(job)
        assert moved.wait(FOREVER)
        return True

    first.submit(Job(move, limit=0.05))
    assert gate.reached.wait(FOREVER)
    time.sleep(0.1)
    with changed:
        for worker in (first, second):
            worker.abandon_late_call()
    gate.opened.set()
    moved.set()
    job = Job(lambda job: False)
    second.submit(job)
    assert second.wait_for(lambda: job.done, FOREVER)
    for worker in (first, second):
        worker.close(FOREVER)
