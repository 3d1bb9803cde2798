"""Who holds which blocks: tables from a block to the replicas that hold it, the bits of one int.

A table is cut into parts, as many as there are replicas. A dictionary of a million blocks is copied
as a whole when it has taken in so many new ones that it is full, even if as many were deleted: 60
ms in which nobody is routed. With parts that are as large as a replica it is one. More parts would
not stay in the processor's cache: 1,024 for 64 replicas made an event take a quarter longer.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import NewType

PrefixKey = NewType("PrefixKey", int)
Holders = list[dict[PrefixKey, int]]
"""The part of a key is that with the number `key % num_parts`: keys are evenly spread."""

SWEPT = 4096
"""Blocks that are looked at in a step, where all of a table are."""
_LEAST_PARTS = 64


def count_parts(num_replicas: int) -> int:
    """How many parts the tables of so many replicas have: a power of two."""
    return max(1 << (num_replicas - 1).bit_length(), _LEAST_PARTS)


def make_holders(num_parts: int) -> Holders:
    """An empty table."""
    return [{} for _ in range(num_parts)]


class ReplicaBits:
    """Which bit stands for which replica.

        bit      owner      in the tables
        live     a replica  where the replica holds a block
        retired  none       where a removed replica held one; a sweep takes it out
        free     none       nowhere

    A replica that is removed gets another bit at once, so its number may stand for a new replica
    before the tables have been looked through.

    of: the bit of each replica. live: all of these. owners: the replica by the place of its bit.
    singles: each bit by its place, the one int object that all tables share.
    """

    def __init__(self, num_replicas: int) -> None:
        self.of = [1 << replica for replica in range(num_replicas)]
        self.singles = list(self.of)
        self.owners = list(range(num_replicas))
        self.live = (1 << num_replicas) - 1
        self.retired = 0
        self._used = 0
        self._free: list[int] = []

    def use(self, replica: int) -> int:
        """The replica's bit, to put it into a table."""
        bit = self.of[replica]
        self._used |= bit
        return bit

    def renew(self, replica: int) -> None:
        """Give the replica another bit, if it has used the one that it has."""
        old = self.of[replica]
        if not self._used & old:
            return
        if not self._free:
            self._free.append(1 << len(self.singles))
            self.singles.append(self._free[-1])
            self.owners.append(replica)
        new = self._free.pop()
        self.of[replica] = new
        self.owners[new.bit_length() - 1] = replica
        self.live ^= old | new
        self.retired |= old

    def release(self, bits: int) -> None:
        """No table has these retired bits any more: they may be used again."""
        self.retired &= ~bits
        self._used &= ~bits
        self._free += [bit for bit in self.singles if bit & bits]


def add_bit(holders: Holders, keys: Iterable[PrefixKey], bit: int) -> None:
    """A replica holds these blocks, which stand in the order of their prefix."""
    num_parts, last = len(holders), bit
    for key in keys:
        part = holders[key % num_parts]
        mask = part.get(key, 0) | bit
        # One int for all blocks of a prefix that the same replicas hold: less memory to keep, and
        # to read in a query.
        if mask != last:
            last = bit if mask == bit else mask
        part[key] = last


def take_bits(holders: Holders, bits: int, singles: Sequence[int]) -> Generator[None, None, None]:
    """Take these bits out of a table, in steps of about `SWEPT` blocks, or one part if it has more.

    What is put in meanwhile is seen if its part comes later.
    """
    looked = 0
    for part in holders:
        if looked >= SWEPT:
            yield
            looked = 0
        looked += len(part)
        for key in [key for key, mask in part.items() if mask & bits]:
            take_bit(part, key, bits, singles)


def take_bit(part: dict[PrefixKey, int], key: PrefixKey, bits: int, singles: Sequence[int]) -> None:
    """These replicas do not hold the block, whether or not they did."""
    mask = part.get(key, 0)
    if mask & bits:
        left = mask & ~bits
        if not left:
            del part[key]
        elif left & (left - 1):
            part[key] = left
        else:
            part[key] = singles[left.bit_length() - 1]
