"""The pool as the page draws it: cells in the colours of prefixes, and what goes on, every second.

A look takes the engine's thread 0.4 us a block. So that watching costs at most a fiftieth of its
time, the next one comes after fifty times as long as the last took, and all who ask share it. A
pool of more than `MAX_CELLS` blocks is drawn with several blocks to a cell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headstart.cache import Stretch, read_tokens
from headstart.server.cache.owners import Owners
from headstart.server.cache.state import (
    PrefixView,
    describe_batch,
    describe_engine,
    describe_pool,
    describe_prefixes,
)

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.server.monitoring.watch import Watch
    from headstart.server.tenants import Tenants

__all__ = ["MAX_CELLS", "Live", "draw_cells"]

MAX_CELLS = 8192
_MOST_PREFIXES = 64
_MOST_REQUESTS = 64
_SECONDS, _SHARE = 1.0, 50
EMPTY, CACHED, HELD = 0, 1, 2


@dataclass(slots=True)
class _Look:
    """The last look at the pool: what is told of it, and what is behind it.

    at: when it began, `time.monotonic`. took: seconds of two threads.
    """

    at: float = -1e9
    took: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)


class Live:
    """Looks at the pool for all who ask; for the tasks of one event loop."""

    def __init__(self, llm: AsyncLLM, watch: Watch, tenants: Tenants) -> None:
        self._llm = llm
        self._watch = watch
        self._tenants = tenants
        self._look = _Look()
        self._lock = asyncio.Lock()
        self.num_watchers = 0  # open streams of looks

    @property
    def pause(self) -> float:
        """Seconds from one look to the next."""
        return max(_SECONDS, _SHARE * self._look.took)

    async def show(self) -> dict[str, Any]:
        """The pool and the traffic as they are, or were `pause` seconds ago at the most."""
        async with self._lock:
            if time.monotonic() - self._look.at >= 0.9 * self.pause:
                await self._refresh()
        traffic = await asyncio.to_thread(self._watch.recent_requests)
        return self._look.told | {"traffic": traffic}

    async def show_now(self) -> dict[str, Any]:
        """The pool as it is after this call came, which may wait for the time of the next look."""
        came = time.monotonic()
        async with self._lock:
            if self._look.at < came:
                due = self._look.at + _SHARE * self._look.took
                await asyncio.sleep(due - time.monotonic())
                await self._refresh()
        return self._look.told

    async def block_text(self, block_id: int) -> dict[str, Any]:
        """What a block of the last look holds."""
        for at, stretch in enumerate(self._look.stretches):
            if block_id in stretch.ids:
                tokens = read_tokens(stretch.keys[stretch.ids.index(block_id)])
                decode = self._watch.decode
                text = await asyncio.to_thread(decode, tokens) if decode is not None else None
                return {"block": block_id, "prefix": at, "tokens": len(tokens), "text": text}
        return {"block": block_id, "prefix": None, "tokens": 0, "text": None}

    async def _refresh(self) -> None:
        engine = self._llm.engine
        manager = engine.manager
        owners = Owners(self._tenants.names() if self._tenants.ask_for_keys else None)
        at = time.monotonic()

        def look() -> tuple[float, dict[str, Any], list[Stretch], list[int]]:
            start = time.perf_counter()
            stretches = manager.stretches()
            told = {
                "engine": describe_engine(engine),
                "batch": describe_batch(engine, _MOST_REQUESTS),
                "pool": describe_pool(manager, stretches, owners),
            }
            held = manager.held_blocks()
            return time.perf_counter() - start, told, stretches, held

        took, told, stretches, held = await self._llm.call(look)

        def describe() -> float:
            start = time.perf_counter()
            prompts = self._watch.recent_prompts()
            view = PrefixView(owners, self._watch.decode, prompts, manager.block_size)
            told["prefixes"] = describe_prefixes(stretches, _MOST_PREFIXES, view)
            shown = {prefix["id"] for prefix in told["prefixes"]}
            told["cells"] = draw_cells(manager.config.num_blocks, stretches, held, shown)
            return time.perf_counter() - start

        took += await asyncio.to_thread(describe)
        self._look = _Look(at, took, told, stretches)


def draw_cells(
    num_blocks: int, stretches: Sequence[Stretch], held: Sequence[int], shown: set[int]
) -> dict[str, Any]:
    """Cells in the order of block ids, as runs of [cells, state, prefix or -1].

    Of several blocks to a cell the first that is held counts, else the first that is cached.
    """
    states: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
    owners: NDArray[np.int64] = np.full(num_blocks, -1, np.int64)
    for at, stretch in enumerate(stretches):
        states[stretch.ids] = CACHED
        if at in shown:
            owners[stretch.ids] = at
    states[list(held)] = HELD
    per_cell = -(-num_blocks // MAX_CELLS)
    padding = -num_blocks % per_cell
    rows = np.pad(states, (0, padding)).reshape(-1, per_cell)
    best = rows.argmax(axis=1)
    pick = np.arange(len(rows)) * per_cell + best
    owners = np.pad(owners, (0, padding), constant_values=-1)[pick]
    states = rows.max(axis=1)
    starts = np.flatnonzero(np.diff(states, prepend=-1) | np.diff(owners, prepend=-2))
    lengths = np.diff(starts, append=len(states))
    runs = np.stack([lengths, states[starts], owners[starts]], axis=1)
    return {"blocks_per_cell": per_cell, "runs": runs.tolist()}
