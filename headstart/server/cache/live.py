"""Snapshots of the pool for `/cache` and the page: blocks by state and owner, prefixes, requests.

A snapshot reads the pool in the engine's thread, which delays steps. All viewers share a snapshot.
A pause of at least fifty times its duration follows, so snapshots take at most 2 % of the thread's
time. The map of a pool with more than `MAX_CELLS` blocks has several blocks per cell.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headstart.cache import MissReason, Namespace, PathSegment, read_tokens
from headstart.cache.identity import PUBLIC, TOKEN_BYTES
from headstart.server.cache.traffic import PastPrompt

if TYPE_CHECKING:
    from headstart.cache import KVCacheManager
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.server.monitoring.watch import Watch
    from headstart.server.tenants import Tenants

MAX_CELLS = 8192
EMPTY, CACHED, HELD = 0, 1, 2  # states of a cell
_MOST_PREFIXES = 64
_MOST_REQUESTS = 64
_SHOWN_TOKENS = 48  # tokens to show of a prefix
_SHOWN = 16  # characters to show of a salt or digest
_LEAST_PAUSE = 1.0  # seconds
_PAUSE_RATIO = 50  # minimum ratio of the pause to the duration of a snapshot

Tenancy = Mapping[str, tuple[str, str]] | None
"""Kind and name of each tenant, by its salt; None for a server without keys."""


class Live:
    """Snapshots of the pool for all viewers, in one event loop."""

    def __init__(self, llm: AsyncLLM, watch: Watch, tenants: Tenants) -> None:
        self._llm = llm
        self._watch = watch
        self._tenants = tenants
        self._lock = asyncio.Lock()
        self._began = -1e9  # start of the last snapshot, by `time.monotonic`
        self._took = 0.0  # seconds that it took, in the engine's thread and then in a worker
        self._snapshot: dict[str, Any] = {}
        self._segments: list[PathSegment] = []
        self.num_watchers = 0  # open streams of snapshots

    @property
    def pause(self) -> float:
        """Seconds from one snapshot to the next."""
        return max(_LEAST_PAUSE, _PAUSE_RATIO * self._took)

    async def show(self, *, is_now: bool = False) -> dict[str, Any]:
        """Return a snapshot of the pool and the recent requests, at most `pause` seconds old.

        is_now: wait for a snapshot that begins after this call.
        """
        called = time.monotonic()
        async with self._lock:
            if is_now and self._began < called:
                due = self._began + _PAUSE_RATIO * self._took
                await asyncio.sleep(due - time.monotonic())
                await self._refresh()
            elif time.monotonic() - self._began >= 0.9 * self.pause:
                await self._refresh()
        traffic = await asyncio.to_thread(self._watch.recent_requests)
        return self._snapshot | {"traffic": traffic}

    async def block_text(self, block_id: int) -> dict[str, Any]:
        """Return the text that the block had in the last snapshot."""
        for index, segment in enumerate(self._segments):
            if block_id in segment.ids:
                tokens = read_tokens(segment.keys[segment.ids.index(block_id)])
                decode = self._watch.decode
                text = await asyncio.to_thread(decode, tokens) if decode is not None else None
                return {"block": block_id, "prefix": index, "tokens": len(tokens), "text": text}
        return {"block": block_id, "prefix": None, "tokens": 0, "text": None}

    async def _refresh(self) -> None:
        manager = self._llm.manager
        tenants = self._tenants.names() if self._tenants.requires_keys else None
        began = time.monotonic()

        def read() -> tuple[float, dict[str, Any], list[PathSegment], list[int], Counter[int]]:
            start = time.perf_counter()
            segments = manager.path_segments()
            snapshot = _describe_engine(self._llm) | {"pool": _count(manager, segments, tenants)}
            held = manager.held_blocks()
            checkpoints = _count_checkpoints(manager)
            return time.perf_counter() - start, snapshot, segments, held, checkpoints

        took, snapshot, segments, held, checkpoints = await self._llm.call(read)

        def describe() -> float:
            start = time.perf_counter()
            prompts = self._watch.recent_prompts()
            chosen = _choose(segments)
            hits = count_hits(segments, chosen, prompts, manager.block_size)
            snapshot["prefixes"] = [
                self._describe(index, segments[index], tenants) | {"hits": hits[index]}
                for index in chosen
            ]
            if manager.states is not None:
                for prefix in snapshot["prefixes"]:
                    ids = segments[prefix["id"]].ids
                    prefix["checkpoints"] = sum(checkpoints[block_id] for block_id in ids)
            snapshot["cells"] = _draw(manager.config.num_blocks, segments, held, set(chosen))
            return time.perf_counter() - start

        took += await asyncio.to_thread(describe)
        self._began, self._took, self._snapshot, self._segments = began, took, snapshot, segments

    def _describe(self, index: int, segment: PathSegment, tenants: Tenancy) -> dict[str, Any]:
        decode, text = self._watch.decode, None
        if decode is not None:
            tokens = [token for key in segment.keys[:_SHOWN_TOKENS] for token in read_tokens(key)]
            text = decode(tokens[:_SHOWN_TOKENS])
        return {
            "id": index,
            "parent": segment.parent if segment.parent >= 0 else None,
            "first_block": segment.start,
            "blocks": len(segment.ids),
            "held": segment.num_held,
            "text": text,
            **_describe_owner(segment.namespace, tenants),
        }


def _describe_engine(llm: AsyncLLM) -> dict[str, Any]:
    """Return counts since the start, and the running requests. Must run in the engine's thread."""
    stats = llm.manager.stats
    running, waiting = llm.requests
    drafting = llm.engine.drafting
    return {
        "engine": {
            "requests": stats.requests,
            "queried_tokens": stats.queried_tokens,
            "hit_tokens": stats.hit_tokens,
            "hit_rate": round(stats.hit_rate, 4),
            "missed": {reason.name.lower(): count for reason, count in stats.missed.items()},
            "reasons": {reason.name.lower(): reason.value for reason in MissReason},
            "preemptions": llm.num_preemptions,
            "drafted_tokens": drafting.num_drafted if drafting is not None else 0,
            "accepted_tokens": drafting.num_accepted if drafting is not None else 0,
            "running": len(running),
            "waiting": len(waiting),
        },
        "batch": [
            {
                "id": request.group.request_id,
                "prompt_tokens": len(request.group.prompt_token_ids),
                "cached_tokens": request.num_cached_tokens,
                "read_tokens": min(
                    max(request.num_read, request.num_cached_tokens),
                    len(request.group.prompt_token_ids),
                ),
                "generated_tokens": len(request.sampling.output_token_ids),
            }
            for request in running[:_MOST_REQUESTS]
        ],
    }


def _count(
    manager: KVCacheManager, segments: Sequence[PathSegment], tenants: Tenancy
) -> dict[str, Any]:
    """Return the blocks by state and by owner. Must run in the engine's thread."""
    by_owner: dict[Namespace, Counter[str]] = defaultdict(Counter)
    for segment in segments:
        owner = by_owner[_find_owner(segment.namespace, tenants)]
        owner["blocks"] += len(segment.ids)
        owner["held"] += segment.num_held
    counts = sum(by_owner.values(), Counter[str]())
    cached = counts["blocks"] - counts["held"]
    num_blocks, free = manager.config.num_blocks, manager.num_free_blocks
    pool: dict[str, Any] = {
        "block_size": manager.block_size,
        "num_blocks": num_blocks,
        "held": num_blocks - free,
        "cached": cached,
        "empty": free - cached,
        "owners": [
            {**_describe_owner(owner, tenants), **counts}
            for owner, counts in sorted(by_owner.items(), key=lambda item: -item[1]["blocks"])
        ],
    }
    if (states := manager.states) is not None:
        pool["states"] = {
            "slots": states.num_slots,
            "running": states.num_working,
            "checkpoints": len(states.checkpoints),
            "free": states.num_free,
            "dropped": states.num_dropped,
        }
    if (windows := manager.windows) is not None:
        pool["windows"] = {
            "tokens": windows.width,
            "blocks": windows.num_blocks,
            "held": windows.num_blocks - windows.num_free,
            "cached": windows.num_free - windows.num_empty,
            "empty": windows.num_empty,
            "evicted": windows.num_dropped,
        }
    if states is not None or windows is not None:
        pool["recomputed_tokens"] = manager.stats.recomputed_tokens
    return pool


def _count_checkpoints(manager: KVCacheManager) -> Counter[int]:
    """Count the checkpoints of recurrent layers, by the id of the block that each belongs to."""
    checkpoints = manager.states.checkpoints if manager.states is not None else ()
    nodes = (checkpoint.node for checkpoint in checkpoints)
    return Counter(node.block.block_id for node in nodes if node is not None and node.block)


def _choose(segments: Sequence[PathSegment]) -> list[int]:
    """Return the indices of the largest segments and of their parents, parents first."""
    ranked = sorted(range(len(segments)), key=lambda index: -len(segments[index].ids))
    chosen: set[int] = set()
    for index in ranked[:_MOST_PREFIXES]:
        while index >= 0 and index not in chosen:
            chosen.add(index)
            index = segments[index].parent
    return sorted(chosen, key=lambda index: (segments[index].start, -len(segments[index].ids)))


def _draw(
    num_blocks: int, segments: Sequence[PathSegment], held: Sequence[int], chosen: set[int]
) -> dict[str, Any]:
    """Return the cells in order of block ids, as runs of [number of cells, state, prefix or -1].

    A cell of several blocks shows its first held block. Without a held block, it shows its first
    cached block.
    """
    states: NDArray[np.int64] = np.full(num_blocks, EMPTY, np.int64)
    prefixes: NDArray[np.int64] = np.full(num_blocks, -1, np.int64)
    for index, segment in enumerate(segments):
        states[segment.ids] = CACHED
        if index in chosen:
            prefixes[segment.ids] = index
    states[list(held)] = HELD
    per_cell = -(-num_blocks // MAX_CELLS)
    padding = -num_blocks % per_cell
    rows = np.pad(states, (0, padding)).reshape(-1, per_cell)
    pick = np.arange(len(rows)) * per_cell + rows.argmax(axis=1)
    prefixes = np.pad(prefixes, (0, padding), constant_values=-1)[pick]
    states = rows.max(axis=1)
    starts = np.flatnonzero(np.diff(states, prepend=-1) | np.diff(prefixes, prepend=-2))
    lengths = np.diff(starts, append=len(states))
    runs = np.stack([lengths, states[starts], prefixes[starts]], axis=1)
    return {"blocks_per_cell": per_cell, "runs": runs.tolist()}


def count_hits(
    segments: Sequence[PathSegment],
    indices: Sequence[int],
    prompts: Iterable[PastPrompt],
    block_size: int,
) -> Counter[int]:
    """Count the prompts that hit the first block of each segment, by the segment's index.

    indices: the segments to count and all their parents, parents first. The keys of a segment are
    compared with the tokens of the prompts. So a segment has no hits if its keys also contain an
    image, or the salt after a public prefix.
    """
    cached: dict[Namespace, list[bytes]] = {segments[index].namespace: [] for index in indices}
    for prompt in prompts:
        num_tokens = prompt.num_cached // block_size * block_size
        data = prompt.tokens[:num_tokens].astype("<i4").tobytes()
        for namespace in {prompt.namespace, prompt.namespace._replace(salt=PUBLIC)}:
            if namespace in cached:
                cached[namespace].append(data)
    for prefixes in cached.values():
        prefixes.sort()
    hits: Counter[int] = Counter()
    paths = {-1: b""}  # the tokens up to the end of each segment
    for index in indices:
        segment = segments[index]
        if not segment.keys or segment.parent not in paths:
            continue  # blocks of the path were evicted
        if len(segment.keys[0]) < block_size * TOKEN_BYTES:
            continue  # a partial block
        begin, prefixes = paths[segment.parent], cached[segment.namespace]
        first = begin + segment.keys[0]
        after = first + b"\xff" * TOKEN_BYTES  # greater than any prefix that begins with `first`
        hits[index] = bisect_left(prefixes, after) - bisect_left(prefixes, first)
        paths[index] = begin + b"".join(segment.keys)
    return hits


def _find_owner(namespace: Namespace, tenants: Tenancy) -> Namespace:
    """Return a namespace without the request's part of the salt, which follows a slash."""
    salt = (namespace.salt or "").partition("/")[0]
    return namespace._replace(salt=salt) if salt in (tenants or ()) else namespace


def _describe_owner(namespace: Namespace, tenants: Tenancy) -> dict[str, Any]:
    """Return the owner of a namespace in the API's form: a tenant, all tenants, or a salt.

    >>> _describe_owner(Namespace(None, "d2a1/77f0"), {"d2a1": ("group", "research")})
    {'kind': 'group', 'tenant': 'research', 'salt': None, 'adapter': None}
    """
    adapter, salt = _find_owner(namespace, tenants)
    named: dict[str, Any] = {}
    if tenants is not None:
        kind, name = ("public", None) if salt == PUBLIC else tenants.get(salt or "", (None, None))
        named = {"kind": kind, "tenant": name}
        salt = salt if kind is None else None
    salt, adapter = (text and text[:_SHOWN] for text in (salt, adapter))
    return {**named, "salt": salt, "adapter": adapter}
