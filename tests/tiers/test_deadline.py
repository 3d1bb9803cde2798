"""Stores that never answer: no call waits for ever, and they are paused for a while."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart import SamplingParams
from headstart.cache import BlockHash
from headstart.engine.tiering.tiers import is_worth_loading
from headstart.errors import EngineError
from headstart.tiers.disk import DiskStore
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import Faults, LoadedBlock, Pause, make_header
from headstart.tiers.transfers import ObjectStore, Saver
from headstart.tiers.worker import GuardedStore, StoreChain
from tests.engine.internals import first_tier
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, Clock, block, blocks, name, names, payload
from tests.tiers.test_threads import FOREVER, Gate, Store, arrived, call, everything, loading

PROMPT = {"prompt_token_ids": list(range(3, 103))}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def short(limits: Callable[..., None]) -> None:
    """Make stores late after a moment."""
    limits(deadline=0.05, changing=0.05)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + FOREVER
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def find(store: GuardedStore) -> Any:
    return call(lambda job: store.find(names(range(9)), job))


def count_loaded(store: GuardedStore) -> int:
    loaded: list[LoadedBlock] = []
    call(lambda job: [loaded.extend(chunk) for chunk in store.load(names(range(9)), job)])
    return len(loaded)


def save(store: GuardedStore, numbers: range) -> Any:
    return call(lambda job: store.save(blocks(numbers), job))


@pytest.mark.parametrize(
    ("method", "operation", "miss", "hit"),
    [
        ("find", find, 0, 9),
        ("load", count_loaded, 0, 9),
        ("clear", lambda store: call(store.clear), False, True),
    ],
)
def test_an_unanswered_call_is_a_miss(
    short: None, clock: Clock, method: str, operation: Any, miss: Any, hit: Any
) -> None:
    gate = Gate(method)
    store = GuardedStore(Store(gate))
    assert operation(store) == miss
    assert store.faults.counts == {"it does not answer": 1}
    gate.reached.clear()
    clock.now += 1000.0
    assert find(store) == count_loaded(store) == 0, "its thread is still running"
    assert save(store, range(3)) == 0
    call(lambda job: store.touch(names(range(3)), job))
    assert not call(store.clear)
    assert not gate.reached.is_set()
    assert store.faults.counts == {"it does not answer": 1}
    gate.opened.set()
    wait_until(lambda: not store.is_stuck)
    assert operation(store) == hit
    assert save(store, range(3)) == 3


def test_blocks_that_arrived_before_a_store_fell_silent_are_loaded(
    limits: Callable[..., None],
) -> None:
    limits(chunk_bytes=1)
    gate, begun = Gate("fourth"), iter(["first", "second", "third", "fourth"])
    store = GuardedStore(Store(lambda method: gate(next(begun)) if method == "block" else None))
    limits(deadline=0.5)
    assert count_loaded(store) == 3
    gate.opened.set()


def test_a_pause_is_longer_after_each_failure(clock: Clock) -> None:
    pause, lengths = Pause(Faults("a test")), []
    for _ in range(9):
        pause.failed("it does not answer", "on purpose")
        pause.failed("it does not answer", "with the one before")
        begun = clock.now
        while pause.is_on:
            clock.now += 1.0
        lengths.append(clock.now - begun)
    assert lengths == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    pause.answered()
    assert not pause.is_on
    pause.failed("it does not answer", "again")
    clock.now += 5.0
    assert not pause.is_on


@pytest.mark.parametrize("method", ["find", "load", "block"])
def test_a_request_whose_load_never_arrives_continues(
    short: None, clock: Clock, method: str
) -> None:
    gate = Gate(method)
    store = GuardedStore(Store(gate))
    with loading(store) as loader:
        jobs = [loader.start(names(range(20)), everything) for _ in range(3)]
        assert gate.reached.wait(FOREVER)
        assert [arrived(loader, job) for job in jobs] == [0, 0, 0]
        assert store.faults.counts == {"it does not answer": 1}, "those behind it did not wait"
        clock.now += 1000.0
        gate.reached.clear()
        assert arrived(loader, loader.start(names(range(20)), everything)) == 0
        assert find(store) == save(store, range(3)) == 0
        assert not gate.reached.is_set(), "the store is not called while its thread is running"
        gate.opened.set()
        wait_until(lambda: not store.is_stuck)
        assert arrived(loader, loader.start(names(range(20)), everything)) == 20


def test_a_late_store_is_paused(short: None, clock: Clock) -> None:
    gate = Gate("find")
    store = GuardedStore(Store(gate))
    with loading(store) as loader:
        assert arrived(loader, loader.start(names(range(20)), everything)) == 0
        gate.opened.set()
        wait_until(lambda: not store.is_stuck)
        assert arrived(loader, loader.start(names(range(20)), everything)) == 0
        clock.now += 5.0
        assert arrived(loader, loader.start(names(range(20)), everything)) == 20


@pytest.mark.parametrize("rate", [None, 1e9])
def test_a_load_that_takes_longer_than_computing_ends(
    rate: float | None, limits: Callable[..., None]
) -> None:
    """The first ends soon, others once computing all of it would have taken as long."""
    limits(chunk_bytes=1, trial=0.06, least_wait=0.01)

    def tick(method: str) -> None:
        time.sleep(0.05 if method == "block" else 0)  # the store is slow, and never silent

    store = GuardedStore(Store(tick))
    with loading(store, compute=lambda count: count / 100) as loader:
        loader.rate = rate
        job = loader.start(names(range(20)), everything)
        assert 0 < arrived(loader, job) < (3 if rate is None else 6), "arrived blocks are used"
        assert store.faults.counts == {"loading is slower than computing": 1}
        assert not store.pause.is_on and loader.rate is not None
        if rate is None:
            assert loader.rate < 25 * MODEL.block_bytes, "so that the next load is not begun"


class SlowServer:
    """A Redis whose link is fast until it is slowed; then each answer must be released."""

    def __init__(self) -> None:
        self.values = {name(n): make_header(block(n)) + payload(n) for n in range(200)}
        self.num_answers = 0
        self.let_through = threading.Event()
        self.let_through.set()

    def mget(self, keys: list[bytes]) -> list[bytes]:
        assert self.let_through.wait(FOREVER)
        self.num_answers += 1
        return [self.values[BlockHash(key[-32:])] for key in keys]

    def pipeline(self, **options: Any) -> Any:
        questions: list[int] = []
        return SimpleNamespace(exists=lambda key: questions.append(1), execute=lambda: questions)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("seconds", [0.01, 0.1])
def test_a_load_over_a_link_that_becomes_slow_ends_in_time(
    seconds: float, limits: Callable[..., None]
) -> None:
    """Regression: consecutive requests waited for 14 times the computing time.

    The rate was an average that included the fast loads before.
    """
    pytest.importorskip("redis")
    limits(least_wait=0.05)
    server, remote = SlowServer(), RemoteStore("redis://127.0.0.1:1", MODEL)
    remote._client = server
    store = GuardedStore(remote)

    with loading(store, compute=lambda n: seconds * n / 20) as loader:

        def choose(count: int) -> int:
            tokens = count * MODEL.block_size
            nbytes = count * MODEL.block_bytes
            return count * is_worth_loading(tokens, nbytes, 320 / seconds, loader.rate)

        for first in (0, 20, 40):
            job = loader.start(names(range(first, first + 20)), everything)
            assert arrived(loader, job) == 20
        server.let_through.clear()
        began = time.monotonic()
        assert arrived(loader, loader.start(names(range(60, 80)), everything)) == 0
        assert time.monotonic() - began >= max(0.05, seconds) - 0.005
        assert store.faults.counts == {"loading is slower than computing": 1}
        assert arrived(loader, loader.start(names(range(80, 100)), choose)) == 0, "it is stuck"
        server.let_through.set()
        wait_until(lambda: not store.is_stuck)
        answers = server.num_answers
        for first in range(100, 200, 20):
            job = loader.start(names(range(first, first + 20)), choose)
            assert arrived(loader, job) == 0
        assert server.num_answers == answers, "no key was read again"
        assert arrived(loader, loader.start(names(range(20)), everything)) == 20
        assert arrived(loader, loader.start(names(range(20)), choose)) == 20, "it is fast again"


def test_a_lookup_slower_than_computing_pauses_the_store(
    limits: Callable[..., None],
) -> None:
    limits(least_wait=0.02)
    gate = Gate("find")
    store = GuardedStore(Store(gate))
    with loading(store, compute=lambda count: 0.01) as loader:
        loader.rate = 1e9
        assert arrived(loader, loader.start(names(range(2)), everything)) == 0
        assert store.pause.is_on and store.is_stuck
        gate.opened.set()


def test_an_object_that_never_arrives_is_a_miss(short: None) -> None:
    gate = Gate("load")
    store = GuardedStore(Store(gate))
    saver = Saver(StoreChain([store]), 1 << 20, Faults("a test"))
    assert call(lambda job: ObjectStore([store], saver).load(b"an image", job)) is None
    gate.opened.set()


class Listener:
    """A server that accepts connections.

    answer: called with each connection, in a separate thread.
    """

    def __init__(self, answer: Callable[[socket.socket, threading.Event], None]) -> None:
        self.closed = threading.Event()
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            arguments = (connection, self.closed)
            threading.Thread(target=self._answer, args=arguments, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self._socket.close()


def never(connection: socket.socket, closed: threading.Event) -> None:
    """Read everything, and reply nothing."""
    with connection:
        closed.wait()


def drip(connection: socket.socket, closed: threading.Event) -> None:
    """Send the start of a long reply a byte at a time, so that no read takes long."""
    with connection:
        try:
            connection.sendall(b"$1000000000\r\n")
            while not closed.wait(0.02):
                connection.sendall(b"x")
        except OSError:
            return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    return generate(make_llm(model))


def generate(llm: Any) -> Any:
    """Return the answer, within more steps than an engine needs that never waits."""
    group = llm.frontend.prepare(PROMPT, GREEDY)
    llm.engine.submit(group)
    for _ in range(400):  # 20 seconds, if each waits for a load
        llm.engine.step()
        if group.finished:
            return group.output().outputs[0].token_ids
    raise AssertionError("the request waits for the store, perhaps for ever")


@pytest.mark.parametrize("server", [never, drip])
def test_a_server_that_never_replies_delays_no_answer(
    model: Path, alone: Any, server: Any, limits: Callable[..., None]
) -> None:
    pytest.importorskip("redis")
    limits(remote_patience=0.2, last_saves=0.1, deadline=0.3, changing=0.3)
    with closing(Listener(server)) as listener:
        llm = make_llm(model, remote_cache=listener.url)
        assert [generate(llm) for _ in range(3)] == [alone] * 3
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.count_stored([name(1)]) == {"remote": 0}
        with pytest.raises(EngineError, match="Blocks may remain in a store"):
            llm.reset_prefix_cache(reset_connector=True)
        assert generate(llm) == alone
        llm.close()


def test_images_are_cleared_although_the_prefix_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, limits: Callable[..., None]
) -> None:
    unblocked, cleared = threading.Event(), threading.Event()
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        tiers = llm.engine.tiers
        assert tiers is not None
        limits(changing=0.05)
        with monkeypatch.context() as patch:
            patch.setattr(first_tier(tiers).store, "clear", lambda: unblocked.wait(FOREVER))
            patch.setattr(tiers._object_tiers[0].store, "clear", lambda: cleared.set() or True)
            with pytest.raises(EngineError, match="Blocks may remain in a store"):
                llm.reset_prefix_cache(reset_connector=True)
        assert cleared.is_set()
        unblocked.set()


def test_a_reset_during_a_slow_save_reports_that_blocks_may_remain(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, limits: Callable[..., None]
) -> None:
    saving, unblocked = threading.Event(), threading.Event()
    real = DiskStore.save

    def block(store: DiskStore, blocks: Any) -> int:
        saving.set()
        assert unblocked.wait(FOREVER)
        return real(store, blocks)

    monkeypatch.setattr(DiskStore, "save", block)
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        generate(llm)
        assert saving.wait(FOREVER)
        limits(last_saves=0.01)
        with pytest.raises(EngineError, match="Blocks may remain in a store"):
            llm.reset_prefix_cache(reset_connector=True)
        limits(last_saves=10.0)
        unblocked.set()
        assert llm.reset_prefix_cache(reset_connector=True)
        assert llm.engine.tiers is not None and llm.engine.tiers.flush(FOREVER)
        group = llm.frontend.prepare(PROMPT, GREEDY)
        prompt_names = llm.engine.manager.block_hashes(group.requests[0].sequence)
        assert llm.engine.tiers.count_stored(prompt_names) == {"disk": 0}


@pytest.mark.parametrize("method", ["find", "load"])
def test_a_disk_that_blocks_delays_no_answer(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    tmp_path: Path,
    alone: Any,
    method: str,
    limits: Callable[..., None],
) -> None:
    llm = make_llm(model, cache_dir=str(tmp_path))
    generate(llm)
    llm.close()
    unblocked = threading.Event()
    real = getattr(DiskStore, method)

    def block(store: DiskStore, *arguments: Any) -> Any:
        with store._lookup_lock:  # as a thread in a system call holds it
            assert unblocked.wait(60)
        return real(store, *arguments)

    monkeypatch.setattr(DiskStore, method, block)
    limits(deadline=0.2)
    llm = make_llm(model, cache_dir=str(tmp_path))
    assert [generate(llm) for _ in range(3)] == [alone] * 3
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.stats.late_answers == 1, "it was paused after that"
    limits(last_saves=0.1)
    llm.close()
    unblocked.set()
