"""The prefix index over replicas: how much of a prompt each of them holds.

A dictionary for each tier maps a block to the replicas that hold it, as the bits of one int, so
a block that many replicas hold costs no more than one that a single replica holds. A block is
known by the first 8 bytes of its SHA-256 name: an int of 32 bytes, where the whole name would
take 80. Two of ten million blocks share these bytes with a probability of 3 in a million, and
even then a prompt would have to hold the one where the other is expected. The index is a hint
in any case: an engine looks up its own blocks, so a lost event or a shared name costs a worse
choice, never a wrong answer.

An engine evicts a prefix from its end, so who has a block has those before it: a query bisects
for each depth that the prompt has somewhere, and leaves the blocks between alone. A lookup waits
for memory, up to 1 us, so asking for every block of 8,192 tokens took a quarter of a millisecond.
After a lost event, or where a tier has lost a block in the middle, a query may tell too much.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, NewType, TypeVar, cast

from headstart.cache import BlockHash
from headstart.cluster.events import NAME_BYTES, POOL, TIERS, EventBatch
from headstart.errors import ConfigError

PrefixKey = NewType("PrefixKey", int)
Outcome = TypeVar("Outcome")

MAX_BACKLOG = 1024
"""Batches kept of a replica whose snapshot is awaited."""


class Match(NamedTuple):
    """How many blocks of a prompt's head each replica has, by replica.

    cached: blocks in its KV pool. expected: in its pool, or being computed for a request that was
    sent there. stored: the same, or in a slower tier, from which they must be loaded.
    """

    cached: list[int]
    expected: list[int]
    stored: list[int]


def prefix_keys(names: Sequence[BlockHash]) -> Sequence[PrefixKey]:
    """What the index knows blocks of these names by: an array."""
    return unpack_keys(b"".join(names))


def unpack_keys(packed: bytes) -> Sequence[PrefixKey]:
    """The same of names that stand one behind the other."""
    words = array("Q", packed)  # in this machine's order of bytes: keys never leave the process
    return cast("Sequence[PrefixKey]", words[:: NAME_BYTES // words.itemsize])


_Holders = dict[PrefixKey, int]

_SLICE = 4096
"""Blocks that are noted at once."""

_STRIDE = 64
"""Blocks from one that is asked for to the next, until nobody has one."""


class _Feed:
    """How far the events of one replica and tier have come."""

    __slots__ = ("backlog", "epoch", "is_current", "is_empty", "number")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.number = -1
        self.is_current = True
        self.is_empty = True  # nothing was stored since it was cleared
        self.backlog: list[EventBatch] = []


class ReplicaIndex:
    """Which replicas hold which blocks, fed by the events of each.

    Raises ConfigError for fewer than one replica.
    """

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}; allowed: at least 1")
        self.num_replicas = num_replicas
        self._bits = [1 << replica for replica in range(num_replicas)]
        self._holders: dict[str, _Holders] = {tier: {} for tier in TIERS}
        self._expected: _Holders = {}
        self._feeds = {(r, tier): _Feed() for r in range(num_replicas) for tier in TIERS}

    def __len__(self) -> int:
        """Blocks that some replica holds in its pool."""
        return len(self._holders[POOL])

    # Events

    def apply(self, batch: EventBatch) -> bool:
        """Take a batch or snapshot; False where a snapshot is needed to be exact again.

        What comes while a snapshot is awaited is applied too, and again after the snapshot if
        it is newer. Raises ConfigError for a replica or tier that there is not.
        """
        return _finish(self.steps(batch))

    def steps(self, batch: EventBatch) -> Generator[None, None, bool]:
        """As `apply`, in steps of about a millisecond; requests may be routed between them.

        A large replica's snapshot takes a tenth of a second in all. The caller leaves it if the
        replica is removed meanwhile, and takes no other batch of that replica before its end.
        """
        feed = self._feeds.get((batch.replica, batch.tier))
        if feed is None:
            raise ConfigError(
                f"events of replica {batch.replica}, tier {batch.tier!r}; allowed: replicas "
                f"below {self.num_replicas}, tiers {', '.join(TIERS)}"
            )
        if batch.epoch != feed.epoch:
            if feed.epoch is not None:
                yield from self._clear(batch.replica, batch.tier)
            feed.epoch, feed.number, feed.is_current, feed.backlog = batch.epoch, -1, True, []
        if batch.snapshot:
            return (yield from self._replace(feed, batch))
        if batch.number <= feed.number:
            return feed.is_current  # it came twice
        if batch.number != feed.number + 1:
            feed.is_current = False
        feed.number = batch.number
        if not feed.is_current:
            feed.backlog = [*feed.backlog[1 - MAX_BACKLOG :], batch]
        yield from self._change(feed, batch)
        return feed.is_current

    def is_current(self, replica: int, tier: str = POOL) -> bool:
        """False while a snapshot of the replica is awaited."""
        return self._feeds[replica, tier].is_current

    def remove(self, replica: int) -> None:
        """The replica is gone: nothing of it is held. One scan over all blocks."""
        for tier in TIERS:
            _finish(self._clear(replica, tier))
            self._feeds[replica, tier] = _Feed()
        self.unexpect(replica, list(self._expected))

    def _replace(self, feed: _Feed, snapshot: EventBatch) -> Generator[None, None, bool]:
        """Begin anew from a snapshot, then apply what came after it was taken."""
        newer = [batch for batch in feed.backlog if batch.number > snapshot.number]
        if feed.is_current and feed.number > snapshot.number:
            return True  # it comes late, and nothing is missing
        expected = range(snapshot.number + 1, snapshot.number + 1 + len(newer))
        if feed.number > snapshot.number + len(newer) or [b.number for b in newer] != [*expected]:
            return False  # older than what was lost
        feed.number = snapshot.number + len(newer)
        feed.is_current, feed.backlog = True, []
        for batch in (snapshot, *newer):
            yield from self._change(feed, batch)
        return True

    def _change(self, feed: _Feed, batch: EventBatch) -> Generator[None, None, None]:
        if batch.cleared:
            yield from self._clear(batch.replica, batch.tier)
        holders, bit = self._holders[batch.tier], self._bits[batch.replica]
        feed.is_empty = feed.is_empty and not batch.stored
        last = bit
        for keys in _slices(unpack_keys(batch.stored)):
            for key in keys:
                mask = holders.get(key, 0) | bit
                # One int for all blocks of a prefix that the same replicas hold: less memory to
                # keep, and to read in a query.
                if mask != last:
                    last = bit if mask == bit else mask
                holders[key] = last
            if len(keys) == _SLICE:
                yield
        for keys in _slices(unpack_keys(batch.removed)):
            for key in keys:
                _take_bit(holders, key, bit, self._bits)
            if len(keys) == _SLICE:
                yield

    def _clear(self, replica: int, tier: str) -> Generator[None, None, None]:
        """One look at every block, unless the replica never said that it holds any."""
        feed = self._feeds[replica, tier]
        if feed.is_empty:
            return
        holders, bit = self._holders[tier], self._bits[replica]
        for keys in _slices(list(holders)):
            for key in keys:
                if holders.get(key, 0) & bit:
                    _take_bit(holders, key, bit, self._bits)
            yield
        feed.is_empty = True

    # Prefixes that are being computed

    def expect(self, replica: int, keys: Iterable[PrefixKey]) -> list[PrefixKey]:
        """The replica will hold these blocks, of a request sent there. Returns those it adds.

        The caller hands them to `unexpect` when the blocks are computed, or will not be.
        """
        expected, bit = self._expected, self._bits[replica]
        added = []
        for key in keys:
            before = expected.get(key, 0)
            if not before & bit:
                expected[key] = before | bit if before else bit
                added.append(key)
        return added

    def unexpect(self, replica: int, keys: Iterable[PrefixKey]) -> None:
        """Take back what `expect` added."""
        for key in keys:
            _take_bit(self._expected, key, self._bits[replica], self._bits)

    # Queries

    def match(self, keys: Sequence[PrefixKey]) -> Match:
        """How many of a prompt's blocks, from the first on, each replica has."""
        pool, lower = self._holders[POOL], [self._holders[tier] for tier in TIERS[1:]]
        cached = self._depths([pool], keys)
        expected = self._depths([pool, self._expected], keys) if self._expected else cached
        if not any(lower):
            return Match(cached, expected, expected)
        return Match(cached, expected, self._depths([pool, self._expected, *lower], keys))

    def _depths(self, tables: Sequence[_Holders], keys: Sequence[PrefixKey]) -> list[int]:
        """For each replica, how many blocks it has in one of these tables."""
        depths = [0] * self.num_replicas
        # Of some replicas, the least and the most that they can have.
        unsure = [((1 << self.num_replicas) - 1, 0, _reach(tables, keys))]
        while unsure:
            replicas, low, high = unsure.pop()
            while low < high:
                middle = (low + high) // 2
                found = 0
                for table in tables:
                    found |= table.get(keys[middle], 0)
                found &= replicas
                if found == replicas:
                    low = middle + 1
                elif found:
                    unsure.append((found, middle + 1, high))
                    replicas, high = replicas ^ found, middle
                else:
                    high = middle
            if low:  # they are 0 already, and mostly many
                _set_bits(depths, replicas, low)
        return depths


def _finish(steps: Generator[None, None, Outcome]) -> Outcome:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("Outcome", done.value)


def _slices(keys: Sequence[PrefixKey]) -> Iterator[Sequence[PrefixKey]]:
    return (keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE))


def _reach(tables: Sequence[_Holders], keys: Sequence[PrefixKey]) -> int:
    """How many of a prompt's first blocks somebody may hold; those behind are not named for it."""
    for at in range(_STRIDE - 1, len(keys), _STRIDE):
        key = keys[at]
        if not any(key in table for table in tables):
            return at
    return len(keys)


def _set_bits(runs: list[int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        runs[low.bit_length() - 1] = depth
        bits ^= low


def _take_bit(holders: _Holders, key: PrefixKey, bit: int, singles: Sequence[int]) -> None:
    mask = holders.get(key, 0)
    if mask & bit:
        left = mask ^ bit
        if not left:
            del holders[key]
        elif left & (left - 1):
            holders[key] = left
        else:
            holders[key] = singles[left.bit_length() - 1]
