"""Portable hashes of prefixes, computed only when they are read."""

from collections.abc import Iterator, Sequence

from headstart.cache.block import PrefixNode, RootNode
from headstart.cache.identity import (
    BlockHash,
    BlockKey,
    Digest,
    Namespace,
    PublicBlocks,
    chain_hashes,
    root_hash,
    sha256,
)
from headstart.mypyc_hints import mypyc_attr

_RUN = 64  # blocks of a prompt whose hashes are cached together
_MAX_RUNS = 2048  # runs in `_young`, and the same number in `_old`; a run takes 2.3 KB


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockHasher:
    """Hashes of the blocks of one model: SHA-256 over the hash of the parent and the block's key.

    `model` is the fingerprint of the model's weights. Engines that exchange blocks must have the
    same `model` and `block_size`. A node's hash is stored in the node. `public` has the blocks that
    tenants share. Only tests replace `digest`, to show that no hit depends on it.

    Hashes of recent prompts are cached in runs of 64 blocks. The key of a run is one SHA-256 over
    the hash of its parent and its block keys. A run that is used enters `_young`. When `_young` is
    full, it becomes `_old`, and the previous `_old` is dropped. Threads need no lock: at worst a
    run is hashed twice. The key and the hashes of a run are two bytes objects, which the garbage
    collector ignores.
    """

    def __init__(self, block_size: int, model: str = "", digest: Digest = sha256) -> None:
        self.block_size = block_size
        self.model = model
        self.public = PublicBlocks()
        self._digest = digest
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def publish(self, token_ids: Sequence[int]) -> int:
        """Let tenants share the full blocks of a prefix; return the number of blocks.

        Existing keys of sequences do not change. Raises CacheError for an invalid token.
        """
        return self.public.publish(token_ids, self.block_size)

    def of_node(self, node: PrefixNode) -> BlockHash:
        """Return the hash of the prefix that ends with this node's block."""
        path = []
        ancestor: PrefixNode = node
        while ancestor.block_hash is None and ancestor.parent is not None:
            path.append(ancestor)
            ancestor = ancestor.parent
        if ancestor.block_hash is None:
            assert isinstance(ancestor, RootNode)
            ancestor.block_hash = self._root(ancestor.namespace)
        block_hash = ancestor.block_hash
        for child in reversed(path):
            [block_hash] = chain_hashes(block_hash, (child.key,), self._digest)
            child.block_hash = block_hash
        return block_hash

    def of_keys(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[BlockHash]:
        """Return the hashes of a prompt's full blocks, cached or not."""
        packed = b"".join(self.packed(namespace, keys))
        size = len(packed) // max(len(keys), 1)
        return [BlockHash(packed[i * size : (i + 1) * size]) for i in range(len(keys))]

    def packed(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[bytes]:
        """Yield the hashes of `of_keys`, up to 64 joined in one bytes object.

        Hashes are computed when they are read.
        """
        parent = self._root(namespace)
        for start in range(0, len(keys), _RUN):
            run = keys[start : start + _RUN]
            hashes = self._of_run(parent, run) if len(run) == _RUN else self._hash(parent, run)
            yield hashes
            parent = BlockHash(hashes[-len(parent) :])

    def _of_run(self, parent: BlockHash, keys: Sequence[BlockKey]) -> bytes:
        run_key = sha256(parent + b"".join(keys))
        young = self._young
        hashes = young.get(run_key)
        if hashes is None:
            hashes = self._old.get(run_key) or self._hash(parent, keys)
            if len(young) >= _MAX_RUNS:
                self._old = young
                self._young = young = {}
            young[run_key] = hashes
        return hashes

    def _hash(self, parent: BlockHash, keys: Sequence[BlockKey]) -> bytes:
        return b"".join(chain_hashes(parent, keys, self._digest))

    def _root(self, namespace: Namespace) -> BlockHash:
        return root_hash(namespace, self.block_size, self.model, self._digest)
