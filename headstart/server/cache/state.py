"""The pool as it is now: how full it is, and the largest prefixes in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.cache import MissReason, Stretch, read_tokens
from headstart.server.cache.hits import count_hits
from headstart.server.cache.owners import Owner, Owners
from headstart.server.cache.traffic import Seen

if TYPE_CHECKING:
    from headstart.cache import KVCacheManager
    from headstart.engine.engine import Engine

__all__ = ["PrefixView", "describe_batch", "describe_engine", "describe_pool", "describe_prefixes"]

_SHOWN_TOKENS = 48
Decode = Callable[[Sequence[int]], str]


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Counts since the start, and requests of now. For the engine's thread."""
    stats = engine.manager.stats
    running, waiting = map(len, engine.requests)
    return {
        "requests": stats.requests,
        "queried_tokens": stats.queried_tokens,
        "hit_tokens": stats.hit_tokens,
        "hit_rate": round(stats.hit_rate, 4),
        "missed": {reason.name.lower(): count for reason, count in stats.missed.items()},
        "reasons": {reason.name.lower(): reason.value for reason in MissReason},
        "preemptions": engine.num_preemptions,
        "running": running,
        "waiting": waiting,
    }


def describe_batch(engine: Engine, most: int) -> list[dict[str, Any]]:
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
        for request in engine.requests[0][:most]
    ]


def describe_pool(
    manager: KVCacheManager, stretches: Sequence[Stretch], owners: Owners
) -> dict[str, Any]:
    """Blocks by state, and who has them. For the engine's thread."""
    by_owner: dict[Owner, Counter[str]] = defaultdict(Counter)
    for stretch in stretches:
        owner = by_owner[owners.of(stretch.namespace)]
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
            {**owners.tell(owner), **counts}
            for owner, counts in sorted(by_owner.items(), key=lambda item: -item[1]["blocks"])
        ],
    }


class PrefixView(NamedTuple):
    """How prefixes are told.

    decode: how their first tokens are told as text; None tells none. prompts: those whose hits are
    counted.
    """

    owners: Owners
    decode: Decode | None
    prompts: Iterable[Seen]
    block_size: int


def describe_prefixes(
    stretches: Sequence[Stretch], most: int, view: PrefixView
) -> list[dict[str, Any]]:
    """The `most` stretches with most blocks and those that they go on from, parents first."""
    ranked = sorted(range(len(stretches)), key=lambda at: -len(stretches[at].ids))
    chosen: set[int] = set()
    for at in ranked[:most]:
        while at >= 0 and at not in chosen:
            chosen.add(at)
            at = stretches[at].parent
    by_depth = sorted(chosen, key=lambda at: (stretches[at].start, -len(stretches[at].ids)))
    hits = count_hits(stretches, by_depth, view.prompts, view.block_size)
    return [_describe(at, stretches[at], view) | {"hits": hits[at]} for at in by_depth]


def _describe(at: int, stretch: Stretch, view: PrefixView) -> dict[str, Any]:
    tokens: list[int] = []
    owners, decode = view.owners, view.decode
    for key in stretch.keys:
        if len(tokens) >= _SHOWN_TOKENS or decode is None:
            break
        tokens += read_tokens(key)
    return {
        "id": at,
        "parent": stretch.parent if stretch.parent >= 0 else None,
        **owners.tell(owners.of(stretch.namespace)),
        "first_block": stretch.start,
        "blocks": len(stretch.ids),
        "held": stretch.num_held,
        "text": decode(tokens[:_SHOWN_TOKENS]) if decode is not None else None,
    }
