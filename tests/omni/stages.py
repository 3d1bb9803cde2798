"""A stage without a model: the real cache manager, and rows that identify their prefix."""

import random
from collections import defaultdict

import torch
from torch import Tensor

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence
from headstart.omni.output_cache import OutputCache
from headstart.omni.rows import ScheduledRows, StageRows
from headstart.omni.stage import Chunk, Output


def row(token_ids: list[int], width: int) -> Tensor:
    """Return the row of the last token, which differs for any two prefixes."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids)) % 2**62)
    return torch.randn(width, generator=generator)


class FakeStage:
    """A stage that runs one step at a time, as in the engine, and records all chunks."""

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        block_size: int = 4,
        cache: OutputCache | None = None,
        outputs: tuple[Output, ...] = (Output("hidden"), Output("mm_feature")),
        widths: tuple[tuple[str, int], ...] = (("hidden", 2), ("mm_feature", 16)),
    ) -> None:
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            partial_hits=False,
            enable_prefix_caching=cache is not None,
        )
        self.manager = KVCacheManager(config)
        self.rows = StageRows("thinker", block_size, outputs, cache, find_outputs=not outputs)
        self.cache = cache
        self.widths = dict(widths)
        self.chunks: dict[TokenSequence, list[Chunk]] = defaultdict(list)
        self.admitted: list[ScheduledRows] = []
        self.computed_tokens = 0
        self.spoiled: tuple[str, int] | None = None  # an output, and a position where it is NaN

    def open(self, sequence: TokenSequence) -> None:
        self.rows.open(sequence)

    def admit(self, sequence: TokenSequence, count: int | None = None) -> int | None:
        """Admit a sequence with `count` tokens after its hit; return the hit or None."""
        match = self.manager.get_computed_blocks(sequence)
        if match.writer is not None:
            return None
        match = match.cut(self.rows.usable(sequence, match), self.manager.block_size)
        left = len(sequence.token_ids) - match.num_tokens
        count = left if count is None else min(count, left)
        allocation = self.manager.allocate_slots(sequence, count, match)
        if allocation is None:
            return None
        self.missed = allocation.missed
        self.rows.admitted(sequence, match.num_tokens)
        self.admitted.append(ScheduledRows(sequence, match.num_tokens, match.num_tokens + count))
        return match.num_tokens

    def advance(self, sequence: TokenSequence, count: int) -> bool:
        """Schedule the next tokens of a running sequence; return False without blocks."""
        start = sequence.num_computed_tokens
        if not self.manager.append_slots(sequence, count):
            return False
        self.admitted.append(ScheduledRows(sequence, start, start + count))
        return True

    def step(self) -> None:
        """Compute the admitted tokens, and check all chunks so far."""
        if self.admitted:
            self.compute()
            self.check()

    def compute(self) -> dict[TokenSequence, list[Chunk]]:
        """Compute the admitted tokens, and return the chunks of the step."""
        parts, self.admitted = self.admitted, []
        outputs = {
            name: torch.stack(
                [
                    row(part.sequence.token_ids[: position + 1], width)
                    for part in parts
                    for position in range(part.start, part.stop)
                ]
            )
            for name, width in self.widths.items()
        }
        positions = [position for part in parts for position in range(part.start, part.stop)]
        if self.spoiled is not None:
            name, spoiled = self.spoiled
            outputs[name][[position == spoiled for position in positions], -1] = torch.nan
        self.computed_tokens += sum(part.stop - part.start for part in parts)
        chunks: dict[TokenSequence, list[Chunk]] = defaultdict(list)
        for sequence, chunk in self.rows.computed(parts, outputs):
            chunks[sequence].append(chunk)
            self.chunks[sequence].append(chunk)
        self.manager.commit_step()
        return chunks

    def run(self, sequence: TokenSequence) -> int:
        """Run a request whose prompt is one step, and return its hit."""
        self.open(sequence)
        hit = self.admit(sequence)
        assert hit is not None
        self.step()
        self.manager.free(sequence)
        self.rows.close(sequence)
        return hit

    def preempt(self, sequence: TokenSequence) -> None:
        self.manager.free(sequence)

    def check(self) -> None:
        """Check that all rows passed on are correct, in order and not repeated."""
        self.manager.check()
        if self.cache is not None:
            self.cache.check()
        for sequence, chunks in self.chunks.items():
            for name, width in self.widths.items():
                mine = [chunk for chunk in chunks if chunk.output == name]
                position = 0
                for chunk in mine:
                    assert chunk.start == position, (
                        f"{name}: tokens {position} to {chunk.start} are missing"
                    )
                    position = chunk.stop
                    for offset, actual in enumerate(chunk.rows):
                        prefix = sequence.token_ids[: chunk.start + offset + 1]
                        assert torch.equal(actual, row(prefix, width))


def random_run(stage: FakeStage, seed: int, steps: int) -> dict[str, int]:
    """Run requests with shared prefixes that are chunked, preempted and aborted at random."""
    chance = random.Random(seed)
    running: list[TokenSequence] = []
    waiting: list[TokenSequence] = []
    names = iter(range(1_000_000))
    counts = {"hits": 0, "preemptions": 0}
    for _ in range(steps):
        if len(running) + len(waiting) < 4 and chance.random() < 0.6:
            prompt = [7] * chance.choice([3, 8, 12]) + [chance.randrange(3)] * chance.randrange(
                1, 9
            )
            waiting.append(TokenSequence(f"r{next(names)}", prompt))
            stage.open(waiting[-1])
        for sequence in list(running):
            left = len(sequence.token_ids) - sequence.num_computed_tokens
            if not left:
                sequence.append(chance.randrange(2))
                left = 1
            if chance.random() < 0.7 and not stage.advance(sequence, chance.randint(1, left)):
                stage.preempt(sequence)
                running.remove(sequence)
                waiting.append(sequence)
                counts["preemptions"] += 1
        for sequence in list(waiting):
            hit = stage.admit(sequence, chance.randint(1, 12))
            if hit is not None:
                counts["hits"] += hit > 0
                waiting.remove(sequence)
                running.append(sequence)
        stage.step()
        for sequence in list(running):
            fate = chance.random()
            if fate < 0.1:
                stage.preempt(sequence)
                waiting.append(sequence)
                counts["preemptions"] += 1
            elif fate < 0.2 or len(sequence.token_ids) > 28:
                stage.manager.free(sequence)
                stage.rows.close(sequence)
            else:
                continue
            running.remove(sequence)
    return counts
