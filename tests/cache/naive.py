"""A naive model of prefix caching, without trees and digests: the content of every slot.

Content is numbered: a number stands for everything that a row of K/V depends on, that is the
namespace and every token and item from position 0 up to the row's own. Two rows with one number are
interchangeable, two with different numbers never are. Rows of blocks that lie wholly in a public
prefix have separate numbers, which do not depend on the salt; all others do.

The model stores for every block what its rows will hold once the step is over (`promised`), how
many of them others may use (`valid`), and what they really hold (`memory`), by running each step as
an engine does: all reads of all copies, then all writes, then each computed row into its slot if
the sequence is its block's writer, else nowhere.
"""

from collections.abc import Sequence

from headstart.cache import (
    Allocation,
    ComputedBlocks,
    KVCacheManager,
    RowCopy,
    TokenSequence,
)
from tests.cache.naming import count_public
from tests.cache.watched_policy import watch_policy

GARBAGE = -1
Row = int | None


class Contents:
    """Numbers for prefixes; `kv` maps each to the number of the same rows for any owner."""

    def __init__(self, size: int, public: Sequence[Sequence[int]]) -> None:
        self.size = size
        self.public = [list(prefix) for prefix in public]
        self.kv: dict[Row, int] = {GARBAGE: GARBAGE}
        self._numbers: dict[object, int] = {}
        self._known: dict[int, tuple[TokenSequence, list[int]]] = {}  # by id, kept alive

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def rows(self, sequence: TokenSequence) -> list[int]:
        """Return the number of each of the sequence's rows."""
        _, known = self._known.get(id(sequence), (None, []))
        if len(known) == len(sequence.token_ids):
            return known
        end = count_public(sequence, self.public, self.size) * self.size
        adapter, salt = sequence.namespace
        shared = self._rows(sequence, ("public", adapter))
        rows = shared[:end] + self._rows(sequence, ("private", adapter, salt))[end:]
        self.kv |= zip(rows, self._rows(sequence, ("kv", adapter)), strict=True)
        self._known[id(sequence)] = (sequence, rows)
        return rows

    def private_rows(self, sequence: TokenSequence) -> list[int]:
        """Return the rows as if no prefix were public."""
        rows = self._rows(sequence, ("private", *sequence.namespace))
        self.kv |= zip(rows, self._rows(sequence, ("kv", sequence.namespace[0])), strict=True)
        return rows

    def _rows(self, sequence: TokenSequence, root: object) -> list[int]:
        items = {
            position: (item.digest, position - item.offset, item.length)
            for item in sequence.items
            for position in range(item.offset, item.offset + item.length)
        }
        number = self._number(root)
        rows = []
        for position, token in enumerate(sequence.token_ids):
            number = self._number((number, token, items.get(position)))
            rows.append(number)
        return rows


class NaiveEngine:
    """Drive a manager, and track the content of every slot without querying it."""

    def __init__(self, manager: KVCacheManager, public: Sequence[Sequence[int]] = ()) -> None:
        self.manager = manager
        self._policy = watch_policy(manager)
        self.config = manager.config
        self.size = manager.block_size
        self.contents = Contents(self.size, public)
        blocks = manager.pool.blocks
        self.memory: list[list[Row]] = [[GARBAGE] * self.size for _ in blocks]
        self.promised: list[list[Row]] = [[None] * self.size for _ in blocks]
        self.valid = [0] * len(blocks)
        self.filled: set[int] = set()  # blocks that the step under way fills
        self.copies: list[RowCopy] = []
        self.chunks: list[tuple[TokenSequence, int, int]] = []
        self.written: list[tuple[TokenSequence, int, int]] = []  # of the chunks, those that ran
        self.reused: dict[int, int] = {}  # blocks that a sequence hit, by its id
        self.announced: dict[int, TokenSequence] = {}

    @property
    def taken(self) -> list[int]:
        """Return the blocks that the last allocation took."""
        return self._policy.taken

    # Expected results of lookups

    def full_blocks(self) -> dict[int, int]:
        """Return the number of each full prefix that is cached, and a block that holds it."""
        return {
            self.promised[at][-1]: at for at, rows in enumerate(self.valid) if rows == self.size
        }  # type: ignore[misc]

    def expect_run(self, rows: list[int]) -> int:
        """Count the cached full blocks from the first on."""
        cached = self.full_blocks()
        depth = 0
        while (depth + 1) * self.size <= len(rows) and rows[(depth + 1) * self.size - 1] in cached:
            depth += 1
        return depth

    def expect_head(self, rows: list[int], depth: int) -> int:
        """Return the number of rows after the run that some written block has."""
        wanted = rows[depth * self.size :][: self.size]
        best = 0
        for at, valid in enumerate(self.valid):
            if at not in self.filled:
                head = 0
                while head < min(valid, len(wanted)) and self.promised[at][head] == wanted[head]:
                    head += 1
                best = max(best, head)
        return max(0, min(best, len(rows) - 1 - depth * self.size))

    def check_lookup(self, sequence: TokenSequence, match: ComputedBlocks) -> None:
        """Check that the lookup returned all cached rows, and nothing else."""
        if not self.config.enable_prefix_caching:
            assert (match.blocks, match.num_tokens, match.partial) == ([], 0, None)
            return
        rows = self.contents.rows(sequence)
        depth = self.expect_run(rows)
        assert len(match.blocks) == depth
        for at, block in enumerate(match.blocks):
            want = rows[at * self.size : (at + 1) * self.size]
            assert self.promised[block.block_id] == want, "a false hit"
        head = self.expect_head(rows, depth) if self.config.partial_hits else 0
        assert match.num_tokens == min(depth * self.size, len(rows) - 1) + head
        assert (match.partial is not None) == (head > 0)
        if match.partial is not None:
            assert match.partial.num_rows == head
            copied = self.promised[match.partial.block.block_id][:head]
            assert copied == rows[depth * self.size :][:head], "a false partial hit"
        end = (depth + 1) * self.size
        writer = self.announced.get(rows[end - 1]) if end <= len(rows) else None
        assert match.writer == (writer.request_id if writer is not None else None)

    # Operations, each with its expected effect

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.manager.pool.free]

    def admit(
        self, sequence: TokenSequence, num_new: int, match: ComputedBlocks | None
    ) -> Allocation | None:
        """Allocate; check that it is all or nothing, from the head of the free queue."""
        hits = [block.block_id for block in match.blocks] if match is not None else []
        partial = match.partial if match is not None else None
        start = match.num_tokens if match is not None else 0
        count = -(-(start + num_new) // self.size) - len(hits)
        free = [at for at in self.free_ids() if at not in hits]
        source: list[Row] = []
        if partial is not None:
            source_id = partial.block.block_id
            source = self.promised[source_id][: partial.num_rows]
            if source_id in free:  # it is used, so it is taken last
                free = [at for at in free if at != source_id] + [source_id]
        allocation = self.manager.allocate_slots(sequence, num_new, match)
        assert (allocation is None) == (count > len(free)), "short of blocks, or not"
        if allocation is None:
            return None
        taken = self.taken[:count] if count else []
        # The limit of partial blocks has changed, or the eviction order depends on the owner.
        depends = {"adaptive-lru": partial is not None, "fair-lru": True}
        if not depends.get(self.config.eviction):
            assert taken == free[:count]
        assert partial is None or len(free) == count or partial.block.block_id not in taken
        self._take(taken)
        self.reused[id(sequence)] = len(hits)
        own = hits + taken
        if allocation.copies:
            (copy,) = allocation.copies
            assert partial is not None
            assert copy[:3] == (partial.block.block_id, taken[0], partial.num_rows)
            self.copies.append(copy)
        if partial is not None:
            self.promised[taken[0]][: partial.num_rows] = source
        self._compute(sequence, own, len(hits) * self.size, start, start + num_new)
        if partial is not None and not allocation.copies:
            assert sequence.blocks[len(hits)].block_id != taken[0], "rows were not copied"
        return allocation

    def grow(self, sequence: TokenSequence, num_new: int) -> bool:
        """Append slots; check that it is all or nothing."""
        start = sequence.num_computed_tokens
        own = list(sequence.block_ids)
        count = -(-(start + num_new) // self.size) - len(own)
        free = self.free_ids()
        silent = start + num_new < len(own) * self.size
        grown = self.manager.append_slots(sequence, num_new)
        assert grown == (count <= len(free))
        if grown:
            taken = self.taken[:count] if count > 0 else []
            if self.config.eviction != "fair-lru":  # the eviction order depends on the owner
                assert taken == free[: max(count, 0)]
            self._take(taken)
            own += taken
            self._compute(sequence, own, 0, start, start + num_new, announces=not silent)
        return grown

    def _take(self, taken: list[int]) -> None:
        for at in taken:
            self.promised[at] = [None] * self.size
            self.valid[at] = 0

    def _compute(
        self,
        sequence: TokenSequence,
        own: list[int],
        first_own: int,
        start: int,
        end: int,
        *,
        announces: bool = True,
    ) -> None:
        """The step computes positions `start` to `end`; `own` is the table before any switch."""
        assert sequence.num_computed_tokens == end
        rows = self.contents.rows(sequence)
        is_stored = self.config.enable_prefix_caching and sequence.is_stored
        table = list(sequence.block_ids)
        assert len(table) == len(own)
        # Rows that were computed before their block turned out to be public are public now.
        first = max(start // self.size * self.size, first_own)
        for position in range(first, end):
            self.promised[own[position // self.size]][position % self.size] = rows[position]
        for at in range(start // self.size, len(own)):
            want = rows[at * self.size : min(end, (at + 1) * self.size)]
            block = table[at]
            assert self.promised[block][: len(want)] == want, "a switch to other content"
            if block != own[at]:
                assert self.config.deduplicate
                self.promised[own[at]] = [None] * self.size
            elif is_stored and (at + 1) * self.size <= end and at * self.size >= first_own:
                self.valid[block] = self.size
                self.filled.add(block)
        self.chunks.append((sequence, start, end))
        if announces and is_stored:
            self._withdraw(sequence)
            next_end = (end // self.size + 1) * self.size
            if next_end <= len(rows):
                self.announced.setdefault(rows[next_end - 1], sequence)

    def _withdraw(self, sequence: TokenSequence) -> None:
        self.announced = {n: s for n, s in self.announced.items() if s is not sequence}

    def commit(self) -> None:
        """Run the step as an engine does, then commit it."""
        self._run()
        self.check_memory()
        self.manager.commit_step()
        self._end_step()

    def _run(self) -> None:
        read = [(c, self.memory[c.source_block][: c.num_rows]) for c in self.copies]
        targets = [c.target_block for c in self.copies]
        assert len(targets) == len(set(targets)), "two copies to one block"
        for copy, content in read:
            self.memory[copy.target_block][: copy.num_rows] = content
        for sequence, start, end in self.chunks:
            rows = self.contents.rows(sequence)
            for position, slot in enumerate(sequence.slots(start, end, self.size, -1), start):
                if slot >= 0:
                    content = self.contents.kv[rows[position]]
                    self.memory[slot // self.size][slot % self.size] = content
        self.written += self.chunks
        self.copies, self.chunks = [], []

    def discard(self, sequences: list[TokenSequence]) -> None:
        """End the step, but discard the results of these sequences."""
        self._run()
        computed = set()
        for sequence in sequences:
            table = sequence.block_ids
            computed |= {*table[self.reused[id(sequence)] :], *(self.filled & set(table))}
            self._withdraw(sequence)
        self.manager.discard(sequences)
        held = {at for sequence in self.manager.sequences for at in sequence.block_ids}
        for at in computed - held:
            self.valid[at] = 0
            self.filled.discard(at)
        self.written = [chunk for chunk in self.written if chunk[0] not in sequences]
        assert not any(sequence.blocks for sequence in sequences)
        self.observe()

    def check_memory(self) -> None:
        """Check that each running sequence reads its own rows, and that reusable rows are right."""
        for sequence in self.manager.sequences:
            rows = self.contents.rows(sequence)
            for position in range(sequence.num_computed_tokens):
                block = sequence.blocks[position // self.size].block_id
                held = self.memory[block][position % self.size]
                want = self.contents.kv[rows[position]]
                assert held == want, f"{sequence.request_id} reads another's row"
        for at, valid in enumerate(self.valid):
            promised = [self.contents.kv[row] for row in self.promised[at][:valid]]
            assert self.memory[at][:valid] == promised, f"block {at}"

    def fail(self) -> list[TokenSequence]:
        """Fail the step after it has written garbage to all of its slots."""
        for copy in self.copies:
            self.memory[copy.target_block] = [GARBAGE] * self.size
        self.chunks += self.written
        for sequence, start, end in self.chunks:
            for slot in sequence.slots(start, end, self.size, -1):
                if slot >= 0:
                    self.memory[slot // self.size][slot % self.size] = GARBAGE
        for at in self.filled:
            self.valid[at] = 0
        failed = self.manager.fail_step()
        assert {s.request_id for s in failed} == {s.request_id for s, _, _ in self.chunks}
        for sequence in failed:
            assert sequence.blocks == []
            self._withdraw(sequence)
        self._end_step()
        self.observe()
        self.check_memory()
        return failed

    def _end_step(self) -> None:
        self.chunks.clear()
        self.written.clear()
        self.copies.clear()
        self.filled.clear()

    def is_in_step(self, sequence: TokenSequence) -> bool:
        return any(sequence is other for other, _, _ in (*self.chunks, *self.written))

    def free(self, sequence: TokenSequence) -> None:
        """Free a sequence; the rows in its last block become usable."""
        end = sequence.num_computed_tokens
        rest, last = end % self.size, sequence.block_ids[-1]
        before, table = self.free_ids(), list(sequence.block_ids)
        version = self.manager.pool.version
        self.manager.free(sequence)
        keeps_rest = self.config.partial_hits and self.config.enable_prefix_caching
        if rest and keeps_rest and sequence.is_stored:
            self.valid[last] = rest
            self.promised[last][:rest] = self.contents.private_rows(sequence)[end - rest : end]
        self._withdraw(sequence)
        if self.config.eviction == "lru" and self.manager.pool.version == version:
            unheld = [at for at in table[::-1] if not self.manager.pool.blocks[at].ref_cnt]
            assert self.free_ids() == before + unheld
        self.observe()

    def reset(self) -> bool:
        done = self.manager.reset_prefix_cache()
        if done:
            self._policy = watch_policy(self.manager)
            self.valid = [0] * len(self.valid)
        return done

    def observe(self) -> None:
        """Check that dropped rows are cached elsewhere, and that cached rows exist."""
        for block in self.manager.pool.blocks:
            at, valid = block.block_id, self.valid[block.block_id]
            if block.node is not None:
                assert valid > 0, f"{block} is cached, but its rows are not in memory"
            elif valid:
                assert self._has_twin(at, valid), f"{block} was dropped for nothing"
                self.valid[at] = 0

    def _has_twin(self, at: int, valid: int) -> bool:
        rows = self.promised[at][:valid]
        return any(
            other != at and block.node is not None and self.promised[other][:valid] == rows
            for other, block in enumerate(self.manager.pool.blocks)
        )
