"""The prefix index over replicas: how much of a prompt each of them holds.

A table for each tier maps a block to the replicas that hold it, as the bits of one int, so a block
that many replicas hold costs no more than one that a single replica holds. A block is known by the
first 8 bytes of its SHA-256 name: an int of 32 bytes, where the whole name would take 80. Two of
ten million blocks share these bytes with a probability of 3 in a million, and even then a prompt
would have to hold the one where the other is expected. The index is a hint in any case: an engine
looks up its own blocks, so a lost event or a shared name costs a worse choice, never a wrong
answer.

An engine evicts a prefix from its end, so who has a block has those before it: a query bisects
for each depth that the prompt has somewhere, and leaves the blocks between alone. A lookup waits
for memory, up to 1 us, so asking for every block of 8,192 tokens took a quarter of a millisecond.
After a lost event, or where a tier has lost a block in the middle, a query may tell too much.

Where all replicas share a store, who said that a block is in it does not matter: one search finds
how much of a prompt it has for all of them.

A replica that is removed is in no answer any more at once. What it held stays in the tables for a
while: each batch that comes looks through some blocks, several times as many as it stores.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from headstart.cache import BlockHash
from headstart.cluster.events import NAME_BYTES, POOL, TIERS, EventBatch
from headstart.cluster.holders import (
    Holders,
    PrefixKey,
    ReplicaBits,
    add_bit,
    count_parts,
    make_holders,
    take_bit,
    take_bits,
)
from headstart.errors import ConfigError

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


_SLICE = 512
"""Blocks that are noted at once: less than a millisecond."""

_STRIDE = 64
"""Blocks from one that is asked for to the next, until nobody has one."""


class _Depths(NamedTuple):
    """counts: blocks by replica. is_of_first: the first of the tables alone gives the same."""

    counts: list[int]
    is_of_first: bool


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

    shares_store: what one replica has in a tier below its pool, all can load.

    Raises ConfigError for fewer than one replica.
    """

    def __init__(self, num_replicas: int, *, shares_store: bool = False) -> None:
        if num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}; allowed: at least 1")
        self.num_replicas = num_replicas
        self._shares_store = shares_store
        self._bits = ReplicaBits(num_replicas)
        self._num_parts = count = count_parts(num_replicas)
        self._holders = {tier: make_holders(count) for tier in TIERS}
        self._lower: dict[str, Holders] = {}  # of the tiers below the pool that had a block
        self._expected = make_holders(count)
        self._sweeping: Generator[None, None, None] | None = None
        self._feeds = {(r, tier): _Feed() for r in range(num_replicas) for tier in TIERS}

    def __len__(self) -> int:
        """Blocks that some replica holds in its pool, and those of removed ones not swept yet."""
        return sum(map(len, self._holders[POOL]))

    # Events

    def apply(self, batch: EventBatch) -> bool:
        """Take a batch or snapshot; False where a snapshot is needed to be exact again.

        What comes while a snapshot is awaited is applied too, and again after the snapshot if
        it is newer. Raises ConfigError for a replica or tier that there is not.
        """
        return _finish(self.steps(batch))

    def steps(self, batch: EventBatch) -> Generator[None, None, bool]:
        """As `apply`, in steps of about a millisecond; requests may be routed between them.

        A large replica's snapshot takes a tenth of a second in all. If the replica is removed
        meanwhile, nothing more is noted; the caller then leaves it. It takes no other batch of
        that replica before the end.
        """
        feed = self._feeds.get((batch.replica, batch.tier))
        if feed is None:
            raise ConfigError(
                f"events of replica {batch.replica}, tier {batch.tier!r}; allowed: replicas "
                f"below {self.num_replicas}, tiers {', '.join(TIERS)}"
            )
        noting = self._note(feed, batch)
        while True:
            self.sweep()
            try:
                next(noting)
            except StopIteration as done:
                return bool(done.value)
            yield
            if self._feeds[batch.replica, batch.tier] is not feed:
                return True  # the replica is removed, and its number may be another's

    def _note(self, feed: _Feed, batch: EventBatch) -> Generator[None, None, bool]:
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
        """The replica is gone: nothing of it is held or expected. Costs no look at any block.

        Its number may be another's from now on.
        """
        self._bits.renew(replica)
        for tier in TIERS:
            self._feeds[replica, tier] = _Feed()

    def sweep(self) -> bool:
        """Look through some blocks for what removed replicas held; False when none is left.

        Done by every batch: only who wants the memory at once need call it.
        """
        if self._sweeping is None:
            if not self._bits.retired:
                return False
            self._sweeping = self._sweep(self._bits.retired)
        if next(self._sweeping, self) is self:
            self._sweeping = None
        return self._sweeping is not None or bool(self._bits.retired)

    def _sweep(self, bits: int) -> Generator[None, None, None]:
        for table in (*self._holders.values(), self._expected):
            yield from take_bits(table, bits, self._bits.singles)
        self._bits.release(bits)

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
        bit, singles, count = self._bits.use(batch.replica), self._bits.singles, self._num_parts
        holders = self._holders[batch.tier]
        if batch.stored:
            feed.is_empty = False
            if batch.tier != POOL:
                self._lower[batch.tier] = holders
        for keys in _slices(unpack_keys(batch.stored)):
            add_bit(holders, keys, bit)
            if len(keys) == _SLICE:
                yield
        for keys in _slices(unpack_keys(batch.removed)):
            for key in keys:
                take_bit(holders[key % count], key, bit, singles)
            if len(keys) == _SLICE:
                yield

    def _clear(self, replica: int, tier: str) -> Generator[None, None, None]:
        """One look at every block, unless the replica never said that it holds any."""
        feed = self._feeds[replica, tier]
        if not feed.is_empty:
            yield from take_bits(self._holders[tier], self._bits.of[replica], self._bits.singles)
            feed.is_empty = True

    # Prefixes that are being computed

    def expect(self, replica: int, keys: Iterable[PrefixKey]) -> Sequence[PrefixKey]:
        """The replica will hold these blocks, of a request sent there. Returns those it adds.

        The caller hands them to `unexpect` when the blocks are computed, or will not be.
        """
        expected, bit = self._expected, self._bits.use(replica)
        num_parts = self._num_parts
        added = array("Q")  # kept while the prompt is computed; the garbage collector skips it
        for key in keys:
            part = expected[key % num_parts]
            before = part.get(key, 0)
            if not before & bit:
                part[key] = before | bit if before else bit
                added.append(key)
        return cast("Sequence[PrefixKey]", added)

    def unexpect(self, replica: int, keys: Iterable[PrefixKey]) -> None:
        """Take back what `expect` added."""
        expected, bit = self._expected, self._bits.of[replica]
        for key in keys:
            take_bit(expected[key % self._num_parts], key, bit, self._bits.singles)

    # Queries

    def match(self, keys: Sequence[PrefixKey]) -> Match:
        """How many of a prompt's blocks, from the first on, each replica has."""
        pool, lower = self._holders[POOL], tuple(self._lower.values())
        reach = _reach(keys, (pool, self._expected))
        expected = self._depths(keys, reach, pool, self._expected)
        cached = expected if expected.is_of_first else self._depths(keys, reach, pool)
        if not lower:
            return Match(cached.counts, expected.counts, expected.counts)
        if self._shares_store:
            depth = _depth(keys, lower)
            stored = [n if n > depth else depth for n in expected.counts]
        else:
            reach = _reach(keys, (pool, self._expected, *lower))
            stored = self._depths(keys, reach, pool, self._expected, *lower).counts
        return Match(cached.counts, expected.counts, stored)

    def _depths(
        self, keys: Sequence[PrefixKey], reach: int, first: Holders, *others: Holders
    ) -> _Depths:
        """How much of a prompt's first `reach` blocks each replica has in one of these tables."""
        depths, num_parts = [0] * self.num_replicas, self._num_parts
        is_of_first = True
        # Of some replicas, the least and the most that they can have.
        unsure = [(self._bits.live, 0, reach)]
        while unsure:
            replicas, low, high = unsure.pop()
            while low < high:
                middle = (low + high) // 2
                key = keys[middle]
                found = first[key % num_parts].get(key, 0)
                for table in others:
                    more = table[key % num_parts].get(key, 0)
                    if more:
                        found |= more
                        is_of_first = False
                found &= replicas
                if found == replicas:
                    low = middle + 1
                elif found:
                    unsure.append((found, middle + 1, high))
                    replicas, high = replicas ^ found, middle
                else:
                    high = middle
            if low:  # they are 0 already, and mostly many
                _set_bits(depths, self._bits.owners, replicas, low)
        return _Depths(depths, is_of_first)


def _finish(steps: Generator[None, None, Outcome]) -> Outcome:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("Outcome", done.value)


def _slices(keys: Sequence[PrefixKey]) -> Iterator[Sequence[PrefixKey]]:
    return (keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE))


def _reach(keys: Sequence[PrefixKey], tables: Sequence[Holders]) -> int:
    """How many of a prompt's first blocks somebody may hold; those behind are not named for it."""
    for at in range(_STRIDE - 1, len(keys), _STRIDE):
        if not _is_held(keys[at], tables):
            return at
    return len(keys)


def _is_held(key: PrefixKey, tables: Sequence[Holders]) -> bool:
    """Whether somebody holds the block."""
    part = key % len(tables[0])
    for table in tables:  # noqa: SIM110 (`any` makes a generator, which takes twice as long)
        if key in table[part]:
            return True
    return False


def _depth(keys: Sequence[PrefixKey], tables: Sequence[Holders]) -> int:
    """How many of a prompt's first blocks are in these tables, whoever said so."""
    low, high = 0, _reach(keys, tables)
    while low < high:
        middle = (low + high) // 2
        if _is_held(keys[middle], tables):
            low = middle + 1
        else:
            high = middle
    return low


def _set_bits(depths: list[int], owners: Sequence[int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        depths[owners[low.bit_length() - 1]] = depth
        bits ^= low
