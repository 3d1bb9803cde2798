"""Portable names: equal in every process, on every machine and in every later version."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    KVCacheManager,
    MultiModalItem,
    TokenSequence,
)
from headstart.cache.identity import Namespace, chain_hashes, root_hash, sha256
from headstart.errors import CacheError, ConfigError
from tests.cache.naming import block_names, digest_of_one_bit
from tests.cache.steps import finish, make_manager, start
from tests.house.source import ROOT

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
IMAGE = MultiModalItem(b"\x01\x02", offset=3, length=2)

# Golden values, of both full blocks of four: when one changes, no stored block is hit again.
PLAIN = [
    "bda2b652ba96a25a8866e7cc4a8248045bb2706d43650e5a85a3298bd69dcaff",
    "0031bd094f600d1e72818d96608b8d36411ed02ecae733ea92004c38e04b38a5",
]
EVERYTHING = [  # of model "model", adapter "a", salt "s", and with the image
    "3e06e80a304e41f9648bf4c4a2dbfee7525b8f8e70888e8bcb93905fbfade769",
    "aa2249b2ec5ff4955e509b9b00033e896c3483f8bf417c1825c9042f2cd1b050",
]


def names_of(sequence: TokenSequence, model: str = "") -> list[str]:
    names = BlockHasher(4, model).of_keys(sequence.namespace, sequence.cut(4))
    return [name.hex() for name in names]


def test_golden_values() -> None:
    plain = TokenSequence("plain", TOKENS)
    everything = TokenSequence("everything", TOKENS, adapter="a", salt="s", items=[IMAGE])
    assert names_of(plain) == PLAIN
    assert names_of(everything, "model") == EVERYTHING
    assert [name.hex() for name in block_names(plain, 4)] == PLAIN
    assert [name.hex() for name in block_names(everything, 4, "model")] == EVERYTHING


def test_prompts_that_begin_alike_have_the_names_of_a_fresh_hasher() -> None:
    """The hasher remembers spans of recent prompts and drops the oldest."""
    names = BlockHasher(1)
    long = list(range(1, 400))
    for tokens in (long, long[:200], [*long[:150], *long], [9, *long], long):
        sequence = TokenSequence("asked", tokens)
        keys = sequence.cut(1)
        expected = chain_hashes(root_hash(sequence.root, 1, ""), keys)
        assert names.of_keys(sequence.root, keys) == expected
        other = Namespace(None, "another's salt")
        assert set(names.of_keys(other, keys)).isdisjoint(expected)


def test_recent_hashes_are_remembered_and_older_ones_forgotten() -> None:
    num_digests = 0

    def digest(data: bytes) -> bytes:
        nonlocal num_digests
        num_digests += 1
        return sha256(data)

    hasher = BlockHasher(1, digest=digest)

    def count_digests(first: int) -> int:
        before, sequence = num_digests, TokenSequence("prompt", range(first, first + 64))
        hasher.of_keys(sequence.root, sequence.cut(1))
        return num_digests - before - 1  # the root's is computed each time

    assert {count_digests(first) for first in range(5000)} == {64}
    assert {count_digests(first) for first in range(4999, 4999 - 2048, -1)} == {0}
    assert count_digests(0) == 64


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_gives_the_same_names(seed: str) -> None:
    program = (
        "from headstart.cache import BlockHasher, TokenSequence\n"
        f"sequence = TokenSequence('other', {TOKENS})\n"
        "for name in BlockHasher(4).of_keys(sequence.namespace, sequence.cut(4)):\n"
        "    print(name.hex())\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=True,
    )
    assert done.stdout.split() == PLAIN


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(1, 6))
def test_names_follow_the_documented_layout(tokens: list[int], size: int) -> None:
    sequence = TokenSequence("one", tokens, adapter="a")
    manager = make_manager(num_blocks=20, block_size=size)
    assert manager.block_hashes(sequence) == block_names(sequence, size)


FIELD = st.none() | st.sampled_from(["", "a", "ab", "b", "\0", "é"])


@given(*[st.tuples(FIELD, FIELD, st.sampled_from(["", "m", "ma"]), st.integers(1, 2))] * 2)
def test_roots_differ_when_anything_differs(
    left: tuple[str | None, str | None, str, int], right: tuple[str | None, str | None, str, int]
) -> None:
    """Hashes also differ when the end of a field could be the beginning of the next one."""
    names = [root_hash(Namespace(a, s), size, model) for a, s, model, size in (left, right)]
    assert (names[0] == names[1]) == (left == right)


def name_of_last(manager: KVCacheManager, sequence: TokenSequence) -> bytes:
    assert sequence.node is not None
    return manager.hasher.of_node(sequence.node)


def test_a_cached_block_has_the_name_of_its_keys() -> None:
    manager = make_manager()
    sequence = start(manager, "one", TOKENS, salt="s")
    names = manager.block_hashes(sequence)
    assert len(names) == 2
    assert name_of_last(manager, sequence) == names[1]
    assert manager.hasher.of_node(sequence.blocks[0].node) == names[0]  # type: ignore[arg-type]


def test_each_node_is_named_once() -> None:
    named: list[bytes] = []

    def digest(data: bytes) -> bytes:
        named.append(data)
        return sha256(data)

    manager = KVCacheManager(make_manager().config, BlockHasher(4, digest=digest))
    sequence = start(manager, "one", TOKENS)
    assert named == []  # no call needed a hash
    name_of_last(manager, sequence)
    name_of_last(manager, sequence)
    assert len(named) == len(set(named)) == 3  # the root and two blocks


def test_hits_do_not_depend_on_names() -> None:
    """Two prefixes with equal names stay two prefixes."""
    manager = KVCacheManager(
        make_manager(num_blocks=40, events=True).config, BlockHasher(4, digest=digest_of_one_bit)
    )
    prompts = [[at, at, at, at, 0, 0, 0, 0, 0] for at in range(6)]
    for at, prompt in enumerate(prompts):
        finish(manager, f"request {at}", prompt)
    tables = set()
    for prompt in prompts:
        match = manager.get_computed_blocks(TokenSequence("probe", prompt))
        assert match.num_tokens == 8
        tables.add(tuple(block.block_id for block in match.blocks))
    assert len(tables) == 6
    names = {event.block_hash for event in manager.take_events()}  # type: ignore[union-attr]
    assert names <= {b"\0", b"\1"}


def test_names_of_another_block_size_are_refused() -> None:
    complaint = "block_size of the hasher is 4; allowed: 8, as in the configuration"
    with pytest.raises(ConfigError, match=complaint):
        KVCacheManager(CacheConfig(num_blocks=2, block_size=8), BlockHasher(4))


def test_events_without_names_are_refused() -> None:
    """A mirror of several engines would attribute them to another model."""
    with pytest.raises(ConfigError, match="pass a BlockHasher"):
        KVCacheManager(CacheConfig(num_blocks=2, events=True))
    assert KVCacheManager(CacheConfig(num_blocks=2, events=True), BlockHasher(16)).hasher


def test_hashes_without_names_are_refused() -> None:
    """They would be equal for all models."""
    manager = KVCacheManager(CacheConfig(num_blocks=2, block_size=4))
    with pytest.raises(CacheError, match="block_hashes needs a BlockHasher; pass one"):
        manager.block_hashes(TokenSequence("one", range(4)))


@pytest.mark.parametrize("what", ["adapter", "salt"])
def test_text_that_utf8_cannot_encode_is_refused_with_the_sequence(what: str) -> None:
    """Regression: the request was admitted; reading the events then failed and lost them."""
    for name, reason in (("\udc80", "has the lone surrogate"), ("", "is ''"), (3, "is 3, a int")):
        with pytest.raises(CacheError, match=rf"^{what} {reason}.*; allowed: "):
            TokenSequence("one", [1], **{what: name})  # type: ignore[arg-type]
