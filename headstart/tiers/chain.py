"""Several tiers as one: a lookup goes on in the next where one ends."""

from collections.abc import Iterator, Sequence

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults
from headstart.tiers.store import BlockStore, LoadedBlock, StoredBlock

__all__ = ["ChainedStores", "chain"]


class ChainedStores:
    """The nearest store first; a `BlockStore`. What is saved goes to all."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self._stores = tuple(stores)

    @property
    def tier(self) -> str:
        """The nearest store's."""
        return self._stores[0].tier

    @property
    def faults(self) -> Faults:
        """The nearest store's."""
        return self._stores[0].faults

    @property
    def num_kept(self) -> int:
        """The largest of the stores'."""
        return max(store.num_kept for store in self._stores)

    @property
    def block_seconds(self) -> float:
        """The nearest store's that knows."""
        return next((store.block_seconds for store in self._stores if store.block_seconds), 0.0)

    def find(self, names: Sequence[BlockHash]) -> int:
        count = 0
        for store in self._stores:
            count += store.find(names[count:])
            if count == len(names):
                break
        return count

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        count = 0
        for store in self._stores:
            for block in store.load(names[count:]):
                count += 1
                yield block
            if count == len(names):
                return

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        return max(store.save(blocks) for store in self._stores)

    def touch(self, names: Sequence[BlockHash]) -> None:
        for store in self._stores:
            store.touch(names)

    def clear(self) -> bool:
        done = [store.clear() for store in self._stores]
        return all(done)

    def close(self) -> None:
        for store in self._stores:
            store.close()


def chain(stores: Sequence[BlockStore]) -> BlockStore:
    """Stores, of which there is at least one, as one."""
    return stores[0] if len(stores) == 1 else ChainedStores(stores)
