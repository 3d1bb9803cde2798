"""Window blocks: no row of a sliding-window layer ever reads K/V of other tokens.

The oracle is an engine whose window blocks hold the whole prefix of each row that was written.
"""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    KVCacheManager,
    Mark,
    MissReason,
    TokenSequence,
)
from headstart.errors import ConfigError
from tests.cache.test_states import PICK, StateMachine, check_conversation, finish
from tests.cache.test_states import run as run_in_chunks
from tests.cache.tiny_engine import GARBAGE, TinyEngine


class WindowEngine(TinyEngine):
    """A `TinyEngine` with sliding-window layers, whose rows are everything up to them."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__(manager)
        assert manager.windows is not None
        self.windows = manager.windows
        self.rows: dict[int, object] = {}
        self.num_computed = 0

    def commit(self) -> None:
        size = self.size
        copies = [
            (copy.target_window * size + row, self.rows.get(copy.source_window * size + row))
            for copy in self._copies
            for row in range(copy.num_rows)
        ]
        self.rows |= dict(copies)
        chunks = [chunk for chunk in self._chunks if chunk[0].blocks]
        for sequence, start, stop in chunks:
            for position, slot in enumerate(sequence.window_slots(start, stop, size, -1), start):
                if slot >= 0:
                    self.rows[slot] = self.content(sequence, position)
        for sequence, start, stop in chunks:
            self.num_computed += stop - start
            self.read(sequence, sequence.window_table(), start - start % size, stop)
        super().commit()

    def read(self, sequence: TokenSequence, table: list[int], start: int, stop: int) -> None:
        """Check the rows that a step reads from `start` on, up to `stop`."""
        for position in range(max(0, start - self.windows.width + 1), stop):
            slot = table[position // self.size] * self.size + position % self.size
            assert self.rows.get(slot) == self.content(sequence, position), "a wrong row"

    def fail(self) -> None:
        """Fail the step when half of its writes are done."""
        for sequence, start, stop in self._chunks:
            if sequence.blocks:
                slots = sequence.window_slots(start, stop, self.size, -1)
                self.rows |= dict.fromkeys([slot for slot in slots if slot >= 0], GARBAGE)
        self.scribble()
        self.manager.fail_step()
        self.end_step()

    def verify(self, probes: list[TokenSequence]) -> None:
        super().verify(probes)
        for probe in probes:
            lookup = self.manager.get_computed_blocks(probe)
            assert lookup.num_tokens <= max(lookup.known_tokens, 0) < len(probe.token_ids)
            blocks = [*lookup.blocks, *([lookup.partial.block] if lookup.partial else [])]
            table = [self.windows.window_block(block) for block in blocks]
            start = lookup.num_tokens - lookup.num_tokens % self.size
            self.read(probe, table, start, lookup.num_tokens)


def make_engine(
    num_blocks: int = 100, num_window_blocks: int = 12, window: int = 8, **options: object
) -> WindowEngine:
    sizes = {
        "num_blocks": num_blocks,
        "num_window_blocks": num_window_blocks,
        "window": window,
        "block_size": 4,
    }
    config = CacheConfig(**{**sizes, **options})
    return WindowEngine(KVCacheManager(config, BlockHasher(config.block_size)))


run = partial(run_in_chunks, chunk=16)


def test_a_repeated_prompt_computes_its_last_token_alone() -> None:
    engine = make_engine()
    prompt = list(range(90))
    assert run(engine, "a", prompt) == 0
    assert run(engine, "b", prompt) == 89
    assert run(engine, "c", [*prompt, 500, 501]) == 90


def test_a_running_sequence_holds_no_more_than_its_window_and_its_step() -> None:
    engine = make_engine(num_window_blocks=8)
    run(engine, "a", list(range(200)))
    sequence = TokenSequence("b", range(300, 500))
    engine.admit(sequence, 16)
    engine.commit()
    while sequence.num_computed_tokens < 200:
        engine.append(sequence, count=4)
        engine.commit()
        assert engine.windows.num_blocks - engine.windows.num_free <= 4


def test_a_conversation_resumes_at_the_end_of_the_reply() -> None:
    check_conversation(make_engine(), range(40), range(100, 140))


def test_a_fork_is_computed_once_and_then_hit_to_the_token() -> None:
    engine = make_engine()
    shared = list(range(150))
    assert run(engine, "a", [*shared, *range(1000, 1100)]) == 0
    second = TokenSequence("b", [*shared, 2000, 2001, 2002])
    explanation = engine.manager.explain(second)
    assert explanation.reason is MissReason.WINDOW and explanation.known_tokens == 150
    assert "up to token 150" in str(explanation)
    free = engine.manager.num_free_blocks
    position = engine.manager.get_computed_blocks(second).num_tokens
    engine.admit(second, 16)
    assert free - engine.manager.num_free_blocks == 37  # blocks of 150 tokens, all held
    engine.commit()
    finish(engine, second, 16)
    assert engine.num_computed == 250 + 153 - position
    assert run(engine, "c", [*shared, 3000, 3001]) == 150


def test_marks_and_expected_forks_stay_when_others_run() -> None:
    engine = make_engine(num_blocks=400, num_window_blocks=24)
    prompt = list(range(160))
    run(engine, "a", prompt, marks=[Mark(33, 60.0)], forks=[71])
    run(engine, "b", list(range(500, 700)))
    for length in (33, 71):
        branch = TokenSequence("c", [*prompt[:length], 999, 998])
        assert engine.manager.get_computed_blocks(branch).num_tokens == length


def test_a_long_prompt_does_not_evict_the_windows_of_others() -> None:
    engine = make_engine(num_blocks=600, num_window_blocks=30)
    first = list(range(60))
    run(engine, "a", first)
    run(engine, "b", list(range(1000, 2500)))
    assert run(engine, "c", first) == 59


def test_a_sequence_waits_for_window_blocks() -> None:
    engine = make_engine(num_window_blocks=5)
    first, second = TokenSequence("a", range(16)), TokenSequence("b", range(50, 66))
    engine.admit(first)
    lookup = engine.manager.get_computed_blocks(second)
    assert not engine.manager.can_admit(lookup)
    assert engine.manager.allocate_slots(second, 16, lookup) is None
    engine.commit()
    engine.manager.free(first)
    engine.admit(second)
    engine.commit()
    engine.verify([first, second])


def test_a_running_sequence_without_window_blocks_gets_no_slots() -> None:
    engine = make_engine(num_window_blocks=6)
    first, second = TokenSequence("a", range(40)), TokenSequence("b", range(50, 60))
    engine.admit(first, 12)
    engine.admit(second)
    engine.commit()
    free = engine.manager.num_free_blocks
    assert not engine.manager.append_slots(first, 16)
    assert engine.manager.num_free_blocks == free
    engine.manager.check()
    engine.manager.free(second)
    engine.append(first, count=12)
    engine.commit()


@pytest.mark.parametrize("deduplicate", [True, False])
def test_two_prompts_in_one_step_compute_the_same_blocks(deduplicate: bool) -> None:
    engine = make_engine(num_window_blocks=30, deduplicate=deduplicate)
    prompt = list(range(24))
    first, second = TokenSequence("a", prompt), TokenSequence("b", prompt)
    engine.admit(first, 6)
    engine.admit(second, 6, reads=False)
    engine.commit()
    engine.append(first)
    engine.append(second)
    engine.commit()
    engine.verify([first])
    engine.manager.free(first)
    engine.manager.free(second)
    assert run(engine, "c", prompt) == 23


def test_a_failed_step_leaves_no_window_though_another_request_ends_within_it() -> None:
    engine = make_engine(num_window_blocks=10)
    prompt = list(range(80))
    run(engine, "a", prompt)
    other = TokenSequence("b", range(500, 505))
    engine.admit(other)
    engine.commit()
    again = TokenSequence("c", [*prompt[:30], 999])
    assert engine.manager.get_computed_blocks(again).num_tokens == 0
    engine.admit(again, 16)
    engine.manager.free(other)
    engine.fail()
    engine.verify([TokenSequence("probe", prompt[:n]) for n in range(2, 30)])


CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 16, 24]),
        "num_window_blocks": st.sampled_from([3, 5, 8, 12]),
        "window": st.integers(1, 9),
        "block_size": st.integers(1, 4),
        "deduplicate": st.booleans(),
        "partial_hits": st.booleans(),
        "eviction": st.sampled_from(["lru", "adaptive-lru", "fair-lru"]),
        "enable_prefix_caching": st.sampled_from([True] * 9 + [False]),
    }
)


class WindowMachine(StateMachine):
    """Requests over three tokens arrive, run in chunks, grow, fail, and end."""

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, object]) -> None:
        self.begin(make_engine(**config))

    @precondition(lambda self: self.running)
    @rule(pick=PICK, discards=st.booleans())
    def end(self, pick: int, discards: bool) -> None:
        is_alone = len(self.stepping) == 1  # other requests of the step may have hit its blocks
        super().end(pick, discards and (is_alone or not self.stepping))


WindowMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWindows = WindowMachine.TestCase


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 8, "num_states": 4}])
def test_window_blocks_need_a_window_and_exclude_states(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_window_blocks is 9, with a window of"):
        CacheConfig(num_blocks=8, num_window_blocks=9, **options)
