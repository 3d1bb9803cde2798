"""What an engine does with a manager, in parts, and what must hold after any of it broke off."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from headstart.cache import (
    BlockNames,
    CacheConfig,
    KVCacheManager,
    Mark,
    PublicBlocks,
    TokenSequence,
)
from tests.cache.tiny_engine import TinyEngine

HEAD = list(range(100, 112))
PROMPTS = [
    HEAD,
    [*HEAD[:6], 1, 2, 3, 4, 5, 6],
    [*HEAD[:8], 7, 7, 7],
    [*HEAD[:4], 8, 8],
    [*HEAD[:4], 8, 9, 9, 9, 1],
    list(range(200, 218)),
    list(range(300, 316)),
]
CONFIGS = [
    {},
    {"events": True, "num_blocks": 16, "marks": True},
    {"deduplicate": False, "events": True},
    {"eviction": "lru", "partial_hits": False, "ghost_entries": 1},
    {"eviction": "fair-lru", "salts": ("a", "b/x"), "marks": True, "num_blocks": 15},
]
"""salts: those of the prompts in turn, whose first block is public then. marks: set some."""


def sequences(salts: Sequence[str | None]) -> list[TokenSequence]:
    """Each prompt with the next of the salts, the first once more, and one with a salt of its own.

    The first block of `HEAD` is public.
    """
    public = PublicBlocks()
    public.publish(HEAD[:4], 4)
    made = [
        TokenSequence(f"{at}", tokens, salt=salts[at % len(salts)], public=public)
        for at, tokens in enumerate([*PROMPTS, PROMPTS[0]])
    ]
    return [*made, TokenSequence("salted", PROMPTS[6], salt="s", adapter="l")]


def still() -> float:
    """A clock: with one that goes, another run might execute other lines."""
    return 0.0


class Scenario:
    """Shared prefixes, hits within a step, copies, partial blocks, eviction, failure, discard."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {"num_blocks": 12, "block_size": 4} | options
        self.salts: tuple[str | None, ...] = options.pop("salts", (None,))
        marks = options.pop("marks", False)
        config = CacheConfig(**options)
        self.engine = TinyEngine(KVCacheManager(config, BlockNames(4), still))
        *self.sequences, self.twin, self.salted = sequences(self.salts)
        self.all = [*self.sequences, self.twin, self.salted]
        for sequence in self.all[::2] if marks else ():
            sequence.marks = [Mark(8, 600.0)]

    def verify(self) -> None:
        """Nothing is lost or wrong, and each sequence counts once if it was admitted."""
        manager = self.engine.manager
        self.engine.verify(probes(self.salts))
        for sequence in self.all:
            is_running = any(sequence is one for one in manager.sequences)
            assert manager.is_known(sequence) == bool(sequence.blocks) == is_running
        assert manager.stats.requests == sum(one.step >= 0 for one in self.all), "counted wrong"

    def share(self) -> None:
        a, b, c, *_ = self.sequences
        self.engine.admit(a)
        self.engine.admit(b)  # hits what the step fills
        self.engine.commit()
        self.engine.append(a, 1, 2, 3)
        self.engine.admit(c)  # a copy
        self.engine.commit()

    def compute_twice(self) -> None:
        _, b, _, d, *_ = self.sequences
        self.engine.manager.shares.set("a", 1.0)  # whose blocks are nobody's until now
        self.engine.admit(self.twin, reads=False)
        self.engine.commit()
        self.engine.manager.free(b)
        self.engine.manager.free(self.twin)
        self.engine.admit(d)
        self.engine.commit()

    def outgrow(self) -> None:
        a, _, _, d, e, *_ = self.sequences
        self.engine.append(a, 4, 5)
        self.engine.manager.free(d)  # leaves a partial block
        self.engine.commit()
        self.engine.admit(e, 2)  # outgrows it
        self.engine.commit()

    def discard(self) -> None:
        a, _, c, _, e, *_ = self.sequences
        self.engine.append(e, count=1)
        self.engine.append(a, 6, 6, 6, 6)
        self.engine.may_forget = True
        self.engine.manager.discard([a])
        self.engine.commit()
        self.engine.may_forget = False
        self.engine.manager.free(c)
        self.engine.replay()

    def evict(self) -> None:
        *_, e, f, _ = self.sequences
        self.engine.admit(self.salted, 5)
        self.engine.commit()
        self.engine.manager.free(self.salted)
        self.engine.admit(f)  # evicts
        self.engine.commit()
        self.engine.manager.free(f)
        self.engine.manager.free(e)

    def fail(self) -> None:
        g = self.sequences[-1]
        self.engine.admit(g)
        self.engine.scribble()
        self.engine.manager.fail_step()
        self.engine.end_step()
        self.engine.admit(g)
        self.engine.commit()
        self.engine.manager.free(g)

    def reset(self) -> None:
        self.engine.may_forget = True
        assert self.engine.manager.reset_prefix_cache()
        self.engine.end_step()
        self.engine.may_forget = False

    PARTS = (share, compute_twice, outgrow, discard, evict, fail, reset)


@cache
def probes(salts: tuple[str | None, ...]) -> list[TokenSequence]:
    """What would hit all that is cached, and goes on. A lookup changes its keys alone."""
    made = [one for one in sequences(salts) if one.token_ids != HEAD or one.request_id == "0"]
    for sequence in made:
        for token in range(5):
            sequence.append(token)
    return made


def goes_on(scenario: Scenario) -> None:
    """After all of it the manager works like any other."""
    engine = scenario.engine
    for sequence in engine.manager.sequences:
        engine.manager.free(sequence)
    engine.end_step()
    sequence = TokenSequence("after", [*PROMPTS[1], 5, 5])
    engine.admit(sequence)
    engine.commit()
    engine.append(sequence, 1, 2, 3)
    engine.commit()
    engine.manager.free(sequence)
    engine.verify(probes(scenario.salts))
