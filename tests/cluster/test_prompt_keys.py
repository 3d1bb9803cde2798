"""Keys of a prompt match its block hashes, and are computed only as far as needed."""

import gc
import hashlib
import random

import pytest

from headstart.cache import BlockHasher, TokenSequence
from headstart.cluster import Router, make_policy
from headstart.cluster.events import EventBatch
from headstart.cluster.index import PromptKeys, prefix_keys
from headstart.cluster.router import RouteRequest

BLOCK = 4
TOKENS = list(range(1, 300 * BLOCK + 3))


class Digests:
    """SHA-256 with a count of calls."""

    count = 0

    def __call__(self, data: bytes) -> bytes:
        self.count += 1
        return hashlib.sha256(data).digest()


def prompt() -> TokenSequence:
    return TokenSequence("one", TOKENS)


def test_keys_match_the_block_hashes() -> None:
    sequence = prompt()
    names = BlockHasher(BLOCK).of_keys(sequence.root, sequence.cut(BLOCK))
    expected, rng = list(prefix_keys(names)), random.Random(0)
    for _ in range(20):
        keys = PromptKeys(BlockHasher(BLOCK), prompt())
        assert len(keys) == len(expected) == 300
        for i in rng.sample(range(300), 5):
            assert keys[i] == expected[i]
        start = rng.randrange(310)
        assert list(PromptKeys(BlockHasher(BLOCK), prompt())[start:]) == expected[start:]
        assert list(keys) == expected
    with pytest.raises(IndexError):
        PromptKeys(BlockHasher(BLOCK), prompt())[300]


@pytest.mark.parametrize(("held", "most"), [(0, 70), (100, 140), (300, 310)])
def test_blocks_past_the_cached_prefix_are_hashed_later(held: int, most: int) -> None:
    sequence, digests = prompt(), Digests()
    names = BlockHasher(BLOCK).of_keys(sequence.root, sequence.cut(BLOCK))
    router = Router(4, make_policy("expected"))
    router.index.apply(EventBatch(2, 0, 0, stored=b"".join(names[:held])))
    keys = PromptKeys(BlockHasher(BLOCK, digest=digests), prompt())
    chosen = router.route(RouteRequest("one", keys, len(TOKENS), BLOCK), 0.0)
    assert digests.count <= most
    router.catch_up()
    assert digests.count == 301  # the root's, too
    assert router.index.match(keys).expected[chosen] == 300


def test_the_garbage_collector_visits_few_objects() -> None:
    """Regression: it visited each hash and key of recent prompts; requests waited 5 ms."""
    router, count = Router(2, make_policy("expected")), 40
    names = BlockHasher(BLOCK)
    gc.collect()
    gc.disable()
    try:
        for number in range(count):
            tokens = range(1000 * number, 1000 * number + 256 * BLOCK)
            keys = PromptKeys(names, TokenSequence("one", tokens))
            router.route(RouteRequest(str(number), keys, len(tokens), BLOCK), 0.0)
            router.catch_up()
            del keys
        young = gc.get_objects(generation=0)
        assert sum(len(gc.get_referents(item)) for item in young) <= 100 * count
    finally:
        gc.enable()
