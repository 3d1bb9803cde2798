"""Small workloads that distinguish eviction orders; each returns the token hit rate."""

import random

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence


class Workload:
    """Requests run one after another on a pool of blocks of four tokens."""

    def __init__(self, num_blocks: int, **options: object) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=4, **options)  # type: ignore[arg-type]
        self.manager = KVCacheManager(config)
        self.random = random.Random(5)
        self.hit = self.total = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(10**6) for _ in range(count)]

    def run(self, tokens: list[int], num_output: int = 0, *, counts: bool = True) -> list[int]:
        """Run one request; return its tokens, output included."""
        manager, sequence = self.manager, TokenSequence("one", tokens)
        match = manager.get_computed_blocks(sequence)
        if counts:
            self.hit += match.num_tokens
            self.total += len(tokens)
        assert manager.allocate_slots(sequence, len(tokens) - match.num_tokens, match) is not None
        manager.commit_step()
        for token in self.tokens(num_output):
            sequence.append(token)
            assert manager.append_slots(sequence)
            manager.commit_step()
        manager.free(sequence)
        return sequence.token_ids

    @property
    def hit_rate(self) -> float:
        return self.hit / self.total


def documents(num_short: int, **options: object) -> float:
    """Run Zipf-distributed documents of 32 blocks; `num_short` one-shot requests follow each."""
    work = Workload(200, **options)
    texts = [work.tokens(128) for _ in range(12)]
    weights = [1 / (at + 1) for at in range(12)]
    for _ in range(250):
        [text] = work.random.choices(texts, weights)
        work.run([*text, *work.tokens(5)], 3)
        for _ in range(num_short):
            work.run(work.tokens(1), counts=False)
    return work.hit_rate


def chats(num_blocks: int, **options: object) -> float:
    """Run sixteen interleaved chats, which start again when they are long."""
    work = Workload(num_blocks, **options)
    texts = [work.tokens(15) for _ in range(16)]
    for _ in range(600):
        at = work.random.randrange(16)
        if len(texts[at]) > 150:
            texts[at] = work.tokens(15)
        texts[at] = work.run([*texts[at], *work.tokens(6)], 5)
    return work.hit_rate
