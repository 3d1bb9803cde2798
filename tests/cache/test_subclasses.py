"""Subclasses that users may write, also of compiled classes."""

import copy
import pickle

from headstart.cache import (
    BlockHash,
    BlockHasher,
    BlockKey,
    CacheConfig,
    CacheEvent,
    KVCacheBlock,
    KVCacheManager,
    MultiModalItem,
    Namespace,
    PrefixNode,
    PrefixTree,
    TokenSequence,
)
from headstart.cache.eviction import AdaptiveLru
from tests.cache.steps import finish
from tests.cache.watched_policy import watch_policy


class NoisyManager(KVCacheManager):
    """A manager that stores the events that it returns."""

    def __init__(self, config: CacheConfig, names: BlockHasher) -> None:
        super().__init__(config, names)
        self.events: list[CacheEvent] = []

    def take_events(self) -> list[CacheEvent]:
        events = super().take_events()
        self.events += events
        return events


class Prompt(TokenSequence):
    """A sequence that decides itself what is cut."""

    def cut(self, block_size: int) -> list[BlockKey]:
        return super().cut(block_size)[:1]


class Names(BlockHasher):
    """A hasher that counts its calls."""

    calls = 0

    def of_node(self, node: PrefixNode) -> BlockHash:
        type(self).calls += 1
        return super().of_node(node)


def test_a_manager_with_custom_names_and_sequences() -> None:
    manager = NoisyManager(CacheConfig(num_blocks=8, block_size=4, events=True), Names(4))
    finish(manager, "one", list(range(10)))
    assert manager.take_events() == manager.events != []
    assert [event.block_hash for event in manager.events if hasattr(event, "block_hash")]
    assert Names.calls
    assert len(manager.get_computed_blocks(TokenSequence("plain", list(range(12)))).blocks) == 2
    assert len(manager.get_computed_blocks(Prompt("short", list(range(12)))).blocks) == 1


class Newest(AdaptiveLru):
    """A policy that takes the block that was freed last."""

    def take(self, count: int, salt: str | None = None) -> list[KVCacheBlock]:
        newest = list(self)[-count:]
        self.withdraw(newest)
        return newest


def test_a_derived_policy_and_an_unrelated_policy() -> None:
    manager = KVCacheManager(CacheConfig(num_blocks=8, block_size=4))
    manager.pool.free = Newest(manager.pool.free.take(8), manager.pool.marks)
    assert finish(manager, "one", list(range(8))) == [6, 7]
    watched = watch_policy(manager)
    taken = finish(manager, "two", list(range(50, 58)))
    assert watched.taken == taken


class Weighed(PrefixNode):
    """A node with one more field."""

    def set_fields(self, parent: PrefixNode | None, key: BlockKey) -> None:
        super().set_fields(parent, key)
        self.weight = len(key)


def test_a_tree_creates_nodes_of_the_requested_class() -> None:
    tree = PrefixTree()
    node = tree.child(tree.make_root(Namespace(None, None)), BlockKey(b"abcd"), Weighed)
    assert isinstance(node, Weighed)
    assert node.weight == 4


def test_an_item_is_copied_and_pickled() -> None:
    item = MultiModalItem(b"digest", 1, 2)
    assert copy.copy(item) == pickle.loads(pickle.dumps(item)) == item
