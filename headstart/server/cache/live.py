"""The pool as the page draws it: cells in the colours of prefixes, and the traffic, every second.

A look takes the engine's thread 0.4 us a block. So that watching costs at most a fiftieth of its
time, the next look comes after fifty times as long as the last took, and all viewers share it. A
pool of more than `MAX_CELLS` blocks is drawn with several blocks to a cell.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.cache import BlockKey, MissReason, Namespace, PathSegment, read_tokens
from headstart.cache.identity import PUBLIC, TOKEN_BYTES
from headstart.server.cache.traffic import Seen

if TYPE_CHECKING:
    from headstart.cache import KVCacheManager
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.server.monitoring.watch import Watch
    from headstart.server.tenants import Tenants

__all__ = ["Live", "count_hits"]

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
    stretches: list[PathSegment] = field(default_factory=list)


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
        """Return the text in a block at the last look."""
        for at, stretch in enumerate(self._look.stretches):
            if block_id in stretch.ids:
                tokens = read_tokens(stretch.keys[stretch.ids.index(block_id)])
                decode = self._watch.decode
                text = await asyncio.to_thread(decode, tokens) if decode is not None else None
                return {"block": block_id, "prefix": at, "tokens": len(tokens), "text": text}
        return {"block": block_id, "prefix": None, "tokens": 0, "text": None}

    async def _refresh(self) -> None:
        llm = self._llm
        manager = llm.manager
        tenants = self._tenants.names() if self._tenants.ask_for_keys else None
        at = time.monotonic()

        def look() -> tuple[float, dict[str, Any], list[PathSegment], list[int]]:
            start = time.perf_counter()
            stretches = manager.path_segments()
            told = {
                "engine": describe_engine(llm),
                "batch": describe_batch(llm, _MOST_REQUESTS),
                "pool": describe_pool(manager, stretches, tenants),
            }
            held = manager.held_blocks()
            return time.perf_counter() - start, told, stretches, held

        took, told, stretches, held = await self._llm.call(look)

        def describe() -> float:
            start = time.perf_counter()
            prompts = self._watch.recent_prompts()
            shown = choose_prefixes(stretches, _MOST_PREFIXES)
            hits = count_hits(stretches, shown, prompts, manager.block_size)
            told["prefixes"] = [
                describe_prefix(at, stretches[at], self._watch.decode)
                | describe_owner(find_owner(stretches[at].namespace, tenants), tenants)
                | {"hits": hits[at]}
                for at in shown
            ]
            told["cells"] = draw_cells(manager.config.num_blocks, stretches, held, set(shown))
            return time.perf_counter() - start

        took += await asyncio.to_thread(describe)
        self._look = _Look(at, took, told, stretches)


def draw_cells(
    num_blocks: int, stretches: Sequence[PathSegment], held: Sequence[int], shown: set[int]
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


_SHOWN_TOKENS = 48
_SHOWN = 16  # characters of a salt or digest
Decode = Callable[[Sequence[int]], str]
Tenancy = Mapping[str, tuple[str, str]] | None
"""Kind and name of tenants, by what all their salts begin with; None for a server without keys."""


def describe_engine(llm: AsyncLLM) -> dict[str, Any]:
    """Counts since the start, and requests of now. For the engine's thread."""
    stats = llm.manager.stats
    running, waiting = map(len, llm.requests)
    return {
        "requests": stats.requests,
        "queried_tokens": stats.queried_tokens,
        "hit_tokens": stats.hit_tokens,
        "hit_rate": round(stats.hit_rate, 4),
        "missed": {reason.name.lower(): count for reason, count in stats.missed.items()},
        "reasons": {reason.name.lower(): reason.value for reason in MissReason},
        "preemptions": llm.num_preemptions,
        "running": running,
        "waiting": waiting,
    }


def describe_batch(llm: AsyncLLM, most: int) -> list[dict[str, Any]]:
    """The first requests that run, and how far each is. For the engine's thread."""
    return [
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
        for request in llm.requests[0][:most]
    ]


def describe_pool(
    manager: KVCacheManager, stretches: Sequence[PathSegment], tenants: Tenancy
) -> dict[str, Any]:
    """Blocks by state, and who has them. For the engine's thread."""
    by_owner: dict[Owner, Counter[str]] = defaultdict(Counter)
    for stretch in stretches:
        owner = by_owner[find_owner(stretch.namespace, tenants)]
        owner["blocks"] += len(stretch.ids)
        owner["held"] += stretch.num_held
    named = sum(owner["blocks"] for owner in by_owner.values())
    named_held = sum(owner["held"] for owner in by_owner.values())
    num_blocks, free = manager.config.num_blocks, manager.num_free_blocks
    return {
        "block_size": manager.block_size,
        "num_blocks": num_blocks,
        "held": num_blocks - free,
        "cached": named - named_held,
        "empty": free - (named - named_held),
        "owners": [
            {**describe_owner(owner, tenants), **counts}
            for owner, counts in sorted(by_owner.items(), key=lambda item: -item[1]["blocks"])
        ],
    }


def choose_prefixes(stretches: Sequence[PathSegment], most: int) -> list[int]:
    """Return the places of the `most` largest stretches and of their parents, parents first."""
    ranked = sorted(range(len(stretches)), key=lambda at: -len(stretches[at].ids))
    chosen: set[int] = set()
    for at in ranked[:most]:
        while at >= 0 and at not in chosen:
            chosen.add(at)
            at = stretches[at].parent
    return sorted(chosen, key=lambda at: (stretches[at].start, -len(stretches[at].ids)))


def describe_prefix(at: int, stretch: PathSegment, decode: Decode | None) -> dict[str, Any]:
    """Return a prefix as the page shows it; without `decode` its text is None."""
    tokens = [token for key in stretch.keys[:_SHOWN_TOKENS] for token in read_tokens(key)]
    return {
        "id": at,
        "parent": stretch.parent if stretch.parent >= 0 else None,
        "first_block": stretch.start,
        "blocks": len(stretch.ids),
        "held": stretch.num_held,
        "text": decode(tokens[:_SHOWN_TOKENS]) if decode is not None else None,
    }


# A stretch's parent, at the root also whose it is, and its first block.
_Place = tuple[int, Namespace | None, BlockKey]


def count_hits(
    stretches: Sequence[PathSegment],
    places: Iterable[int],
    prompts: Iterable[Seen],
    block_size: int,
) -> Counter[int]:
    """For each of these places in `stretches`: prompts that found all of its first block cached.

    `places` come with their parents. Blocks of tokens alone are compared: an image, or the salt of
    a tenant behind a public prefix, is in a block's key, and not in what is kept of a prompt.
    """
    known: dict[_Place, int] = {}
    for at in places:
        stretch = stretches[at]
        if not stretch.keys:  # its blocks were evicted
            continue
        owner = stretch.namespace if stretch.parent < 0 else None
        known[stretch.parent, owner, stretch.keys[0]] = at
    hits: Counter[int] = Counter()
    for seen in prompts:
        hits.update(_path(stretches, known, seen, block_size))
    return hits


def _path(
    stretches: Sequence[PathSegment], known: dict[_Place, int], seen: Seen, block_size: int
) -> list[int]:
    """The places of the stretches that a prompt found, from the root on."""
    step = block_size * TOKEN_BYTES
    found = seen.num_cached // block_size  # of a prompt that ends with a block, that one is not
    data = seen.tokens[: found * block_size].astype("<i4").tobytes()
    public = seen.namespace._replace(salt=PUBLIC)
    path: list[int] = []
    owners: tuple[Namespace | None, ...] = (public, seen.namespace)
    parent, block = -1, 0
    while block < found:
        key = BlockKey(data[block * step : (block + 1) * step])
        places = [(parent, owner, key) for owner in owners]
        at = next((known[place] for place in places if place in known), None)
        if at is None:
            break
        path.append(at)
        keys = stretches[at].keys
        last = block + len(keys)
        if data[(last - 1) * step : last * step] != keys[-1]:
            break
        parent, block, owners = at, last, (None,)
    return path


class Owner(NamedTuple):
    """The owner of blocks: a tenant or a public prefix by kind and name, or else a salt."""

    adapter: str | None
    salt: str | None
    kind: str | None = None  # "key", "group", "operator" or "public"
    name: str | None = None


def find_owner(namespace: Namespace, tenants: Tenancy) -> Owner:
    """Return the owner of a namespace: its tenant, also if a request has narrowed the salt.

    >>> find_owner(Namespace(None, "d2a1/77f0"), {"d2a1": ("group", "research")})
    Owner(adapter=None, salt=None, kind='group', name='research')
    """
    adapter, salt = namespace
    if tenants is None or salt is None:
        return Owner(adapter, salt)
    if salt == PUBLIC:
        return Owner(adapter, None, "public")
    tenant = tenants.get(salt.partition("/")[0])
    return Owner(adapter, salt) if tenant is None else Owner(adapter, None, *tenant)


def describe_owner(owner: Owner, tenants: Tenancy) -> dict[str, Any]:
    """Return an owner as the API shows it; without keys only its salt and its adapter."""
    named = {} if tenants is None else {"kind": owner.kind, "tenant": owner.name}
    salt, adapter = (text and text[:_SHOWN] for text in (owner.salt, owner.adapter))
    return {**named, "salt": salt, "adapter": adapter}
