"""Stores behind a deadline: a call that is late is a miss, and its store is paused.

    answers ──late or failing──▶ pauses for 5 s to 5 min ──▶ answers
       └──late──▶ stuck until the call has returned ──▶ answers

A file and a name server cannot be called with a time limit, so every call that reads runs in its
own thread. A thread that is late is abandoned; the store is not called again before it returns.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from headstart.cache import BlockHash
from headstart.tiers.store import (
    SILENT,
    SLOW,
    BlockStore,
    LoadedBlock,
    Pause,
    StoredBlock,
)

DEADLINE = 5.0  # seconds for an answer, and for each chunk of a load
CLEARING = 60.0  # seconds for forgetting all blocks, of which there may be very many
CHUNK_BYTES = 2 << 20
_CHUNK_SECONDS = 0.02  # after which a chunk is passed on, however small
_AHEAD = 4  # answers that a call reads before they are taken

T = TypeVar("T")

Patience = Callable[[], float]
"""Returns the seconds that the next answer may take, in addition to `DEADLINE`."""


def _endless() -> float:
    return math.inf


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; return None if the machine has no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


@dataclass(eq=False)
class _Call(Generic[T]):
    """A call of a store: the answers that were not taken yet, and how it ended."""

    answers: deque[T] = field(default_factory=deque)
    error: BaseException | None = None
    is_done: bool = False
    is_wanted: bool = True


class GuardedStore:
    """A store of which no answer takes longer than a deadline.

    A late answer is a miss and a fault. `save` and `touch` have no deadline: only the saver's
    thread waits for them.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.tier, self.faults = store.tier, store.faults
        self.pause = Pause(store.faults)
        self._running: set[_Call[Any]] = set()
        self._late: set[_Call[Any]] = set()
        self._changed = threading.Condition()

    @property
    def is_stuck(self) -> bool:
        """True while a call that was late has not returned."""
        return bool(self._late)

    @property
    def is_resting(self) -> bool:
        """True while the store is not to be called."""
        return self.is_stuck or self.pause.is_on

    def find(self, names: Sequence[BlockHash], patience: Patience = _endless) -> int:
        return self.call(lambda store: store.find(names), 0, patience)

    def load(
        self, names: Sequence[BlockHash], patience: Patience = _endless
    ) -> Iterator[list[LoadedBlock]]:
        """Yield the blocks in chunks, up to the first that is missing or late."""

        def chunks(store: BlockStore) -> Iterator[list[LoadedBlock]]:
            chunk: list[LoadedBlock] = []
            nbytes, began = 0, time.monotonic()
            for block in store.load(names):
                chunk.append(block)
                nbytes += block.payload.nbytes
                if nbytes >= CHUNK_BYTES or time.monotonic() - began > _CHUNK_SECONDS:
                    yield chunk
                    chunk, nbytes, began = [], 0, time.monotonic()
            yield chunk

        return filter(None, self._call(chunks, patience, is_load=True))

    def call(
        self, work: Callable[[BlockStore], T], otherwise: T, patience: Patience = _endless
    ) -> T:
        """Return the result of `work`, which calls the store; `otherwise` if all of it is late."""
        return next(self._call(lambda store: iter([work(store)]), patience), otherwise)

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        if not self.is_resting:
            return self.store.save(blocks)
        self.faults.num_unsaved += len(blocks)
        return 0

    def touch(self, names: Sequence[BlockHash]) -> None:
        if not self.is_resting:
            self.store.touch(names)

    def clear(self) -> bool:
        answers = self._call(lambda store: iter([store.clear()]), _endless, deadline=CLEARING)
        return next(answers, False)

    def close(self, timeout: float = DEADLINE) -> None:
        """Close the store once all calls in it have returned; wait so many seconds for that."""

        def close() -> None:
            with self._changed:
                self._changed.wait_for(lambda: not self._running)
            self.store.close()

        if (thread := start_thread(close, "headstart-close")) is not None:
            thread.join(timeout)

    def _call(
        self,
        work: Callable[[BlockStore], Iterable[T]],
        patience: Patience,
        *,
        deadline: float | None = None,
        is_load: bool = False,
    ) -> Iterator[T]:
        """Yield the answers up to the first that is late; none if the store is paused.

        is_load: a slow answer is a fault and no failure.
        """
        if self.is_resting:
            return
        deadline = deadline or DEADLINE
        call = _Call[T]()
        self._running.add(call)
        if start_thread(partial(self._run, call, work), "headstart-store") is None:
            self._running.discard(call)
            return
        is_waiting = True
        try:
            while True:
                seconds = min(deadline, patience())
                with self._changed:
                    self._changed.wait_for(lambda: call.answers or call.is_done, seconds)
                    answers = list(call.answers)
                    call.answers.clear()
                    self._changed.notify_all()
                if not answers:
                    break
                is_waiting = False
                yield from answers
                is_waiting = True
            if call.error is not None:
                raise call.error
            if call.is_done:
                self.pause.answered()
            elif seconds == deadline:
                self.pause.failed(SILENT, f"not within {seconds:g} s")
            elif is_load:
                self.faults.note(SLOW, "the rest does not come in time")
            else:
                self.pause.failed(SLOW, f"no answer within {seconds:.2f} s")
        finally:
            with self._changed:
                call.is_wanted = False
                if is_waiting and call in self._running:
                    self._late.add(call)
                self._changed.notify_all()

    def _run(self, call: _Call[T], work: Callable[[BlockStore], Iterable[T]]) -> None:
        """Do the work of a call in its thread, a few answers ahead of the caller."""
        try:
            for answer in work(self.store):
                with self._changed:
                    call.answers.append(answer)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(call.answers) < _AHEAD or not call.is_wanted)
                    if not call.is_wanted:
                        break
        except BaseException as error:  # for the caller
            call.error = error
        with self._changed:
            call.is_done = True
            self._running.discard(call)
            self._late.discard(call)
            self._changed.notify_all()


class StoreChain:
    """Several tiers, nearest first: a lookup continues in the next where one ends."""

    def __init__(self, stores: Sequence[GuardedStore]) -> None:
        self.stores = stores

    @property
    def block_seconds(self) -> float:
        """Seconds to compute a block, from the nearest store that knows; 0 for none."""
        return next((s.store.block_seconds for s in self.stores if s.store.block_seconds), 0.0)

    def find(self, names: Sequence[BlockHash], patience: Patience = _endless) -> int:
        count = 0
        for store in self.stores:
            if count < len(names):
                count += store.find(names[count:], patience)
        return count

    def load(
        self, names: Sequence[BlockHash], patience: Patience = _endless
    ) -> Iterator[list[LoadedBlock]]:
        """Yield the blocks in chunks, up to the first that no store has in time."""
        count = 0
        for store in self.stores:
            if count < len(names):
                for chunk in store.load(names[count:], patience):
                    count += len(chunk)
                    yield chunk

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Save blocks in all stores; return how many are new in the store with most new ones."""
        return max(store.save(blocks) for store in self.stores)

    def touch(self, names: Sequence[BlockHash]) -> None:
        for store in self.stores:
            store.touch(names)
