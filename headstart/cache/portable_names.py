"""Portable names of prefixes, computed only where somebody asks for one."""

from collections.abc import Iterator, Sequence
from itertools import chain

from headstart.cache.block import PrefixNode, RootNode
from headstart.cache.config import CacheConfig
from headstart.cache.identity import (
    BlockHash,
    BlockKey,
    Digest,
    Namespace,
    PublicBlocks,
    chain_hashes,
    child_hash,
    root_hash,
    sha256,
)
from headstart.errors import ConfigError

_STRETCH = 64  # blocks of a prompt that are remembered together
_MOST_STRETCHES = 256  # of each age; 11 KB each with blocks of 16 tokens

_Stretch = tuple[BlockHash, tuple[BlockKey, ...]]
"""The name before it, and its keys."""


class _RecentNames:
    """Names of the prompts of late, in stretches of blocks: prompts begin alike, chats grow.

    A stretch is found in a tenth of the time that its digests take. Those that nobody asked for
    while so many others came are forgotten. Threads share it without a lock: at worst a stretch is
    named twice.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._young: dict[_Stretch, list[BlockHash]] = {}
        self._old: dict[_Stretch, list[BlockHash]] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def stretches(
        self, parent: BlockHash, keys: Sequence[BlockKey]
    ) -> Iterator[Sequence[BlockHash]]:
        """As `chain_hashes`, a stretch at a time: the last may be short."""
        whole = len(keys) - len(keys) % _STRETCH
        for start in range(0, whole, _STRETCH):
            names = self._of_stretch(parent, tuple(keys[start : start + _STRETCH]))
            yield names
            parent = names[-1]
        if whole < len(keys):
            yield chain_hashes(parent, keys[whole:], self._digest)

    def _of_stretch(self, parent: BlockHash, keys: tuple[BlockKey, ...]) -> list[BlockHash]:
        asked = parent, keys
        young = self._young
        names = young.get(asked)
        if names is None:
            names = self._old.get(asked) or chain_hashes(parent, keys, self._digest)
            if len(young) >= _MOST_STRETCHES:
                self._old = young
                self._young = young = {}
            young[asked] = names
        return names


class BlockNames:
    """Names the blocks of one model: SHA-256 over (parent's hash, block's key), from the root.

    `model` is the fingerprint of the model's weights; engines that exchange blocks must agree
    on it and on `block_size`. A node's name is kept with the node. `digest` is replaced only
    by tests, to show that no hit depends on it. `public` has the blocks that tenants share.
    """

    def __init__(self, block_size: int, model: str = "", digest: Digest = sha256) -> None:
        self.block_size = block_size
        self.model = model
        self.public = PublicBlocks()
        self._digest = digest
        self._recent = _RecentNames(digest)

    def publish(self, token_ids: Sequence[int]) -> int:
        """Let tenants share the full blocks of a prefix; how many those are.

        For sequences that are made later. Raises CacheError for what is no token.
        """
        return self.public.publish(token_ids, self.block_size)

    def of_node(self, node: PrefixNode) -> BlockHash:
        """The name of the prefix that ends with this node's block."""
        unnamed = []
        at: PrefixNode = node
        while at.block_hash is None and at.parent is not None:
            unnamed.append(at)
            at = at.parent
        if at.block_hash is None:
            assert isinstance(at, RootNode)
            at.block_hash = self._root(at.namespace)
        block_hash = at.block_hash
        for child in reversed(unnamed):
            block_hash = child.block_hash = child_hash(block_hash, child.key, self._digest)
        return block_hash

    def of_keys(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[BlockHash]:
        """The names of a prompt's full blocks, whether or not they are cached anywhere."""
        return list(chain.from_iterable(self.stretches(namespace, keys)))

    def stretches(
        self, namespace: Namespace, keys: Sequence[BlockKey]
    ) -> Iterator[Sequence[BlockHash]]:
        """As `of_keys`, some names at a time, for who may not need all of them."""
        return self._recent.stretches(self._root(namespace), keys)

    def _root(self, namespace: Namespace) -> BlockHash:
        return root_hash(namespace, self.block_size, self.model, self._digest)


def check_names(config: CacheConfig, names: BlockNames | None) -> BlockNames:
    """The names of the manager's blocks. Raises ConfigError if they are another pool's."""
    if names is None:
        if config.events:
            raise ConfigError("events is True, and events tell names; give the manager BlockNames")
        return BlockNames(config.block_size)
    if names.block_size != config.block_size:
        raise ConfigError(
            f"names of blocks of {names.block_size} tokens do not fit block_size "
            f"{config.block_size}; both must be the same"
        )
    return names
