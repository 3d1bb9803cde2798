"""Snapshots of a real pool, to be drawn.

The worked example of "Automatic Prefix Caching": ten blocks of four tokens, the order of the
reference. A token is drawn as a letter; equal letters are equal tokens.
"""

import struct
from dataclasses import dataclass, field

from headstart.cache import CacheConfig, KVCacheBlock, KVCacheManager, TokenSequence
from headstart.cache.block import PrefixNode

BLOCK_SIZE = 4
SHARED = "abcdefghijk"  # the common prefix of requests 0 and 1
REQUEST_0 = SHARED + "lmn"
DECODED = "opq"
REQUEST_1 = SHARED + "xyz"
OTHER = "ABCDEFGHIJKLMNOPQ"  # the other tokens of request 2


@dataclass(frozen=True)
class BlockView:
    """One block: its letters ("" if it is empty), its holders, and whether it is cached."""

    block_id: int
    letters: str
    holders: tuple[int, ...]
    cached: bool


@dataclass(frozen=True)
class Scene:
    """A snapshot to draw. parents: the block id of the parent of each cached prefix, or None."""

    title: str
    note: str
    blocks: tuple[BlockView, ...]
    queue: tuple[int, ...]
    tables: dict[int, tuple[int, ...]]
    prefixes: dict[int, str]
    parents: dict[int, int | None]
    changed: frozenset[int] = field(default=frozenset())


class WorkedExample:
    """The pool of the example, and its requests by number."""

    def __init__(self, eviction: str = "lru") -> None:
        config = CacheConfig(
            num_blocks=10,
            block_size=BLOCK_SIZE,
            eviction=eviction,
            deduplicate=False,
            partial_hits=False,
        )
        self.manager = KVCacheManager(config)
        self.running: dict[int, TokenSequence] = {}

    def admit(self, number: int, letters: str) -> int:
        """Compute a whole prompt in one step; return the number of tokens that hit."""
        sequence = TokenSequence(f"request {number}", [ord(letter) for letter in letters])
        found = self.manager.get_computed_blocks(sequence)
        left = len(letters) - found.num_tokens
        assert self.manager.allocate_slots(sequence, left, found) is not None
        self.manager.commit_step()
        self.running[number] = sequence
        return found.num_tokens

    def decode(self, number: int, letters: str) -> None:
        """Generate tokens, one per step."""
        sequence = self.running[number]
        for letter in letters:
            sequence.append(ord(letter))
            assert self.manager.append_slots(sequence)
            self.manager.commit_step()

    def free(self, number: int) -> None:
        """End a request."""
        self.manager.free(self.running.pop(number))

    def scene(self, title: str, note: str, before: Scene | None = None) -> Scene:
        """Return a snapshot of the pool; blocks that differ from `before` are `changed`."""
        self.manager.check()
        blocks = tuple(self._view(block) for block in self.manager.pool.blocks)
        nodes = {b.block_id: b.node for b in self.manager.pool.blocks if b.node is not None}
        old = before.blocks if before is not None else blocks
        return Scene(
            title,
            note,
            blocks,
            tuple(block.block_id for block in self.manager.pool.free),
            {number: tuple(s.block_ids) for number, s in self.running.items()},
            {block_id: whole_prefix(node) for block_id, node in nodes.items()},
            {block_id: _parent(node) for block_id, node in nodes.items()},
            frozenset(new.block_id for new, was in zip(blocks, old, strict=True) if new != was),
        )

    def _view(self, block: KVCacheBlock) -> BlockView:
        holders = tuple(n for n, s in self.running.items() if block in s.blocks)
        letters = letters_of(block.node) if block.node is not None else ""
        if holders and block.node is None:
            sequence = self.running[holders[0]]
            start = sequence.blocks.index(block) * BLOCK_SIZE
            known = sequence.token_ids[start : min(start + BLOCK_SIZE, len(sequence.token_ids))]
            letters = "".join(chr(token) for token in known)
        return BlockView(block.block_id, letters, holders, block.node is not None)


def letters_of(node: PrefixNode) -> str:
    """Return the letters of a node's own block."""
    return "".join(chr(token) for (token,) in struct.iter_unpack("<I", node.key))


def whole_prefix(node: PrefixNode) -> str:
    """Return the letters from the beginning to the end of the node's block."""
    letters = letters_of(node)
    while node.parent is not None:
        node = node.parent
        letters = letters_of(node) + letters
    return letters


def _parent(node: PrefixNode) -> int | None:
    assert node.parent is not None
    return node.parent.block.block_id if node.parent.block is not None else None


def at_time_6() -> tuple[WorkedExample, list[Scene]]:
    """Return the example at its time 6, and the scenes of times 1, 3, 4, 5 and 6."""
    example = WorkedExample()
    blank = example.scene("", "")
    example.admit(0, REQUEST_0)
    one = example.scene(
        "Time 1: request 0 arrives with 14 tokens",
        "The cache is empty. Blocks 0 to 2 are full and cached in the same step; block 3 has room.",
        blank,
    )
    example.decode(0, DECODED)
    three = example.scene(
        "Time 3: request 0 has decoded three tokens",
        "Block 3 is full now, so it is cached as well; block 4 was taken for the last token.",
        one,
    )
    hit = example.admit(1, REQUEST_1)
    four = example.scene(
        "Time 4: request 1 arrives with 14 tokens, 11 of them as in request 0",
        f"Blocks 0 and 1 are hit, {hit} tokens, and held by both. Block 2 agrees in three of four "
        "tokens only.",
        three,
    )
    example.free(0)
    five = example.scene(
        "Time 5: request 0 has ended",
        "Its last block joins the free queue first. Blocks 2 and 3 stay cached; 0 and 1 are held.",
        four,
    )
    example.free(1)
    six = example.scene(
        "Time 6: request 1 has ended",
        "No request holds a block. Five prefixes are cached until their blocks are needed.",
        five,
    )
    return example, [one, three, four, five, six]


def at_time_7(num_shared: int, num_tokens: int) -> Scene:
    """Return the scene of request 2, whose first tokens are request 0's."""
    example, scenes = at_time_6()
    known = REQUEST_0 + DECODED
    hit = example.admit(2, known[:num_shared] + OTHER[: num_tokens - num_shared])
    table = example.running[2].block_ids
    hits, new = table[: hit // BLOCK_SIZE], table[hit // BLOCK_SIZE :]
    lost = [at for at in new if scenes[-1].blocks[at].cached]
    note = (
        f"Hit: {join(hits)}, which leave the queue before the rest is taken from its head: "
        f"{join(new)}. " + (f"Evicted: {join(lost)}." if lost else "Nothing is evicted.")
    )
    title = f"Time 7: request 2 arrives with {num_tokens} tokens, {num_shared} of them as before"
    return example.scene(title, note, scenes[-1])


def join(ids: list[int]) -> str:
    """Return a string such as "1, 2 and 3"."""
    words = [str(at) for at in ids]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def before_and_after_a_free(eviction: str) -> tuple[Scene, Scene]:
    """Return the scenes of time 4 and, after request 0 has ended, of time 5."""
    example = WorkedExample(eviction)
    example.admit(0, REQUEST_0)
    example.decode(0, DECODED)
    example.admit(1, REQUEST_1)
    before = example.scene("", "")
    example.free(0)
    return before, example.scene("", "", before)
