"""Real caches whose events may be lost before they reach an index."""

from headstart.cache import BlockHasher, CacheConfig, KVCacheManager, TokenSequence
from headstart.cluster.events import EventBatch, EventPublisher
from headstart.cluster.index import PrefixKey, prefix_keys

BLOCK = 2


class Engine:
    """One replica: a small manager, its publisher, and its true contents after each batch."""

    def __init__(self, replica: int, num_blocks: int = 8) -> None:
        self.replica = replica
        self.num_blocks = num_blocks
        self.epoch = -1
        self.truth: dict[tuple[int, int], frozenset[bytes]] = {}
        self.start()

    def start(self) -> None:
        """Start the process again: nothing is cached."""
        self.epoch += 1
        config = CacheConfig(
            num_blocks=self.num_blocks, block_size=BLOCK, events=True, partial_hits=False
        )
        self.manager = KVCacheManager(config, BlockHasher(BLOCK, "model"))
        self.publisher = EventPublisher(self.replica, self.epoch)
        self.held: set[bytes] = set()

    def serve(self, tokens: list[int]) -> EventBatch | None:
        """Compute a prompt, free it, and return the batch of changes."""
        self.compute(tokens)
        return self.publish()

    def compute(self, tokens: list[int]) -> None:
        """Compute a prompt and free it, unless it is larger than the cache."""
        sequence = TokenSequence("one", tokens)
        match = self.manager.get_computed_blocks(sequence)
        if self.manager.allocate_slots(sequence, len(tokens) - match.num_tokens, match):
            self.manager.commit_step()
            self.manager.free(sequence)

    def reset(self) -> EventBatch | None:
        """Forget everything."""
        assert self.manager.reset_prefix_cache()
        return self.publish()

    def publish(self) -> EventBatch | None:
        batch = self.publisher.publish(self.manager.take_events())
        if batch is not None:
            if batch.cleared:
                self.held.clear()
            self.held |= set(cut(batch.stored))
            self.held -= set(cut(batch.removed))
            self.truth[batch.epoch, batch.number] = frozenset(self.held)
        return batch

    def keys(self, tokens: list[int]) -> list[PrefixKey]:
        """Return the keys of a prompt's full blocks."""
        return prefix_keys(self.manager.block_hashes(TokenSequence("lookup", tokens)))

    def depth(self, tokens: list[int]) -> int:
        """Count the blocks that the manager itself finds."""
        return len(self.manager.get_computed_blocks(TokenSequence("lookup", tokens)).blocks)


def cut(packed: bytes) -> list[bytes]:
    """Split packed hashes of 32 bytes."""
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]
