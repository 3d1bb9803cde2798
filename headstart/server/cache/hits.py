"""How many of the last prompts found each cached prefix, counted when somebody looks.

A count in each node of the tree would cost time in the cache's innermost loops. The last prompts,
which are kept for advice, walked through the shown prefixes, tell the same of late: some
microseconds a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headstart.cache import BlockKey, Namespace, Stretch
from headstart.cache.identity import PUBLIC, TOKEN_BYTES
from headstart.server.cache.traffic import Seen

__all__ = ["count_hits"]

# A stretch's parent, at the root also whose it is, and its first block.
_Place = tuple[int, Namespace | None, BlockKey]


def count_hits(
    stretches: Sequence[Stretch], places: Iterable[int], prompts: Iterable[Seen], block_size: int
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
    stretches: Sequence[Stretch], known: dict[_Place, int], seen: Seen, block_size: int
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
