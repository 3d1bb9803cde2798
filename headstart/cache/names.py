"""Portable names of prefixes, computed only where somebody asks for one."""

from collections.abc import Iterator, Sequence
from typing import NewType

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
from headstart.mypyc_hints import mypyc_attr

_STRETCH = 64  # blocks of a prompt that are remembered together
_MOST_STRETCHES = 2048  # of each age; 2.3 KB each

PackedNames = NewType("PackedNames", bytes)
"""Names that stand one behind the other, each as long as the digest."""


class _RecentNames:
    """Names of the prompts of late, in stretches of blocks: prompts begin alike, chats grow.

    A stretch is known by SHA-256 over the name before it and its blocks' keys, and found in a
    fifth of the time that its names take. Those that nobody asked for while so many others came
    are forgotten. Threads share it without a lock: at worst a stretch is named twice.

    It has two bytes objects for each stretch, and nothing that the garbage collector looks into: a
    name and a key for each block, in lists, made a collection of the young objects take 5 ms.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._young: dict[bytes, PackedNames] = {}
        self._old: dict[bytes, PackedNames] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def stretches(self, parent: BlockHash, keys: Sequence[BlockKey]) -> Iterator[PackedNames]:
        """As `chain_hashes`, a stretch at a time: the last may be short."""
        size = len(parent)
        whole = len(keys) - len(keys) % _STRETCH
        for start in range(0, whole, _STRETCH):
            names = self._of_stretch(parent, keys[start : start + _STRETCH])
            yield names
            parent = BlockHash(names[-size:])
        if whole < len(keys):
            yield self._name(parent, keys[whole:])

    def _of_stretch(self, parent: BlockHash, keys: Sequence[BlockKey]) -> PackedNames:
        asked = sha256(parent + b"".join(keys))  # a key says where it ends
        young = self._young
        names = young.get(asked)
        if names is None:
            names = self._old.get(asked) or self._name(parent, keys)
            if len(young) >= _MOST_STRETCHES:
                self._old = young
                self._young = young = {}
            young[asked] = names
        return names

    def _name(self, parent: BlockHash, keys: Sequence[BlockKey]) -> PackedNames:
        return PackedNames(b"".join(chain_hashes(parent, keys, self._digest)))


@mypyc_attr(allow_interpreted_subclasses=True)
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
        root = self._root(namespace)
        packed = b"".join(self._recent.stretches(root, keys))
        size = len(root)
        return [BlockHash(packed[at : at + size]) for at in range(0, len(packed), size)]

    def stretches(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[PackedNames]:
        """As `of_keys`, some names at a time and packed, for who may not need all of them."""
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
