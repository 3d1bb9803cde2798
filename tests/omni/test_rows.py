"""Rows that a stage passes on: the reference's examples, and each row exactly once."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.cache import BlockKey, MissExplanation, MissReason, MultiModalItem, TokenSequence
from headstart.errors import EngineError
from headstart.omni.output_cache import ENTRY_BYTES, NODE_BYTES, BlockPath, OutputCache
from headstart.omni.rows import ScheduledRows, StageRows
from headstart.omni.stage import Chunk, Output, parse_alignment
from tests.omni.stages import FakeStage, random_run, row

FIRST = ["The", "quick", "brown", "fox", "was", "tired", "and", "slept"]
FIRST += ["beneath", "the", "shady", "tree"]
SECOND = ["The", "quick", "brown", "fox", "jumped", "over", "the", "dog"]
WORDS = {word: number for number, word in enumerate([*FIRST, *SECOND])}


def words(name: str, text: list[str]) -> TokenSequence:
    return TokenSequence(name, [WORDS[word] for word in text])


def test_the_references_example_of_a_shared_block() -> None:
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=8, block_size=4, cache=cache)
    first, second = words("first", FIRST), words("second", SECOND)
    stage.open(first)
    stage.admit(first)
    assert first.block_ids == [0, 1, 2]
    stage.step()
    assert [chunk.rows.shape for chunk in stage.chunks[first]] == [(12, 2), (12, 16)]
    assert cache.count(BlockPath("thinker", first.namespace, first.keys)) == 3

    stage.open(second)
    assert stage.admit(second) == 4
    assert second.block_ids == [0, 3]
    stage.step()
    assert stage.computed_tokens == 12 + 4
    shared = [chunk.rows for chunk in stage.chunks[second] if chunk.start == 0]
    hidden = torch.cat([c.rows for c in stage.chunks[second] if c.output == "hidden"])
    feature = torch.cat([c.rows for c in stage.chunks[second] if c.output == "mm_feature"])
    assert hidden.shape == (8, 2) and feature.shape == (8, 16)
    assert torch.equal(shared[0], stage.chunks[first][0].rows[:4])
    assert cache.stats.entries == 4 * 2
    assert stage.rows.close(second) == {"hidden": 4, "mm_feature": 4}


def test_the_references_example_of_an_image_across_blocks() -> None:
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=8, block_size=4, cache=cache)
    image = MultiModalItem(b"six patches", 0, 6)
    first = TokenSequence("first", [9] * 6 + [1], items=[image])
    second = TokenSequence("second", [9] * 6 + [2, 3], items=[image])
    other = TokenSequence("other", [9] * 6 + [2, 3], items=[MultiModalItem(b"another", 0, 6)])
    stage.run(first)
    assert cache.stats.entries == 2  # of the first block alone, one an output
    assert stage.run(second) == 4
    assert cache.stats.entries == 4
    assert stage.run(other) == 0


def test_evicted_rows_shorten_the_hit() -> None:
    entry_size = 4 * 18 * 4 + 2 * ENTRY_BYTES + NODE_BYTES + 16
    stage = FakeStage(cache=OutputCache(NODE_BYTES + len("thinker") + 2 * entry_size))
    stage.run(words("first", FIRST))
    again = words("again", [*FIRST, "dog"])
    match = stage.manager.get_computed_blocks(again)
    assert match.num_tokens == 12
    assert stage.run(again) == 8
    assert stage.missed == MissExplanation(MissReason.OUTPUTS, 8)


def test_a_chunked_prompt_whose_rows_do_not_fit_keeps_its_head() -> None:
    """Regression: the second chunk's rows evicted the first's, so the prompt was never hit."""
    entry_size = 4 * 18 * 4 + 2 * ENTRY_BYTES + NODE_BYTES + 16
    cache = OutputCache(NODE_BYTES + len("thinker") + 3 * entry_size)
    stage = FakeStage(num_blocks=16, cache=cache)
    first = TokenSequence("first", list(range(40)))
    stage.open(first)
    stage.admit(first, 8)
    stage.step()
    for _ in range(4):
        stage.advance(first, 8)
        stage.step()
    for block in (3, 1):  # other entries evict its last blocks, even while it runs
        assert cache.count(BlockPath("thinker", first.namespace, first.keys)) == block
        for index in range(2):
            keys = [BlockKey(bytes([index]) * 16)]
            cache.put(BlockPath("thinker", first.namespace, keys), 0, {"hidden": torch.ones(4, 18)})


def test_evicted_kv_is_computed_again_without_storing_rows_twice() -> None:
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=8, cache=cache)
    stage.run(words("first", FIRST))
    for name in ("other", "more"):
        stage.run(TokenSequence(name, [100 + len(name)] * 32))
    written = cache.stats.written
    assert stage.run(words("again", FIRST)) == 0
    assert cache.stats.written == written
    assert cache.count(BlockPath("thinker", words("x", FIRST).namespace, words("x", FIRST).cut(4)))


def test_a_hit_within_a_step_reads_the_rows_of_the_step() -> None:
    stage = FakeStage(num_blocks=12, cache=OutputCache(0))
    first, second = words("first", FIRST), words("second", SECOND)
    stage.open(first)
    stage.open(second)
    assert stage.admit(first) == 0
    assert stage.admit(second) == 4
    stage.step()  # even with a store that stores nothing
    assert stage.rows.watermark(second) == 8


@pytest.mark.parametrize("output", ["hidden", "mm_feature"])
@pytest.mark.parametrize("count", [1, 3, 4, 12])
@pytest.mark.parametrize(("position", "num_kept"), [(0, 0), (3, 0), (4, 1), (7, 1), (11, 2)])
def test_no_block_is_stored_after_a_row_that_is_not_finite(
    output: str, count: int, position: int, num_kept: int
) -> None:
    """Regression: they stayed in the store, as existing entries are not overwritten."""
    cache = OutputCache(1 << 20)
    stage = FakeStage(cache=cache)
    stage.spoiled = (output, position)
    first = words("first", FIRST)
    stage.open(first)
    stage.admit(first, count)
    stage.compute()
    while first.num_computed_tokens < len(FIRST):
        assert stage.advance(first, count)
        stage.compute()
    actual = torch.cat([chunk.rows for chunk in stage.chunks[first] if chunk.output == output])
    assert actual[:, -1].isnan().nonzero().flatten().tolist() == [position]
    path = BlockPath("thinker", first.namespace, first.keys)
    assert cache.count(path) == num_kept and cache.stats.entries == num_kept * 2
    stage.chunks.clear()
    stage.spoiled = None
    assert stage.run(words("again", FIRST)) == num_kept * 4
    assert cache.count(path) == 3


def test_rows_that_are_not_finite_do_not_affect_a_neighbors_blocks() -> None:
    """A neighbor that hits them in the same step gets them unchanged."""
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=16, cache=cache)
    stage.spoiled = ("hidden", 3)
    first, second, other = words("first", FIRST), words("second", SECOND), words("o", SECOND[4:])
    for sequence in (first, second):
        stage.open(sequence)
    assert stage.admit(first) == 0
    assert stage.admit(second) == 4
    chunks = stage.compute()
    for sequence in (first, second):
        rows = torch.cat([chunk.rows for chunk in chunks[sequence] if chunk.output == "hidden"])
        assert rows.isnan().any(1).nonzero().flatten().tolist() == [3]
    stage.spoiled = ("hidden", 11)
    third = words("third", [*FIRST[4:], *FIRST[:4]])
    for sequence in (third, other):
        stage.open(sequence)
        stage.admit(sequence)
    stage.compute()
    assert cache.count(BlockPath("thinker", other.namespace, other.keys)) == 1
    assert cache.count(BlockPath("thinker", third.namespace, third.keys)) == 2
    assert cache.count(BlockPath("thinker", first.namespace, first.keys)) == 0


def test_a_new_output_at_the_end_of_a_block_fails_no_hit() -> None:
    """Regression: the hit was granted without rows of the new output, which raised EngineError."""
    stage = FakeStage(outputs=(), widths=(("hidden", 2),), cache=OutputCache(1 << 20))
    first, second = words("first", FIRST), words("second", SECOND)
    stage.open(first)
    stage.open(second)
    stage.admit(first, 2)
    stage.step()
    stage.widths["extra"] = 1
    assert stage.advance(first, 4)
    assert stage.manager.get_computed_blocks(second).num_tokens == 4
    assert stage.admit(second) == 0
    chunks = stage.compute()
    assert [(c.output, c.start, c.stop) for c in chunks[first]] == [
        ("hidden", 2, 6),
        ("extra", 2, 6),
    ]
    assert [(c.output, c.start, c.stop) for c in chunks[second]] == [
        ("hidden", 0, 8),
        ("extra", 0, 8),
    ]


def test_a_request_that_resumes_with_a_longer_hit_gets_the_missing_rows() -> None:
    stage = FakeStage(num_blocks=8, cache=OutputCache(1 << 20))
    slow = words("slow", FIRST)
    stage.open(slow)
    stage.admit(slow, 2)
    stage.step()
    stage.preempt(slow)
    stage.run(words("quick", FIRST))
    assert stage.admit(slow) == 11
    stage.step()
    assert [(c.start, c.stop) for c in stage.chunks[slow] if c.output == "hidden"] == [
        (0, 2),
        (2, 11),
        (11, 12),
    ]


def test_a_request_that_resumes_with_a_shorter_hit_repeats_no_rows() -> None:
    stage = FakeStage(num_blocks=8, cache=OutputCache(1 << 20))
    slow = words("slow", FIRST)
    stage.open(slow)
    stage.admit(slow, 10)
    stage.step()
    stage.preempt(slow)
    stage.run(TokenSequence("greedy", [100] * 32))
    assert stage.admit(slow) == 0
    stage.step()
    assert [(c.start, c.stop) for c in stage.chunks[slow] if c.output == "hidden"] == [
        (0, 10),
        (10, 12),
    ]


def test_a_resumed_request_needs_no_rows_below_its_watermark() -> None:
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=8, cache=cache)
    slow = words("slow", FIRST)
    stage.open(slow)
    stage.admit(slow, 9)
    stage.step()
    stage.preempt(slow)
    cache.clear()
    assert stage.admit(slow) == 8
    stage.step()


def test_an_abort_leaves_valid_rows() -> None:
    stage = FakeStage(cache=OutputCache(1 << 20))
    aborted = words("aborted", FIRST)
    stage.open(aborted)
    stage.admit(aborted, 9)
    stage.step()
    stage.manager.free(aborted)
    stage.rows.close(aborted)
    assert stage.run(words("next", FIRST)) == 8


def test_frames_belong_to_their_tokens() -> None:
    rows = StageRows("s", 2, [Output("audio", parse_alignment("frames(3)"))], OutputCache(1 << 20))
    stage = FakeStage(block_size=2, cache=OutputCache(1 << 20))
    manager = stage.manager
    whole = torch.arange(15.0)
    for name, start in (("a", 0), ("b", 4)):
        sequence = TokenSequence(name, [1, 2, 3, 4, 5])
        rows.open(sequence)
        match = manager.get_computed_blocks(sequence)
        assert rows.usable(sequence, match) * 2 == start
        manager.allocate_slots(sequence, 5 - start, match)
        rows.admitted(sequence, start)
        chunks = rows.computed([ScheduledRows(sequence, start, 5)], {"audio": whole[start * 3 :]})
        manager.commit_step()
        assert torch.equal(torch.cat([chunk.rows for _, chunk in chunks]), whole)


def test_an_output_discovered_by_one_request_is_reused_by_the_next() -> None:
    """The reference's example has 12 tokens, then 8, of which 4 are a hit."""
    stage = FakeStage(cache=OutputCache(1 << 20), outputs=())
    first, second = words("first", FIRST), words("second", SECOND)
    assert [stage.run(first), stage.run(second)] == [0, 4]
    assert {name: chunks[0].stop for name, chunks in by_output(stage, second).items()} == {
        "hidden": 4,
        "mm_feature": 4,
    }


def by_output(stage: FakeStage, sequence: TokenSequence) -> dict[str, list[Chunk]]:
    """Return the chunks of a sequence by output."""
    names = {chunk.output for chunk in stage.chunks[sequence]}
    return {name: [c for c in stage.chunks[sequence] if c.output == name] for name in names}


def test_a_pass_that_cannot_confirm_an_output_reuses_nothing() -> None:
    """A pass that is at least as long as the first may be chunked to the same length."""
    for more in (9, 12):
        stage = FakeStage(num_blocks=32, cache=OutputCache(1 << 20), outputs=())
        stage.run(words("first", FIRST[:9]))
        assert stage.run(words("next", [*FIRST[:8], *["dog"] * more])) == 0
        assert stage.run(words("again", FIRST[:9])) == 8


def test_two_concurrent_requests_do_not_reuse_undecided_outputs() -> None:
    stage = FakeStage(num_blocks=32, cache=OutputCache(1 << 20), outputs=())
    stage.run(words("first", FIRST))
    pair = [words("one", FIRST), words("two", [*FIRST[:4], "dog"])]
    for sequence in pair:
        stage.open(sequence)
    assert [stage.admit(sequence) for sequence in pair] == [0, 0]
    stage.step()


class OddStage(FakeStage):
    """A stage with outputs that have rows per pass and per request instead of per token."""

    def __init__(self, rows_of_pass: int) -> None:
        super().__init__(num_blocks=16, cache=OutputCache(1 << 14), outputs=())
        self.rows_of_pass = rows_of_pass
        self.begin: dict[TokenSequence, int] = {}
        take = self.rows.computed

        def computed(
            parts: Sequence[ScheduledRows], outputs: Mapping[str, Tensor]
        ) -> list[tuple[TokenSequence, Chunk]]:
            begin = {part.sequence: part.start for part in parts}
            odd = {"table": torch.rand(self.rows_of_pass, 2), "pooled": torch.rand(len(parts), 2)}
            chunks = take(parts, {**outputs, **odd})
            for sequence, chunk in chunks:
                if chunk.output in odd:  # undecided, and of this pass
                    assert chunk.start >= begin[sequence]
            return chunks

        self.rows.computed = computed  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(12))
def test_undeclared_outputs_match_computed_ones(seed: int) -> None:
    """Each row is checked against its prefix; outputs that are not per token are never reused."""
    counts = random_run(OddStage(seed % 12 + 1), seed, 60)
    assert counts["hits"] or counts["preemptions"]


def test_an_output_that_turns_out_not_to_be_per_token_is_dropped() -> None:
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=32, cache=cache, outputs=(), widths=(("hidden", 2),))
    for count in (5, 6, 6):
        stage.run(words(f"{count}", FIRST[:count]))
    assert cache.stats.entries == 1
    sequence = words("odd", FIRST[5:9])
    stage.rows.open(sequence)
    stage.rows.admitted(sequence, 0)
    assert stage.rows.computed([ScheduledRows(sequence, 0, 4)], {"hidden": torch.zeros(3, 2)}) == []
    assert cache.stats.entries == 0


def test_a_stage_without_rows_hits_its_full_kv_cache() -> None:
    stage = FakeStage(cache=OutputCache(0), outputs=(), widths=())
    stage.run(words("first", FIRST))
    assert stage.run(words("again", [*FIRST, "dog"])) == 12


def test_a_stage_with_unused_rows_hits_its_full_kv_cache() -> None:
    stage = FakeStage(cache=OutputCache(0))
    stage.rows.limit_to(set())
    stage.run(words("first", FIRST))
    assert stage.run(words("again", [*FIRST, "dog"])) == 12


def test_a_missing_or_wrong_declared_output_is_an_error() -> None:
    cache = OutputCache(1 << 20)
    rows = StageRows("s", 4, [Output("hidden")], cache)
    sequence = TokenSequence("r", [1] * 5)
    rows.open(sequence)
    rows.admitted(sequence, 0)
    with pytest.raises(EngineError, match="'s' did not return 'hidden'"):
        rows.computed([ScheduledRows(sequence, 0, 5)], {})
    with pytest.raises(EngineError, match=r"needs 5 rows for 5 tokens"):
        rows.computed([ScheduledRows(sequence, 0, 5)], {"hidden": torch.zeros(4, 2)})
    assert cache.stats.entries == 0 and rows.watermark(sequence) == 0


def test_an_optional_output_shortens_no_hit() -> None:
    outputs = (Output("hidden"), Output("mm_feature", required=False))
    cache = OutputCache(1 << 20)
    stage = FakeStage(num_blocks=8, cache=cache, outputs=outputs)
    stage.run(words("first", FIRST))
    cache.drop("thinker", "mm_feature")
    again = words("again", FIRST)
    stage.open(again)
    assert stage.admit(again) == 11
    parts, stage.admitted = stage.admitted, []
    outputs_of_token = {
        name: row(again.token_ids, width)[None] for name, width in stage.widths.items()
    }
    chunks = stage.rows.computed(parts, outputs_of_token)
    assert [(c.output, c.start, c.stop) for _, c in chunks] == [
        ("hidden", 0, 11),
        ("hidden", 11, 12),
        ("mm_feature", 11, 12),
    ]


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 30), st.integers(7, 20))
def test_each_row_is_passed_on_once_and_correct(seed: int, entries: int, num_blocks: int) -> None:
    cache = OutputCache(entries * (4 * 16 * 4 + ENTRY_BYTES + NODE_BYTES))
    random_run(FakeStage(num_blocks=num_blocks, cache=cache), seed, steps=30)


def test_random_runs_have_hits_and_preemptions() -> None:
    counts = [
        random_run(FakeStage(num_blocks=9, cache=OutputCache(1 << 20)), seed, steps=60)
        for seed in range(3)
    ]
    assert all(count["hits"] and count["preemptions"] for count in counts)


def test_without_a_store_every_row_is_computed() -> None:
    counts = random_run(FakeStage(num_blocks=20), 1, steps=40)
    assert counts["hits"] == 0
