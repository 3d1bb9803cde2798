"""Stores that never answer: nobody waits for them for ever, and they are left alone for a while."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart import SamplingParams
from headstart.cache import BlockHash
from headstart.engine.tiering.rates import is_worth_loading
from headstart.errors import EngineError
from headstart.tiers import (
    DeadlineStore,
    DiskStore,
    Faults,
    Loader,
    ObjectStore,
    Pause,
    RemoteStore,
    Saver,
)
from headstart.tiers.deadline import _Call
from headstart.tiers.records import make_header
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, block, blocks, name, names, payload
from tests.tiers.test_threads import FOREVER, Gate, Store, arrived, everything

PROMPT = {"prompt_token_ids": list(range(3, 103))}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Clock:
    """The time of pauses and of loads, which stands still unless it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("pause", "loader"):  # not everybody's: event loops would never wake up
            clock = SimpleNamespace(monotonic=lambda: self.now)
            monkeypatch.setattr(f"headstart.tiers.{module}.time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def pause() -> Pause:
    return Pause(Faults("a test"))


def patient(store: DeadlineStore, ask: Callable[[DeadlineStore], object]) -> object:
    """The answer of a call that began after the one that was late has returned."""
    while store.pause.is_stuck:
        threading.Event().wait(0.001)
    return ask(store)


@pytest.mark.parametrize(
    ("method", "ask", "miss", "hit"),
    [
        ("find", lambda store: store.find(names(range(9))), 0, 9),
        ("load", lambda store: len(list(store.load(names(range(9))))), 0, 9),
        ("clear", lambda store: store.clear(), False, True),
    ],
)
def test_a_call_that_is_never_answered_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, pause: Pause, method: str, ask: Any, miss: Any,
    hit: Any,
) -> None:  # fmt: skip
    gate = Gate(method)
    store = DeadlineStore(Store(gate), pause)
    with monkeypatch.context() as patch:
        for limit in ("DEADLINE", "_CLEARING"):
            patch.setattr(f"headstart.tiers.deadline.{limit}", 0.01)
        assert ask(store) == miss
    assert pause.faults.counts == {"it does not answer": 1}
    gate.reached.clear()
    clock.now += 1000.0
    for other in (store.find, lambda some: len(list(store.load(some)))):
        assert other(names(range(9))) == 0, "its thread is still there"
    assert store.save(blocks(range(3))) == 0
    store.touch(names(range(3)))
    assert not store.clear()
    assert not gate.reached.is_set()
    assert pause.faults.counts == {"it does not answer": 1}
    gate.opened.set()
    assert patient(store, ask) == hit
    assert store.save(blocks(range(3))) == 3


def test_a_call_that_is_interrupted_has_the_store_left_alone_until_it_returns(
    monkeypatch: pytest.MonkeyPatch, pause: Pause
) -> None:
    gate = Gate("find")
    store = DeadlineStore(Store(gate), pause)

    def interrupt(call: object, seconds: float) -> list[object]:
        assert gate.reached.wait(FOREVER)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headstart.tiers.deadline._Call.take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.find(names(range(9)))
    assert len(list(store.load(names(range(9))))) == 0
    gate.opened.set()
    assert patient(store, lambda store: store.find(names(range(9)))) == 9
    assert not pause.faults.counts, "the store did nothing wrong"


def test_what_came_before_a_store_fell_silent_is_there(
    monkeypatch: pytest.MonkeyPatch, pause: Pause
) -> None:
    gate, begun = Gate("fourth"), iter(["first", "second", "third", "fourth"])
    inner = Store(lambda method: gate(next(begun)) if method == "block" else None)
    found = DeadlineStore(inner, pause).load(names(range(9)))
    next(found)
    assert gate.reached.wait(FOREVER)
    take = _Call.take
    monkeypatch.setattr(_Call, "take", lambda call, seconds: take(call, 0.01))
    assert len(list(found)) == 2
    with pytest.raises(StopIteration):
        next(found)
    gate.opened.set()


def test_a_pause_is_longer_after_each_failure(clock: Clock, pause: Pause) -> None:
    lengths = []
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


@pytest.fixture
def gated(pause: Pause) -> Iterator[Callable[[str], tuple[Gate, Loader]]]:
    opened: list[tuple[Gate, Loader]] = []

    def make(method: str) -> tuple[Gate, Loader]:
        gate = Gate(method)
        opened.append((gate, Loader(Store(gate), 1 << 20, lambda count: FOREVER, pause)))
        return opened[-1]

    yield make
    for gate, loader in opened:
        gate.opened.set()
        loader.close(FOREVER)
        assert not any(thread.is_alive() for thread in loader._threads)


@pytest.mark.parametrize("method", ["find", "load", "block"])
def test_whoever_waits_for_a_load_that_never_comes_goes_on(
    gated: Callable[[str], tuple[Gate, Loader]], clock: Clock, pause: Pause, method: str
) -> None:
    gate, loader = gated(method)
    jobs = [loader.start(names(range(20)), everything) for _ in range(3)]
    assert gate.reached.wait(FOREVER)
    loader.end_late()
    assert not jobs[0].done, "it is not late yet"
    clock.now += 5.5
    loader.end_late()
    for _ in range(100):  # one may be looked up just now
        if not all(job.done for job in jobs):
            loader.wait(FOREVER / 100)
    assert all(job.done for job in jobs), "those behind it would be late too"
    assert pause.faults.counts == {"it does not answer": 1}
    clock.now += 1000.0
    assert loader.start(names(range(20)), everything).done, "its thread is still there"
    gate.opened.set()
    while loader._pause.is_stuck:
        loader.wait(0.001)
    assert arrived(loader, loader.start(names(range(20)), everything)) == 20


def test_nobody_else_is_sent_after_a_load_that_never_comes(
    gated: Callable[[str], tuple[Gate, Loader]], clock: Clock, pause: Pause
) -> None:
    """Not the saver either, nor a lookup for people, once the pause is over."""
    gate, loader = gated("load")
    store = DeadlineStore(loader._store, pause)
    loader.start(names(range(20)), everything)
    assert gate.reached.wait(FOREVER)
    clock.now += 6.0
    loader.end_late()
    clock.now += 1000.0
    assert store.find(names(range(9))) == store.save(blocks(range(3))) == 0
    assert not store.clear()
    gate.opened.set()
    assert patient(store, lambda store: store.find(names(range(9)))) == 9


def test_a_store_that_was_late_is_left_alone_for_a_while(
    gated: Callable[[str], tuple[Gate, Loader]], clock: Clock
) -> None:
    gate, loader = gated("find")
    loader.start(names(range(20)), everything)
    assert gate.reached.wait(FOREVER)
    clock.now += 6.0
    loader.end_late()
    gate.opened.set()
    while loader._pause.is_stuck:
        loader.wait(0.001)
    assert loader.start(names(range(20)), everything).done
    clock.now += 5.0
    assert arrived(loader, loader.start(names(range(20)), everything)) == 20


@pytest.mark.parametrize(("rate", "come"), [(None, 1), (1e9, 4)])
def test_a_load_that_takes_longer_than_computing_ends(
    clock: Clock, pause: Pause, rate: float | None, come: int
) -> None:
    """The first one soon, and others when computing all of it would have taken as long."""

    def tick(method: str) -> None:
        clock.now += 2.0  # the store is slow, and never silent

    with closing_loader(Loader(Store(tick), 1 << 20, lambda count: count / 2, pause)) as loader:
        loader.rate = rate
        job = loader.start(names(range(20)), everything)
        assert arrived(loader, job) == come, "what has come is of use"
        assert pause.faults.counts == {"loading is slower than computing": 1}
        assert not pause.is_on and loader.rate is not None
        if rate is None:
            assert loader.rate < MODEL.block_bytes, "so that the next load is not begun"


class SlowServer:
    """A Redis whose link is fast until it is slowed: an answer comes when it is let through."""

    def __init__(self, clock: Clock) -> None:
        self.values = {name(n): make_header(block(n)) + payload(n) for n in range(200)}
        self.num_answers = 0
        self.asked, self.let_through = threading.Event(), threading.Event()
        self.let_through.set()
        self._clock = clock

    def mget(self, keys: list[bytes]) -> list[bytes]:
        self.asked.set()
        assert self.let_through.wait(FOREVER)
        self._clock.now += 0.001
        self.num_answers += 1
        return [self.values[BlockHash(key[-32:])] for key in keys]

    def pipeline(self, **options: Any) -> Any:
        questions: list[int] = []
        return SimpleNamespace(exists=lambda key: questions.append(1), execute=lambda: questions)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("seconds", [0.01, 0.1, 2.0])
def test_a_link_that_becomes_slow_costs_a_load_what_computing_takes(
    clock: Clock, pause: Pause, seconds: float, is_guarded: bool
) -> None:
    """Requests in a row waited for 14 times as long as computing took, since the rate was an
    average over the fast loads before."""
    pytest.importorskip("redis")
    server = SlowServer(clock)
    store = RemoteStore("redis://127.0.0.1:1", MODEL)
    store._client = server
    loader = Loader(store, 1 << 20, lambda n: seconds * n / 20, pause, is_guarded=is_guarded)

    def choose(found: int) -> int:
        tokens = found * MODEL.block_size
        nbytes = found * MODEL.block_bytes
        return found * is_worth_loading(tokens, nbytes, 320 / seconds, loader.rate)

    with closing_loader(loader):
        for first in (0, 20, 40):
            job = loader.start(names(range(first, first + 20)), everything)
            assert arrived(loader, job) == 20
        server.let_through.clear()
        server.asked.clear()
        slow = loader.start(names(range(60, 80)), everything)
        assert server.asked.wait(FOREVER)
        limit = max(0.25, seconds)
        clock.now += 0.9 * limit
        loader.end_late()
        assert not slow.done
        clock.now += 0.1 * limit + 0.001
        loader.end_late()
        assert slow.done and pause.faults.counts == {"loading is slower than computing": 1}
        assert loader.start(names(range(80, 100)), choose).done, "the answer is not there yet"
        server.let_through.set()
        while pause.is_stuck:
            loader.wait(0.001)
        answers = server.num_answers
        for first in range(100, 200, 20):
            job = loader.start(names(range(first, first + 20)), choose)
            assert arrived(loader, job) == 0
        assert server.num_answers == answers, "none was asked for again"
        assert arrived(loader, loader.start(names(range(20)), everything)) == 20
        assert arrived(loader, loader.start(names(range(20)), choose)) == 20, "it is fast again"


def test_a_lookup_that_is_slower_than_computing_has_the_store_left_alone(
    clock: Clock, pause: Pause
) -> None:
    gate = Gate("find")
    with closing_loader(Loader(Store(gate), 1 << 20, lambda count: 0.01, pause)) as loader:
        loader.rate = 1e9
        job = loader.start(names(range(2)), everything)
        assert gate.reached.wait(FOREVER)
        clock.now += 0.3
        loader.end_late()
        assert job.done and pause.is_on
        gate.opened.set()


class closing_loader(closing[Loader]):
    def __exit__(self, *error: object) -> None:
        self.thing.close(FOREVER)


def test_an_object_that_never_comes_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, pause: Pause
) -> None:
    gate = Gate("load")
    store = DeadlineStore(Store(gate), pause)
    monkeypatch.setattr("headstart.tiers.deadline.DEADLINE", 0.01)
    assert ObjectStore([store], Saver(store, 1 << 20, Faults("a test"))).load(b"an image") is None
    gate.opened.set()


class Listener:
    """A server that takes connections. answer: called with each, in a thread of its own."""

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
    """Read all, and say nothing."""
    with connection:
        closed.wait()


def drip(connection: socket.socket, closed: threading.Event) -> None:
    """Begin to say something long, a byte at a time, so that no read takes long."""
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
    return ask(make_llm(model))


def ask(llm: Any) -> Any:
    """The answer, within a number of steps that would be many for one that waits for nothing."""
    group = llm.engine.prepare(PROMPT, GREEDY)
    llm.engine.submit(group)
    for _ in range(400):  # 20 seconds, if each waits for a load
        llm.engine.step()
        if group.finished:
            return group.output().outputs[0].token_ids
    raise AssertionError("the request waits for the store, perhaps for ever")


@pytest.mark.parametrize("server", [never, drip])
def test_a_server_that_never_replies_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, model: Path, alone: Any, server: Any
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr("headstart.tiers.remote._PATIENCE", 0.2)
    monkeypatch.setattr("headstart.engine.tiering.tiers._LAST_SAVES", 0.1)
    for module in ("loader", "deadline"):
        monkeypatch.setattr(f"headstart.tiers.{module}.DEADLINE", 0.5)
    monkeypatch.setattr("headstart.tiers.deadline._CLEARING", 0.5)
    with closing(Listener(server)) as listener:
        llm = make_llm(model, remote_cache=listener.url)
        assert [ask(llm) for _ in range(3)] == [alone] * 3
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.count_stored([name(1)]) == {"remote": 0}
        with pytest.raises(EngineError, match="what is kept elsewhere may not be"):
            llm.reset_prefix_cache(reset_connector=True)
        assert ask(llm) == alone
        llm.close()


def test_images_are_forgotten_though_the_store_of_prefixes_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    unblocked, asked = threading.Event(), threading.Event()
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        tiers = llm.engine.tiers
        assert tiers is not None
        with monkeypatch.context() as patch:
            patch.setattr("headstart.tiers.deadline._CLEARING", 0.05)
            patch.setattr(tiers._tiers[0]._store, "clear", lambda: unblocked.wait(FOREVER))
            patch.setattr(tiers._object_tiers[0]._store, "clear", lambda: asked.set() or True)
            with pytest.raises(EngineError, match="what is kept elsewhere may not be"):
                llm.reset_prefix_cache(reset_connector=True)
        assert asked.is_set()
        unblocked.set()


def test_a_reset_during_a_slow_save_says_that_something_may_be_left(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    saving, unblocked = threading.Event(), threading.Event()
    real = DiskStore.save

    def block(store: DiskStore, blocks: Any) -> int:
        saving.set()
        assert unblocked.wait(FOREVER)
        return real(store, blocks)

    monkeypatch.setattr(DiskStore, "save", block)
    with closing(make_llm(model, cache_dir=str(tmp_path))) as llm:
        ask(llm)
        assert saving.wait(FOREVER)
        with monkeypatch.context() as patch:
            patch.setattr("headstart.engine.tiering.tiers._LAST_SAVES", 0.01)
            with pytest.raises(EngineError, match="what is kept elsewhere may not be"):
                llm.reset_prefix_cache(reset_connector=True)
        unblocked.set()
        assert llm.reset_prefix_cache(reset_connector=True)
        assert llm.engine.tiers is not None and llm.engine.tiers.flush(FOREVER)
        group = llm.engine.prepare(PROMPT, GREEDY)
        prompt_names = llm.engine.manager.block_hashes(group.requests[0].sequence)
        assert llm.engine.tiers.count_stored(prompt_names) == {"disk": 0}


@pytest.mark.parametrize("method", ["find", "load"])
def test_a_disk_that_blocks_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, alone: Any, method: str
) -> None:
    llm = make_llm(model, cache_dir=str(tmp_path))
    ask(llm)
    llm.close()
    unblocked = threading.Event()
    real = getattr(DiskStore, method)

    def block(store: DiskStore, *arguments: Any) -> Any:
        with store._reading:  # as a thread in a system call holds it
            assert unblocked.wait(60)
        return real(store, *arguments)

    monkeypatch.setattr(DiskStore, method, block)
    for module in ("loader", "deadline"):
        monkeypatch.setattr(f"headstart.tiers.{module}.DEADLINE", 0.2)
    llm = make_llm(model, cache_dir=str(tmp_path))
    assert [ask(llm) for _ in range(3)] == [alone] * 3
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.stats.late_answers == 1, "it was left alone after that"
    monkeypatch.setattr("headstart.engine.tiering.tiers._LAST_SAVES", 0.1)
    llm.close()
    unblocked.set()
