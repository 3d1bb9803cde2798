"""Prefix index: how many of a prompt's first blocks each replica holds.

One table per tier maps a block to a bit mask of the replicas that hold it, so a block costs the
same memory for one replica or many. A key is the first 8 bytes of a block's SHA-256 hash. As an int
it takes 48 bytes of memory; the whole hash as `bytes` would take 80. The probability that two of
ten million blocks share a key is 3 in a million. The index is only a hint: an engine looks up its
own blocks, so a lost event or a shared key may lead to a worse choice, never to a wrong answer.

An engine evicts a prefix from its end, so a replica that holds a block holds all blocks before it.
A query therefore bisects the prompt's blocks instead of looking up each block. After a lost event,
or if a tier lost a block in the middle, a query may report too many blocks.

Queries ignore a removed replica at once. Its blocks stay in the tables until a sweep removes them.
Applying a batch of events also continues the sweep.
"""

from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, cast, overload

from headstart.cache import BlockHash, BlockHasher, TokenSequence
from headstart.cluster.events import HASH_BYTES, POOL, TIERS, EventBatch
from headstart.errors import ConfigError

PrefixKey = NewType("PrefixKey", int)
Holders = list[dict[PrefixKey, int]]
"""A table, split into dictionaries: key `k` is in `holders[k % len(holders)]`.

A dictionary copies all entries when it grows. With a million entries that would delay routing.
"""

SWEPT = 4096
"""Blocks to examine in one step of a sweep."""
_LEAST_PARTS = 64
_SLICE = 512
"""Blocks to record in one step, which takes less than a millisecond."""
_STRIDE = 64
"""Distance between the blocks that a query probes before it bisects."""


class Match(NamedTuple):
    """Length of the prompt prefix that each replica has, in blocks. Lists are indexed by replica.

    cached: blocks in the replica's KV pool. expected: `cached` plus blocks that its requests will
    compute. stored: `expected` plus blocks that it can load from a slower tier.
    """

    cached: list[int]
    expected: list[int]
    stored: list[int]


def prefix_keys(hashes: Sequence[BlockHash]) -> Sequence[PrefixKey]:
    """Return the keys of block hashes, in an array."""
    return unpack_keys(b"".join(hashes))


def unpack_keys(packed: bytes) -> Sequence[PrefixKey]:
    """Return the keys of concatenated hashes."""
    values = array("Q", packed)  # in native byte order, as keys never leave the process
    return cast("Sequence[PrefixKey]", values[:: HASH_BYTES // values.itemsize])


class PromptKeys(Sequence[PrefixKey]):
    """The keys of a prompt's full blocks, computed when they are read.

    Hashing takes most of the time of routing a request. If no replica holds the first blocks, a
    query does not read the other keys. Their blocks are hashed after the request is sent. Indices
    must not be negative.
    """

    def __init__(self, hasher: BlockHasher, prompt: TokenSequence) -> None:
        blocks = prompt.cut(hasher.block_size)
        self._count = len(blocks)
        self._hashes: Iterator[bytes] = hasher.packed(prompt.root, blocks)
        self._keys = array("Q")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> PrefixKey: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PrefixKey]: ...

    def __getitem__(self, index: int | slice) -> PrefixKey | Sequence[PrefixKey]:
        count = self._count if isinstance(index, slice) else min(index + 1, self._count)
        while len(self._keys) < count:
            self._keys += cast("array[int]", unpack_keys(next(self._hashes)))
        if len(self._keys) == self._count:
            self._hashes = iter(())  # frees the hashes
        return cast("PrefixKey | Sequence[PrefixKey]", self._keys[index])


def make_holders(num_parts: int) -> Holders:
    """Return an empty table."""
    return [{} for _ in range(num_parts)]


def add_bit(holders: Holders, keys: Iterable[PrefixKey], bit: int) -> None:
    """Record that a replica holds these blocks, which are in prefix order."""
    num_parts, last = len(holders), bit
    for key in keys:
        part = holders[key % num_parts]
        mask = part.get(key, 0) | bit
        # Consecutive blocks that the same replicas hold share one int object, to save memory.
        if mask != last:
            last = bit if mask == bit else mask
        part[key] = last


def take_bits(holders: Holders, bits: int, singles: Sequence[int]) -> Generator[None, None, None]:
    """Remove bits from a table in steps.

    A step examines whole parts with at least `SWEPT` blocks in total. singles: see `take_bit`.
    """
    num_examined = 0
    for part in holders:
        if num_examined >= SWEPT:
            yield
            num_examined = 0
        num_examined += len(part)
        for key in [key for key, mask in part.items() if mask & bits]:
            take_bit(part, key, bits, singles)


def take_bit(part: dict[PrefixKey, int], key: PrefixKey, bits: int, singles: Sequence[int]) -> None:
    """Record that the replicas of `bits` do not hold a block.

    singles: for each bit, the int object that entries with only this bit share.
    """
    mask = part.get(key, 0)
    if mask & bits:
        left = mask & ~bits
        if not left:
            del part[key]
        elif left & (left - 1):
            part[key] = left
        else:
            part[key] = singles[left.bit_length() - 1]


@dataclass(slots=True, eq=False)
class _Feed:
    """The progress of one replica's events for one tier."""

    epoch: int | None = None
    number: int = -1
    is_current: bool = True
    is_empty: bool = True  # no block was stored since the start or the last clear


class ReplicaIndex:
    """The replicas that hold each block, updated by the events of each replica.

        bit      owner      set in the tables for
        live     a replica  the blocks that the replica holds
        retired  none       the unswept blocks of a removed replica
        free     none       no block

    The number of a removed replica gets a new bit at once, so a new replica may use the number
    before the tables are swept.

    shares_store: any replica can load the blocks that another replica has in a tier below its pool.
    Raises ConfigError for fewer than one replica.
    """

    def __init__(self, num_replicas: int, *, shares_store: bool = False) -> None:
        if num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}; allowed: at least 1")
        self.num_replicas = num_replicas
        self._shares_store = shares_store
        self._bit_of = [1 << replica for replica in range(num_replicas)]
        self._singles = list(self._bit_of)  # see `take_bit`
        self._owners = list(range(num_replicas))  # replicas by the position of their bits
        self._live = (1 << num_replicas) - 1
        self._retired = self._used = 0
        self._free: list[int] = []
        self._num_parts = max(1 << (num_replicas - 1).bit_length(), _LEAST_PARTS)
        self._holders = {tier: make_holders(self._num_parts) for tier in TIERS}
        self._lower: dict[str, Holders] = {}  # tables of the lower tiers that have had blocks
        self._expected = make_holders(self._num_parts)
        self._sweeping: Generator[None, None, None] | None = None
        self._feeds = {(r, tier): _Feed() for r in range(num_replicas) for tier in TIERS}

    def __len__(self) -> int:
        """Return the number of blocks in pools, including unswept blocks of removed replicas."""
        return sum(map(len, self._holders[POOL]))

    # Events

    def apply(self, batch: EventBatch) -> bool:
        """Apply a batch or snapshot; return False if the index now needs a snapshot.

        Batches are applied even while a snapshot is awaited. A snapshot older than the last batch
        is ignored. Raises ConfigError for an unknown replica or tier.
        """
        for _ in self.steps(batch):
            pass
        return self.is_current(batch.replica, batch.tier)

    def steps(self, batch: EventBatch) -> Generator[None, None, None]:
        """Apply a batch in steps of about a millisecond; requests may be routed between steps.

        The snapshot of a large cache takes a tenth of a second in total. If the replica is removed
        meanwhile, the remaining steps are skipped. The caller must finish a batch before it begins
        the next batch of the same replica.
        """
        feed = self._feeds.get((batch.replica, batch.tier))
        if feed is None:
            raise ConfigError(
                f"a batch has events of replica {batch.replica}, tier {batch.tier!r}; allowed: "
                f"replicas below {self.num_replicas}, tiers {', '.join(TIERS)}"
            )
        applying = self._apply(feed, batch)
        # After a removal, another replica may have the number.
        while self._feeds[batch.replica, batch.tier] is feed:
            self.sweep()
            if next(applying, self) is self:
                return
            yield

    def _apply(self, feed: _Feed, batch: EventBatch) -> Generator[None, None, None]:
        if batch.epoch != feed.epoch:
            if feed.epoch is not None:
                yield from self._clear(feed, batch)
            feed.epoch, feed.number, feed.is_current = batch.epoch, -1, True
        next_number = feed.number if batch.snapshot else feed.number + 1
        if batch.number < next_number:
            return  # a duplicate, or an old snapshot
        feed.is_current = batch.snapshot or (feed.is_current and batch.number == next_number)
        feed.number = batch.number
        if batch.cleared:
            yield from self._clear(feed, batch)
        bit, singles, count = self._bit_of[batch.replica], self._singles, self._num_parts
        self._used |= bit
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

    def _clear(self, feed: _Feed, batch: EventBatch) -> Generator[None, None, None]:
        """Remove a replica's blocks. This examines the whole table."""
        if not feed.is_empty:
            bit = self._bit_of[batch.replica]
            yield from take_bits(self._holders[batch.tier], bit, self._singles)
            feed.is_empty = True

    def is_current(self, replica: int, tier: str = POOL) -> bool:
        """Return True unless a batch of the replica is missing."""
        return self._feeds[replica, tier].is_current

    def remove(self, replica: int) -> None:
        """Forget a replica's blocks in constant time; a new replica may then use its number."""
        old = self._bit_of[replica]
        if self._used & old:
            if not self._free:
                self._free.append(1 << len(self._singles))
                self._singles.append(self._free[-1])
                self._owners.append(replica)
            new = self._bit_of[replica] = self._free.pop()
            self._owners[new.bit_length() - 1] = replica
            self._live ^= old | new
            self._retired |= old
        for tier in TIERS:
            self._feeds[replica, tier] = _Feed()

    def sweep(self) -> bool:
        """Remove some blocks of removed replicas from the tables; return False if none is left."""
        if self._sweeping is None:
            if not self._retired:
                return False
            self._sweeping = self._sweep(self._retired)
        if next(self._sweeping, self) is self:
            self._sweeping = None
        return self._sweeping is not None or bool(self._retired)

    def _sweep(self, bits: int) -> Generator[None, None, None]:
        for table in (*self._holders.values(), self._expected):
            yield from take_bits(table, bits, self._singles)
        self._retired &= ~bits
        self._used &= ~bits
        self._free += [bit for bit in self._singles if bit & bits]

    # Prefixes that are being computed

    def expect(self, replica: int, keys: Iterable[PrefixKey]) -> Sequence[PrefixKey]:
        """Record that a replica will compute these blocks; return the newly recorded blocks.

        The caller passes the returned blocks to `unexpect` when they are computed or abandoned.
        """
        expected, bit, num_parts = self._expected, self._bit_of[replica], self._num_parts
        self._used |= bit
        added = array("Q")  # the garbage collector does not traverse arrays
        for key in keys:
            part = expected[key % num_parts]
            mask = part.get(key, 0)
            if not mask & bit:
                part[key] = mask | bit if mask else bit
                added.append(key)
        return cast("Sequence[PrefixKey]", added)

    def unexpect(self, replica: int, keys: Iterable[PrefixKey]) -> None:
        """Undo `expect` for the blocks that it returned."""
        expected, bit = self._expected, self._bit_of[replica]
        for key in keys:
            take_bit(expected[key % self._num_parts], key, bit, self._singles)

    # Queries

    def match(self, keys: Sequence[PrefixKey]) -> Match:
        """Return how many of a prompt's first blocks each replica has."""
        pool, lower = self._holders[POOL], tuple(self._lower.values())
        reach = _reach(keys, (pool, self._expected))
        expected, pool_suffices = self._depths(keys, reach, pool, self._expected)
        cached = expected if pool_suffices else self._depths(keys, reach, pool)[0]
        if not lower:
            return Match(cached, expected, expected)
        if self._shares_store:
            blocks = range(_reach(keys, lower))
            depth = bisect_left(blocks, True, key=lambda i: not _is_held(keys[i], lower))
            stored = [max(count, depth) for count in expected]
        else:
            reach = _reach(keys, (pool, self._expected, *lower))
            stored = self._depths(keys, reach, pool, self._expected, *lower)[0]
        return Match(cached, expected, stored)

    def _depths(
        self, keys: Sequence[PrefixKey], reach: int, first: Holders, *tables: Holders
    ) -> tuple[list[int], bool]:
        """Return how many of the first `reach` blocks each replica has in any of the tables.

        The second value is True if the first table alone gives the same result.
        """
        depths, num_parts = [0] * self.num_replicas, self._num_parts
        first_suffices = True
        # (replicas, low, high): each of these replicas has from `low` to `high` blocks.
        open_ranges = [(self._live, 0, reach)]
        while open_ranges:
            replicas, low, high = open_ranges.pop()
            while low < high:
                middle = (low + high) // 2
                key = keys[middle]
                mask = first[key % num_parts].get(key, 0)
                for table in tables:
                    holders = table[key % num_parts].get(key, 0)
                    if holders:
                        mask |= holders
                        first_suffices = False
                mask &= replicas
                if mask == replicas:
                    low = middle + 1
                elif mask:
                    open_ranges.append((mask, middle + 1, high))
                    replicas, high = replicas ^ mask, middle
                else:
                    high = middle
            while replicas and low:  # depths of 0 are already set
                bit = replicas & -replicas
                depths[self._owners[bit.bit_length() - 1]] = low
                replicas ^= bit
        return depths, first_suffices


def _slices(keys: Sequence[PrefixKey]) -> Iterator[Sequence[PrefixKey]]:
    return (keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE))


def _reach(keys: Sequence[PrefixKey], tables: Sequence[Holders]) -> int:
    """Return an upper bound on how many of the first blocks a replica has; probe few keys."""
    for index in range(_STRIDE - 1, len(keys), _STRIDE):
        if not _is_held(keys[index], tables):
            return index
    return len(keys)


def _is_held(key: PrefixKey, tables: Sequence[Holders]) -> bool:
    part = key % len(tables[0])
    for table in tables:  # noqa: SIM110 (`any` needs a generator, which is slower)
        if key in table[part]:
            return True
    return False
