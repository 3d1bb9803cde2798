"""Rows of a stage as bytes after its blocks' K/V, and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.cache import BlockHash, PrefixNode, PrefixTree, TokenSequence, UnsavedBlock
from headstart.omni.output_cache import BlockPath, OutputCache
from headstart.omni.rows import TierRows
from headstart.omni.stage import Alignment, Kind, Output, StageSpec

SIZE = 4
HIDDEN, FRAMES = Output("hidden"), Output("frames", Alignment(Kind.FRAMES, 2), required=False)
LIKE = {"hidden": torch.zeros(1, 3, dtype=torch.bfloat16), "frames": torch.zeros(2)}
ROOM = 1 << 16


def make_rows(
    *outputs: Output, like: dict[str, Tensor] | None = None, name: str = "thinker", room: int = ROOM
) -> tuple[TierRows, OutputCache]:
    cache = OutputCache(room)
    spec = StageSpec(name=name, gives=outputs or (HIDDEN, FRAMES))
    return TierRows(spec, SIZE, like or LIKE, cache, cache.reserve_name(name)), cache


def sequence(*tokens: int, salt: str | None = None) -> TokenSequence:
    sequence_ = TokenSequence("one", tokens or range(12), salt=salt)
    sequence_.cut(SIZE)
    return sequence_


def unsaved(sequence_: TokenSequence, first: int = 0) -> list[UnsavedBlock]:
    """Return the sequence's blocks as in the events of a pool."""
    tree, blocks = PrefixTree(), []
    node: PrefixNode = tree.make_root(sequence_.namespace)
    for i, key in enumerate(sequence_.keys):
        node = tree.child(node, key)
        names = (BlockHash(b"%d" % (i + 1)), BlockHash(b"%d" % i))
        blocks.append(UnsavedBlock(i, *names, i, 0.0, [], node))
    return blocks[first:]


def rows(block: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(block)
    return {
        "hidden": torch.randn(SIZE, 3, generator=generator).to(torch.bfloat16),
        "frames": torch.randn(2 * SIZE, generator=generator),
    }


def fill(cache: OutputCache, sequence_: TokenSequence) -> BlockPath:
    path = BlockPath("thinker", sequence_.namespace, sequence_.keys)
    for i in range(len(sequence_.keys)):
        cache.put(path, i, rows(i), {"hidden"})
    return path


def views(data: list[bytes | None]) -> list[memoryview]:
    assert None not in data
    return [memoryview(part) for part in data if part is not None]


def test_rows_are_restored_bit_for_bit() -> None:
    source, cache = make_rows()
    fill(cache, tokens := sequence(salt="a"))
    data = source.read(unsaved(tokens))
    assert [len(tokens) for tokens in views(data)] == [source.nbytes] * 3 == [4 * 3 * 2 + 8 * 4] * 3
    target, other = make_rows()
    target.write(tokens, 0, views(data)[:1])
    target.write(tokens, 1, views(data)[1:])
    blocks = other.find(BlockPath("thinker", tokens.namespace, tokens.keys))
    for i, block in enumerate(blocks):
        assert block.keys() == rows(i).keys()
        assert all(torch.equal(block[name], tensor) for name, tensor in rows(i).items())
    assert len(blocks) == 3
    other.check()
    assert not other.find(BlockPath("thinker", sequence(salt="b").namespace, tokens.keys))


def test_rows_are_read_for_blocks_in_any_order() -> None:
    source, cache = make_rows()
    fill(cache, first := sequence())
    fill(cache, second := sequence(7, 7, 7, 7, 8, 8, 8, 8))
    blocks = unsaved(first)
    mixed = [blocks[2], *unsaved(second, 1), blocks[0], blocks[1]]
    whole = views(source.read(blocks))
    assert views(source.read(mixed)) == [whole[2], whole[1], whole[0], whole[1]]


def test_a_block_without_all_rows_is_not_stored() -> None:
    source, cache = make_rows()
    path = fill(cache, tokens := sequence())
    cache.drop("thinker", "frames")
    cache.put(path, 0, rows(0), {"hidden"})
    assert [data is not None for data in source.read(unsaved(tokens))] == [True, False, False]


@pytest.mark.parametrize(
    "other", [torch.zeros(SIZE, 3), torch.zeros(SIZE, 4, dtype=torch.bfloat16)]
)
def test_rows_of_another_layout_are_not_stored(other: Tensor) -> None:
    source, cache = make_rows(HIDDEN)
    path = BlockPath("thinker", (tokens := sequence()).namespace, tokens.keys)
    cache.put(path, 0, {"hidden": other})
    assert source.read(unsaved(tokens)[:1]) == [None]


def test_rows_that_do_not_fit_are_skipped() -> None:
    source, cache = make_rows()
    fill(cache, tokens := sequence())
    target, small = make_rows(room=3000)
    target.write(tokens, 0, views(source.read(unsaved(tokens))))
    small.check()
    assert len(small.find(BlockPath("thinker", tokens.namespace, tokens.keys))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"name": "talker"},
        {"outputs": (HIDDEN,)},
        {"outputs": (FRAMES, HIDDEN)},
        {"like": LIKE | {"hidden": torch.zeros(1, 3)}},
        {"like": LIKE | {"hidden": torch.zeros(1, 4, dtype=torch.bfloat16)}},
    ],
)
def test_another_layout_has_another_store(other: dict[str, Any]) -> None:
    layouts = {make_rows()[0].layout, make_rows(*other.pop("outputs", ()), **other)[0].layout}
    assert len(layouts) == 2


def test_a_stage_without_rows_stores_only_kv() -> None:
    source, cache = make_rows(
        Output("wave", Alignment(Kind.REQUEST)), like={"wave": torch.zeros(9)}
    )
    tokens = sequence()
    assert source.nbytes == 0 and source.read(unsaved(tokens)) == [b""] * 3
    source.write(tokens, 0, [memoryview(b"")] * 3)
    assert cache.stats.entries == 0
