"""Random operations on disk stores of one folder, compared with a naive model after each one.

Two models, two stores of one of them, a budget for all. The naive model is a dict of the saved
blocks and the times of their use. No bytes are wrong, whatever `find` promises is loaded, the slots
have no gaps, the files are as long as their slots and within the budget, and blocks are evicted
only by need: an evicted block was removed, or is the end of a prefix whose space others needed.
"""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headstart.cache import BlockHash
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX, DiskIndex, slot_files, slot_path
from headstart.tiers.store import ModelRecord
from tests.tiers.stores import MODEL, block, name, payload

OTHER = ModelRecord("other weights", "another model", 16, 700)
SLOTS = {MODEL: 2560, OTHER: 1024}  # bytes that a block takes
LENGTH = 6  # blocks of a prompt
PROMPTS = st.integers(0, 3)  # of each model; two of them share their first blocks
STORES = st.sampled_from([0, 1, 2])  # the first two are of one model


class StoreMachine(RuleBasedStateMachine):
    """Three stores in a folder."""

    @initialize(budget=st.sampled_from([0, 2000, 3 * 2560, 7 * 2560, 40 * 2560]))
    def start(self, budget: int) -> None:
        self.temporary = TemporaryDirectory(prefix="headstart-machine-")
        self.folder = Path(self.temporary.name)
        self.budget = budget
        self.stores: list[DiskStore] = [self.open(at) for at in range(3)]
        self.used_at: dict[int, float] = {}  # when each block was used
        self.clock = 1.0

    def open(self, at: int) -> DiskStore:
        return DiskStore(self.folder, OTHER if at == 2 else MODEL, self.budget)

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            for store in self.stores:
                store.close()
            self.temporary.cleanup()

    def numbers(self, at: int, prompt: int, first: int, count: int) -> list[int]:
        start = (5000 if at == 2 else 0) + 100 * prompt
        return list(range(start, start + LENGTH))[first : first + count]

    def present(self) -> dict[ModelRecord, dict[BlockHash, int]]:
        """Return the blocks that the index lists."""
        with closing(DiskIndex(self.folder / INDEX)) as index:
            return {
                model.record: {one.name: one.slot for one in index.list_blocks(model.id)}
                for model in index.models()
            }

    def listed(self) -> set[int]:
        names = {block_name for blocks in self.present().values() for block_name in blocks}
        return {number for number in self.used_at if name(number) in names}

    @rule(at=STORES, prompt=PROMPTS, first=st.integers(0, LENGTH), count=st.integers(1, LENGTH))
    def save(self, at: int, prompt: int, first: int, count: int) -> None:
        self.clock += 1.0
        numbers = self.numbers(at, prompt, first, count)
        model = OTHER if at == 2 else MODEL
        before = self.listed()
        saved = self.stores[at].save([block(n, self.clock, model) for n in numbers])
        self.used_at |= {n: self.clock for n in numbers if n not in before}
        after = self.listed()
        new = [n for n in numbers if n not in before]
        assert after - before <= set(new) and len(after - before) <= saved
        lost = next((n for n in numbers if n not in after), 1 << 30)
        assert max(after - before, default=-1) < lost, "no block is saved without those before it"
        removed = before - after
        room = self.budget - sum(SLOTS[OTHER if n >= 5000 else MODEL] for n in after)
        if saved < len(new):  # all remaining blocks were used as late, or are too large
            assert room < SLOTS[model]
        if removed:
            assert room < max(SLOTS.values()) + SLOTS[model], "no more than needed"
        self.check_ends_were_evicted_first(before, removed)
        for n in removed:
            del self.used_at[n]
        self.used_at = {n: used for n, used in self.used_at.items() if n in after}

    def check_ends_were_evicted_first(self, before: set[int], removed: set[int]) -> None:
        for number in removed:
            if (number + 1) % 100 and number + 1 in before:
                assert number + 1 in removed, "a prefix is evicted from its end"

    @rule(at=STORES, prompt=PROMPTS, first=st.integers(0, LENGTH))
    def load(self, at: int, prompt: int, first: int) -> None:
        numbers = self.numbers(at, prompt, first, LENGTH)
        names = [name(n) for n in numbers]
        expected = next((i for i, n in enumerate(numbers) if n not in self.used_at), len(numbers))
        assert self.stores[at].find(names) == expected
        loaded = [bytes(block.payload) for block in self.stores[at].load(names)]
        nbytes = (OTHER if at == 2 else MODEL).block_bytes
        assert loaded == [payload(n, nbytes) for n in numbers[:expected]]

    @rule(at=STORES, prompt=PROMPTS, count=st.integers(0, LENGTH))
    def touch(self, at: int, prompt: int, count: int) -> None:
        before = self.listed()
        self.stores[at].touch([name(n) for n in self.numbers(at, prompt, 0, count)])
        assert self.listed() == before

    @rule(at=STORES, prompt=PROMPTS, first=st.integers(0, LENGTH), count=st.integers(1, 3))
    def remove(self, at: int, prompt: int, first: int, count: int) -> None:
        numbers = [n for n in self.numbers(at, prompt, first, count) if n in self.used_at]
        names = [name(n) for n in self.numbers(at, prompt, first, count)]
        assert self.stores[at].remove(names) == len(numbers)
        for n in numbers:
            del self.used_at[n]
        assert self.listed() == set(self.used_at)

    @rule(at=STORES)
    def reopen(self, at: int) -> None:
        self.stores[at].close()
        self.stores[at] = self.open(at)
        assert self.listed() == set(self.used_at)

    @rule()
    def lose_the_index(self) -> None:
        """Remove the index; the order of use is lost with it, but no block."""
        (self.folder / INDEX).unlink()
        self.stores[0].find([])
        assert self.listed() == set(self.used_at)

    @invariant()
    def slots_have_no_gaps_and_fit(self) -> None:
        if not hasattr(self, "temporary"):
            return
        total = 0
        present = self.present()
        assert slot_files(self.folder) <= {slot_path(self.folder, model) for model in present}
        for model, blocks in present.items():
            assert blocks, "a model that has no blocks is forgotten with the last"
            assert sorted(blocks.values()) == list(range(len(blocks)))
            path = slot_path(self.folder, model)
            size = path.stat().st_size if path.exists() else 0
            assert -(-size // SLOTS[model]) == len(blocks)
            total += size
        assert total <= self.budget
        for store in self.stores:
            assert not store.faults.counts


def test_a_block_used_since_stays_although_its_prefix_does_not_fit() -> None:
    """Blocks 0 and 1 fit.

    The space of block 2 is taken by its successor, which was touched after the request arrived.
    """
    machine = StoreMachine()
    machine.start(budget=3 * 2560)
    machine.save(at=0, prompt=0, first=3, count=1)
    machine.touch(at=0, prompt=0, count=4)
    machine.save(at=0, prompt=0, first=0, count=4)
    assert machine.listed() == {0, 1, 3}
    machine.slots_have_no_gaps_and_fit()
    machine.teardown()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
