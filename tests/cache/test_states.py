"""States of recurrent layers: no request ever resumes from the state of another prefix.

The oracle is an engine whose "state" is the whole prefix that it stands for: reading a slot gives
back the tokens that were really computed into it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstart.cache import (
    BlockHasher,
    CacheConfig,
    ComputedBlocks,
    KVCacheManager,
    Mark,
    MissReason,
    MultiModalItem,
    TokenSequence,
)
from tests.cache.tiny_engine import GARBAGE, TinyEngine


class RecurrentEngine(TinyEngine):
    """A `TinyEngine` with a recurrent layer, whose state is everything that it has read."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__(manager)
        assert manager.states is not None
        self.states = manager.states
        self.slots: dict[int, object] = {}
        self.num_computed = 0

    def prefix(self, sequence: TokenSequence, stop: int) -> object:
        if not stop:
            return None
        items = [i for i in sequence.items if i.offset < stop]
        cut = [(i.digest, i.offset, min(i.length, stop - i.offset)) for i in items]
        return (self.content(sequence, stop - 1), *cut)

    def aligned(self, position: int) -> int:
        return position - position % self.size if self.states.only_borders else position

    def commit(self) -> None:
        writes: dict[int, object] = {}
        reads: set[int] = set()
        for sequence, start, stop in self._chunks:
            if not sequence.blocks:
                continue
            state = self.states.of(sequence)
            begin = self.prefix(sequence, self.aligned(start))
            if state.read_slot < 0:
                assert begin is None, "a prompt's middle is computed without a state"
            else:
                assert self.slots[state.read_slot] == begin, "a wrong state"
                reads |= {state.read_slot} - {state.slot}
            ends = {state.slot: self.aligned(stop)}
            for save in state.saves:
                assert start < save.position <= stop, "a state that this step does not pass"
                assert save.slot not in ends, "a slot is used twice"
                ends[save.slot] = save.position
            assert writes.keys().isdisjoint(ends), "two sequences write one slot"
            writes |= {slot: self.prefix(sequence, end) for slot, end in ends.items()}
            self.num_computed += stop - start
        assert reads.isdisjoint(writes), "a slot is written that another sequence reads"
        self.slots |= writes
        super().commit()

    def fail(self) -> None:
        """Fail the step when half of its writes are done."""
        for sequence, _, _ in self._chunks:
            if sequence.blocks:
                state = self.states.of(sequence)
                written = [state.slot, *(save.slot for save in state.saves)]
                self.slots |= dict.fromkeys(written, GARBAGE)
        self.scribble()
        self.manager.fail_step()
        self.end_step()

    def verify(self, probes: list[TokenSequence]) -> None:
        super().verify(probes)
        for checkpoint in self.states.checkpoints:
            assert self.slots[checkpoint.slot] is not GARBAGE, "a checkpoint that was not written"
        for probe in probes:
            match = self.manager.get_computed_blocks(probe)
            assert match.num_tokens <= match.known_tokens < len(probe.token_ids)
            if match.state is not None:
                expected = self.prefix(probe, match.num_tokens)
                assert self.slots[match.state.slot] == expected, "a false hit of a state"
            else:
                assert not match.num_tokens


def make_engine(num_blocks: int = 64, num_states: int = 8, **options: object) -> RecurrentEngine:
    config = CacheConfig(
        **{
            "num_blocks": num_blocks,
            "block_size": 4,
            "num_states": num_states,
            "state_interval": 1000,
            **options,
        }
    )
    return RecurrentEngine(KVCacheManager(config, BlockHasher(config.block_size)))


def run(
    engine: TinyEngine, name: str, tokens: list[int], chunk: int = 1 << 20, **options: object
) -> int:
    """Compute a prompt in chunks, and end it; return how many of its tokens were hit."""
    sequence = TokenSequence(name, tokens)
    for key, value in options.items():
        setattr(sequence, key, value)
    hit = engine.manager.get_computed_blocks(sequence).num_tokens
    engine.admit(sequence, min(chunk, len(tokens) - hit))
    engine.commit()
    finish(engine, sequence, chunk)
    engine.verify([TokenSequence("probe", tokens), TokenSequence("longer", [*tokens, 1, 2, 3])])
    return hit


def finish(engine: TinyEngine, sequence: TokenSequence, chunk: int) -> None:
    """Compute the rest of a running sequence in chunks, and end it."""
    while left := len(sequence.token_ids) - sequence.num_computed_tokens:
        engine.append(sequence, count=min(left, chunk))
        engine.commit()
    engine.manager.free(sequence)


def check_conversation(engine: TinyEngine, prompt: range, reply: range) -> None:
    """Generate a reply; the next turn resumes at its end."""
    sequence = TokenSequence("a", prompt)
    engine.admit(sequence)
    engine.commit()
    for token in reply:
        engine.append(sequence, token)
        engine.commit()
    engine.manager.free(sequence)
    turn = TokenSequence("b", [*sequence.token_ids, 7, 8, 9])
    assert engine.manager.get_computed_blocks(turn).num_tokens == len(sequence.token_ids)
    engine.verify([turn])


def test_a_repeated_prompt_computes_its_last_token_alone() -> None:
    engine = make_engine()
    prompt = list(range(30))
    assert run(engine, "a", prompt) == 0
    assert run(engine, "b", prompt) == 29


def test_a_conversation_resumes_at_the_end_of_the_reply() -> None:
    check_conversation(make_engine(), range(30), range(100, 110))


def test_a_fork_is_computed_once_and_then_hit_to_the_token() -> None:
    engine = make_engine()
    shared = list(range(50))
    assert run(engine, "a", [*shared, 100, 101, 102]) == 0
    second = TokenSequence("b", [*shared, 200, 201, 202])
    explanation = engine.manager.explain(second)
    assert explanation.reason is MissReason.STATE
    assert (explanation.position, explanation.known_tokens) == (0, 50)
    assert "cached up to token 50" in str(explanation)
    free = engine.manager.num_free_blocks
    engine.admit(second)
    assert free - engine.manager.num_free_blocks == 14  # 12 shared blocks are held, 2 are new
    engine.commit()
    engine.manager.free(second)
    assert run(engine, "c", [*shared, 300, 301, 302]) == 50


def test_requests_with_one_prefix_wait_for_the_state_at_their_fork() -> None:
    engine = make_engine(num_blocks=256, num_states=32)
    shared = list(range(400))
    first = TokenSequence("a", [*shared, 1000, 1001, 1002])
    engine.admit(first)
    others = [TokenSequence(f"b{i}", [*shared, 2000 + i, 7]) for i in range(5)]
    lookup = engine.manager.get_computed_blocks(others[0])
    assert engine.manager.save_fork(lookup)
    assert engine.manager.get_computed_blocks(others[1]).writer == "a"
    engine.commit()
    for sequence in others:
        assert engine.manager.get_computed_blocks(sequence).num_tokens == 400
        engine.admit(sequence)
    engine.commit()
    assert engine.num_computed == 403 + 5 * 2


def test_a_state_at_a_known_fork_is_computed_by_one_request_alone() -> None:
    engine = make_engine(num_blocks=256, num_states=32)
    shared = list(range(400))
    run(engine, "a", [*shared, 1000, 1001, 1002])
    second, third = (
        TokenSequence(name, [*shared, token, 7]) for name, token in (("b", 1), ("c", 2))
    )
    engine.admit(second, 100)
    engine.commit()
    assert engine.manager.get_computed_blocks(third).writer == "b"
    engine.append(second)
    engine.commit()
    assert engine.manager.get_computed_blocks(third).num_tokens == 400


def test_marks_and_expected_forks_get_a_checkpoint() -> None:
    engine = make_engine()
    prompt = list(range(40))
    run(engine, "a", prompt, marks=[Mark(11, 60.0)], forks=[21])
    for length in (11, 21):
        branch = TokenSequence("b", [*prompt[:length], 99, 98])
        assert engine.manager.get_computed_blocks(branch).num_tokens == length


def test_long_prompts_have_checkpoints_at_intervals() -> None:
    engine = make_engine(num_blocks=200, num_states=32, state_interval=100)
    prompt = list(range(500))
    run(engine, "a", prompt)
    branch = TokenSequence("b", [*prompt[:450], 9999])
    assert engine.manager.get_computed_blocks(branch).num_tokens == 400


def test_a_lookup_that_is_cut_resumes_at_a_checkpoint_within_it() -> None:
    engine = make_engine(num_blocks=200, num_states=32, state_interval=100)
    run(engine, "a", list(range(500)))
    lookup = engine.manager.get_computed_blocks(TokenSequence("b", range(500)))
    assert lookup.num_tokens == 499
    cut = engine.manager.cut(lookup, 60)
    assert (cut.num_tokens, cut.known_tokens, len(cut.blocks)) == (200, 240, 60)
    again = engine.manager.cut(cut, 55)
    assert (again.num_tokens, again.known_tokens) == (200, 220)
    alone = lookup.cut(60, engine.size)
    assert (alone.num_tokens, alone.state) == (0, None)


def test_the_least_useful_checkpoint_is_evicted_first() -> None:
    engine = make_engine(num_blocks=400, num_states=4)
    long, short = list(range(1000, 1400)), list(range(2000, 2020))
    run(engine, "long", long)
    run(engine, "short", short)
    for i in range(3):
        run(engine, f"other {i}", list(range(3000 + i * 300, 3300 + i * 300)))
    assert engine.manager.states is not None and engine.manager.states.num_dropped
    assert run(engine, "long again", long) == 399
    assert run(engine, "short again", short) < 19


def test_a_sequence_without_a_slot_is_not_admitted() -> None:
    engine = make_engine(num_states=1)
    first, second = TokenSequence("a", range(10)), TokenSequence("b", range(50, 60))
    engine.admit(first)
    match = engine.manager.get_computed_blocks(second)
    assert engine.manager.allocate_slots(second, 10, match) is None
    engine.commit()
    engine.manager.free(first)
    engine.admit(second)
    engine.commit()
    engine.verify([first, second])


def test_a_single_slot_is_for_working_states_alone() -> None:
    engine = make_engine(num_states=1)
    prompt = list(range(30))
    run(engine, "a", prompt)
    assert run(engine, "b", [*prompt, 7, 8, 9]) == 0


def test_dropped_checkpoints_are_not_held() -> None:
    engine = make_engine(num_blocks=16, num_states=64)
    for i in range(200):
        run(engine, f"r{i}", list(range(100 * i, 100 * i + 20)))
    engine.manager.check()


CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([4, 9, 16, 24]),
        "num_states": st.sampled_from([1, 2, 3, 5, 9]),
        "block_size": st.integers(1, 4),
        "deduplicate": st.booleans(),
        "partial_hits": st.booleans(),
        "states_at_borders": st.booleans(),
        "state_interval": st.sampled_from([4, 8, 1000]),
        "eviction": st.sampled_from(["lru", "adaptive-lru", "fair-lru"]),
        "enable_prefix_caching": st.sampled_from([True] * 9 + [False]),
    }
)
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1, 255]), min_size=1, max_size=24)
PICK = st.integers(0, 7)
POSITIONS = st.lists(st.integers(0, 24), max_size=2)


class StateMachine(RuleBasedStateMachine):
    """Requests over three tokens arrive, run in chunks, grow, fail, and end."""

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, object]) -> None:
        self.begin(make_engine(**config))

    def begin(self, engine: TinyEngine) -> None:
        self.engine = engine
        self.engine.may_forget = True
        self.manager = self.engine.manager
        self.running: list[TokenSequence] = []
        self.stepping: set[TokenSequence] = set()
        self.seen: list[TokenSequence] = []
        self.old: list[ComputedBlocks] = []

    @rule(tokens=TOKENS, marks=POSITIONS, forks=POSITIONS, pick=PICK, item=st.booleans())
    def admit(
        self, tokens: list[int], marks: list[int], forks: list[int], pick: int, item: bool
    ) -> None:
        name = f"r{len(self.seen)}"
        items = [MultiModalItem(b"cat", 1, 3)] if item and len(tokens) > 4 else []
        salt = [None, None, None, "s"][pick % 4]
        sequence = TokenSequence(name, tokens, items=items, salt=salt)
        sequence.marks = [Mark(mark, 60.0) for mark in marks]
        sequence.forks = forks
        sequence.is_stored = pick != 7
        self.seen.append(sequence)
        match = self.manager.get_computed_blocks(sequence)
        if match.writer is not None or self.manager.save_fork(match):
            return
        left = len(tokens) - match.num_tokens
        count = min(left, 1 + pick)
        free = self.manager.num_free_blocks
        allocation = self.manager.allocate_slots(sequence, count, match)
        if allocation is None:
            assert self.manager.num_free_blocks == free and not sequence.blocks
            return
        self.engine._copies += allocation.copies
        self.engine._add_chunk(sequence, match.num_tokens, match.num_tokens + count)
        self.running.append(sequence)
        self.stepping.add(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=PICK, tokens=st.lists(st.sampled_from([0, 1]), max_size=3))
    def grow(self, pick: int, tokens: list[int]) -> None:
        sequence = self.running[pick % len(self.running)]
        if sequence in self.stepping:
            return
        for token in tokens:
            sequence.append(token)
        start = sequence.num_computed_tokens
        count = min(len(sequence.token_ids) - start, 1 + pick)
        if count and self.manager.append_slots(sequence, count):
            self.engine._add_chunk(sequence, start, start + count)
            self.stepping.add(sequence)

    @rule()
    def commit(self) -> None:
        self.engine.commit()
        self.stepping.clear()

    @rule()
    def fail(self) -> None:
        self.engine.fail()
        self.running = [s for s in self.running if s.blocks]
        self.stepping.clear()

    @precondition(lambda self: self.running)
    @rule(pick=PICK, discards=st.booleans())
    def end(self, pick: int, discards: bool) -> None:
        sequence = self.running[pick % len(self.running)]
        if discards:  # after the model has written the step
            for chunk in [c for c in self.engine._chunks if c[0] is sequence]:
                self.engine.write(*chunk)
                self.engine._chunks.remove(chunk)
            self.manager.discard([sequence])
        elif sequence in self.stepping:
            return
        else:
            self.manager.free(sequence)
        self.stepping.discard(sequence)
        self.running.remove(sequence)

    @rule(pick=PICK)
    def reset(self, pick: int) -> None:
        if pick == 0 and not self.running:
            assert self.manager.reset_prefix_cache()

    @invariant()
    def holds(self) -> None:
        self.manager.check()
        if not self.stepping:
            probes = [
                TokenSequence(f"p{s.request_id}", [*s.token_ids, 0, 1]) for s in self.seen[-8:]
            ]
            self.engine.verify(probes)


StateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStates = StateMachine.TestCase
