"""Random operations on a manager, compared with the naive model after each one.

Each time: no row that a sequence reads is another's (no false hit), a lookup returns the longest
cached run and the exact head of the next block and changes nothing, allocation is all or nothing
and takes from the head of the free queue, `check()` passes, and the replayed events give the names
that are cached. A second machine repeats all of it with names of one bit.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstart.cache import (
    AllBlocksCleared,
    BlockHasher,
    BlockStored,
    CacheConfig,
    ComputedBlocks,
    KVCacheManager,
    Mark,
    MultiModalItem,
    Namespace,
    PublicBlocks,
    TokenSequence,
)
from headstart.errors import CacheError
from tests.cache.naive import NaiveEngine
from tests.cache.naming import block_names, digest_of_one_bit, sha256
from tests.cache.snapshot import snapshot

TOKENS = st.lists(st.sampled_from([0, 0, 1, 255]), min_size=1, max_size=14)
PICK = st.integers(0, 7)
PUBLIC = st.lists(st.lists(st.sampled_from([0, 0, 1, 255]), min_size=1, max_size=10), max_size=2)
AMOUNT = st.sampled_from([1, 1, 2, 3, 5, 99])
AT_ONCE = st.sampled_from([None, None, 1, 2, 4, 99, 99])
MORE = st.lists(st.sampled_from([0, 1]), max_size=4)
MARKS = st.lists(st.builds(Mark, st.integers(0, 14), st.sampled_from([30, 300, 3600])), max_size=2)
ITEMS = st.none() | st.tuples(st.sampled_from([b"cat", b"dog", b"\xff" * 8]), PICK, PICK)

CONFIGS = st.builds(
    CacheConfig,
    num_blocks=st.sampled_from([1, 2, 4, 6, 9, 12, 16, 20]),
    block_size=st.integers(1, 4),
    deduplicate=st.booleans(),
    partial_hits=st.booleans(),
    eviction=st.sampled_from(["lru", "empty-first-lru", "adaptive-lru", "fair-lru"]),
    ghost_entries=st.sampled_from([None, 0, 1, 3]),
    enable_prefix_caching=st.sampled_from([True] * 9 + [False]),
    events=st.just(True),
)


class CacheMachine(RuleBasedStateMachine):
    """An engine with a small pool and requests over three tokens."""

    digest = staticmethod(sha256)

    @initialize(config=CONFIGS, public=PUBLIC)
    def start(self, config: CacheConfig, public: list[list[int]]) -> None:
        names = BlockHasher(config.block_size, digest=self.digest)
        self.now = 0.0
        self.manager = KVCacheManager(config, names, lambda: self.now)
        self.manager.shares.set("s", 2.0)  # the only declared owner; other salts have none
        self.engine = NaiveEngine(self.manager, public)
        self.public = PublicBlocks()
        for prefix in public:
            self.public.publish(prefix, config.block_size)
        self.seen: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.old_lookups: list[ComputedBlocks] = []
        self.replayed: Counter[bytes] = Counter()
        self.named: dict[int, bytes] = {}  # content number of a full prefix: its name

    # Requests arrive

    @rule(
        tokens=TOKENS,
        adapter=st.sampled_from([None, None, "a"]),
        salt=st.sampled_from([None, None, "s", "s/x", "t"]),
        item=ITEMS,
        amount=AT_ONCE,
    )
    def arrive(
        self,
        tokens: list[int],
        adapter: str | None,
        salt: str | None,
        item: tuple[bytes, int, int] | None,
        amount: int | None,
    ) -> None:
        items = []
        if item is not None:
            digest, offset, length = item
            offset %= len(tokens)
            items = [MultiModalItem(digest, offset, min(length + 1, len(tokens) - offset))]
        self._queue(tokens, Namespace(adapter, salt), items, amount)

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, keep=st.integers(1, 20), more=MORE, amount=AT_ONCE)
    def arrive_like_another(
        self, pick: int, keep: int, more: list[int], amount: int | None
    ) -> None:
        other = self.seen[-1 - pick % len(self.seen)]
        tokens = other.token_ids[:keep]
        items = [item for item in other.items if item.offset + item.length <= len(tokens)]
        self._queue([*tokens, *more], other.namespace, items, amount)

    def _queue(
        self,
        tokens: list[int],
        namespace: Namespace,
        items: list[MultiModalItem],
        amount: int | None,
    ) -> None:
        name = f"request {len(self.seen)}"
        sequence = self._make(name, tokens, namespace, items)
        self.seen.append(sequence)
        self.waiting.append(sequence)
        match = self._look_up(sequence)
        if amount is None:
            self.old_lookups.append(match)
        else:
            self._admit(sequence, min(amount, len(tokens) - match.num_tokens), match)

    def _make(
        self,
        name: str,
        tokens: list[int],
        namespace: Namespace,
        items: Sequence[MultiModalItem] = (),
    ) -> TokenSequence:
        return TokenSequence(name, tokens, **namespace._asdict(), items=items, public=self.public)

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK, marks=MARKS, is_stored=st.booleans())
    def mark(self, pick: int, marks: list[Mark], is_stored: bool) -> None:
        """Mark blocks of a request for retention, or its results as not to be stored."""
        sequence = self.waiting[pick % len(self.waiting)]
        sequence.marks, sequence.is_stored = marks, is_stored

    @rule(seconds=st.sampled_from([1, 60, 1000]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    # Requests run

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK, amount=AMOUNT, commit=st.booleans())
    def admit(self, pick: int, amount: int, commit: bool) -> None:
        sequence = self.waiting[pick % len(self.waiting)]
        match = self._look_up(sequence)
        left = len(sequence.token_ids) - match.num_tokens
        self._admit(sequence, min(amount, left), match)
        if commit:
            self.engine.commit()

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK, amount=AMOUNT)
    def admit_without_reading(self, pick: int, amount: int) -> None:
        sequence = self.waiting[pick % len(self.waiting)]
        self._admit(sequence, min(amount, len(sequence.token_ids)), None)

    @precondition(lambda self: self.old_lookups)
    @rule(pick=PICK, amount=AMOUNT)
    def admit_with_an_old_lookup(self, pick: int, amount: int) -> None:
        """Admit with an old lookup: it is refused, or as good as a new one."""
        match = self.old_lookups.pop(pick % len(self.old_lookups))
        sequence = match.sequence
        amount = min(amount, len(sequence.token_ids) - match.num_tokens)
        is_old = match.version != self.manager.pool.version
        if sequence in self.waiting and not is_old:
            self._admit(sequence, amount, match)
        elif is_old or sequence in self.running:
            before = snapshot(self.manager, *self.waiting)
            self._refused(lambda: self.manager.allocate_slots(sequence, amount, match))
            assert snapshot(self.manager, *self.waiting) == before

    def _admit(self, sequence: TokenSequence, amount: int, match: ComputedBlocks | None) -> None:
        before = snapshot(self.manager, *self.waiting)
        if self.engine.admit(sequence, amount, match) is None:
            assert snapshot(self.manager, *self.waiting) == before
            return
        self.waiting.remove(sequence)
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=PICK, amount=AMOUNT, token=st.sampled_from([0, 1]))
    def grow(self, pick: int, amount: int, token: int) -> None:
        self._grow(self.running[pick % len(self.running)], amount, token)

    def _grow(self, sequence: TokenSequence, amount: int, token: int) -> None:
        left = len(sequence.token_ids) - sequence.num_computed_tokens
        if not left:
            sequence.append(token)
            left = 1
        before = snapshot(self.manager)
        if not self.engine.grow(sequence, min(amount, left)):
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.running)
    @rule(tokens=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6))
    def decode(self, tokens: list[int]) -> None:
        """Run steps of one token for every running request."""
        for at, token in enumerate(tokens):
            for sequence in self.running:
                self._grow(sequence, 1, token if at else 0)
            self.engine.commit()

    # Steps and requests end

    @rule()
    def commit(self) -> None:
        self.engine.commit()

    @precondition(lambda self: self.engine.chunks or self.engine.written)
    @rule()
    def fail(self) -> None:
        failed = self.engine.fail()
        self.running = [s for s in self.running if s not in failed]

    @precondition(lambda self: self.running)
    @rule(pick=PICK, again=st.booleans())
    def free(self, pick: int, again: bool) -> None:
        """End or preempt a request that is not in the current step."""
        sequence = self.running[pick % len(self.running)]
        if self.engine.is_in_step(sequence):
            before = snapshot(self.manager)
            self._refused(lambda: self.manager.free(sequence))
            assert snapshot(self.manager) == before
            self.engine.commit()
        self.engine.free(sequence)
        self.running.remove(sequence)
        if again:
            self.waiting.append(sequence)
        else:
            self._refused(lambda: self.manager.free(sequence))

    @precondition(lambda self: self.running)
    @rule(pick=PICK, count=st.integers(1, 2), again=st.booleans())
    def discard(self, pick: int, count: int, again: bool) -> None:
        """Discard the results of some requests; the step continues for the others."""
        at = pick % len(self.running)
        discarded = self.running[at : at + count]
        self.engine.discard(discarded)
        del self.running[at : at + count]
        if again:
            self.waiting += discarded
        self._refused(lambda: self.manager.discard(discarded))

    @precondition(lambda self: self.running)
    @rule()
    def free_all(self) -> None:
        self.engine.commit()
        for sequence in self.running:
            self.engine.free(sequence)
        self.running = []

    @rule()
    def reset(self) -> None:
        before = snapshot(self.manager)
        assert self.engine.reset() is not bool(self.running)
        if self.running:
            assert snapshot(self.manager) == before

    @rule(tokens=TOKENS)
    def probe(self, tokens: list[int]) -> None:
        self._look_up(TokenSequence("probe", tokens))

    @precondition(lambda self: self.seen)
    @rule(pick=PICK)
    def probe_another(self, pick: int) -> None:
        other = self.seen[-1 - pick % len(self.seen)]
        probe = [*other.token_ids, 0]
        copy = self._make("probe", probe, other.namespace, other.items)
        match = self._look_up(copy)
        if other in self.waiting:
            self.old_lookups.append(self._look_up(other))
        before = snapshot(self.manager)
        self.manager.explain(copy, across_salts=True)
        assert snapshot(self.manager) == before
        assert self.manager.explain(copy).position >= match.num_tokens - 1

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def misuse(self, pick: int) -> None:
        sequence = self.running[pick % len(self.running)]
        twin = TokenSequence(sequence.request_id, [0, 1])
        left = len(sequence.token_ids) - sequence.num_computed_tokens
        before = snapshot(self.manager)
        self._refused(lambda: self.manager.append_slots(sequence, left + 1))
        self._refused(lambda: self.manager.append_slots(sequence, 0))
        self._refused(lambda: self.manager.append_slots(sequence, -1))
        self._refused(lambda: self.manager.append_slots(twin, 1))
        self._refused(lambda: self.manager.allocate_slots(sequence, 1))
        self._refused(lambda: self.manager.allocate_slots(twin, 1))
        self._refused(lambda: self.manager.free(twin))
        assert snapshot(self.manager) == before

    def _look_up(self, sequence: TokenSequence) -> ComputedBlocks:
        before = snapshot(self.manager, sequence)
        match = self.manager.get_computed_blocks(sequence)
        assert snapshot(self.manager, sequence) == before
        self.engine.check_lookup(sequence, match)
        return match

    def _refused(self, call: Callable[[], object]) -> None:
        with pytest.raises(CacheError):
            call()

    # After every rule

    @invariant()
    def holds(self) -> None:
        self.manager.check()
        self.engine.observe()
        if self.manager.config.eviction != "lru":
            is_cached = [block.node is not None for block in self.manager.pool.free]
            assert is_cached == sorted(is_cached), "a cached block is reused before an empty one"
        if not self.manager.config.enable_prefix_caching:
            assert not any(block.node for block in self.manager.pool.blocks)

    @invariant()
    def stretches_have_every_cached_block_once(self) -> None:
        stretches = self.manager.path_segments()
        ids = sorted(block_id for one in stretches for block_id in one.ids)
        pool = self.manager.pool
        extra = {copy for copies in pool.copies.values() for copy in copies}
        cached = [b.block_id for b in pool.blocks if b.node is not None and b not in extra]
        assert ids == cached
        for at, one in enumerate(stretches):
            assert one.parent < at
            if one.parent >= 0:
                assert stretches[one.parent].start < one.start

    @invariant()
    def events_describe_the_cache(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.replayed.clear()
            elif isinstance(event, BlockStored):
                self.replayed[event.block_hash] += 1
            else:
                assert self.replayed[event.block_hash] > 0, "evicted, but never stored"
                self.replayed[event.block_hash] -= 1
        size = self.manager.block_size
        for sequence in self.running:
            ends = self.engine.contents.rows(sequence)[size - 1 :: size]
            if ends and ends[-1] not in self.named:
                names = block_names(sequence, size, "", self.digest, self.engine.contents.public)
                self.named |= zip(ends, names, strict=True)
        assert +self.replayed == Counter(self.named[end] for end in self.engine.full_blocks())


class OneBitCacheMachine(CacheMachine):
    """A machine with colliding names; every answer must still be right."""

    digest = staticmethod(digest_of_one_bit)


BUDGET = settings(max_examples=250, stateful_step_count=50)

TestCache = CacheMachine.TestCase
TestCache.settings = BUDGET
TestCacheWithNamesOfOneBit = OneBitCacheMachine.TestCase
TestCacheWithNamesOfOneBit.settings = settings(BUDGET, max_examples=150)
