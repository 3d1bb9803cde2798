"""The engine's own time per step: a model that costs nothing, so that only the rest is left.

    python bench/engine.py [--repeats 5]

1 to 128 greedy requests of 512 tokens decode together over a vocabulary of 32,000. A step is
scheduling, cache, batch assembly, the choice of the likeliest token, and outputs; without a
tokenizer, so no text. What limits it is the interpreter. Mean microseconds of CPU over 64
steps, in which every request fills four blocks; the least of the repeats. The limit is 150 us,
and 5 us for each running request. Ends in one JSON line.
"""

import argparse
import json
import random
import time
from typing import cast

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from headstart.attention import LayerLayout, PagedKVMemory
from headstart.cache import CacheConfig, KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.engine import Engine, Parts
from headstart.models.decoder import DecoderModel, EmbeddingOverlay

PROMPT, VOCABULARY, STEPS, BLOCKS = 512, 32_000, 64, 8192
COUNTS = (1, 8, 32, 128)
FIXED, PER_REQUEST = 150, 5  # microseconds
MICRO = 1e6


class FreeModel:
    """Answers every step at once with logits that were made before."""

    vocab_size = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()
    device = torch.device("cpu")
    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._logits = torch.randn(max(COUNTS), VOCABULARY)

    def attach(self, backend: object) -> None:
        """It attends to nothing."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> torch.Tensor:
        """The same logits again, as many rows as are asked for."""
        return self._logits[: len(logit_rows)]


def make_engine() -> Engine:
    """An engine around the model that costs nothing, with K/V of one number a token."""
    memory = PagedKVMemory([LayerLayout(1, 1, 1)], BLOCKS, 16, FreeModel.dtype, FreeModel.device)
    manager = KVCacheManager(CacheConfig(num_blocks=BLOCKS))
    model = cast(DecoderModel, FreeModel())
    return Engine(Parts(model, None, memory, manager, BLOCKS * 16), EngineConfig())


def time_steps(engine: Engine, count: int, rng: random.Random) -> float:
    """Mean seconds of a step in which `count` requests decode."""
    params = headstart.SamplingParams(temperature=0, max_tokens=STEPS * 2, ignore_eos=True)
    for _ in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
        engine.submit(engine.prepare(prompt, params))
    while len(engine.step()) < count:
        pass
    start = time.process_time()
    for _ in range(STEPS):
        engine.step()
    spent = time.process_time() - start
    while engine.has_unfinished:
        engine.step()
    return spent / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    engine, rng = make_engine(), random.Random(0)
    figures = {}
    table = Table("running requests", "us a step", "limit", "of limit")
    for count in COUNTS:
        least = min(time_steps(engine, count, rng) for _ in range(repeats)) * MICRO
        limit = FIXED + PER_REQUEST * count
        table.add_row(str(count), f"{least:.0f}", str(limit), f"{least / limit:.2f}")
        figures[f"step_{count}_us"] = round(least, 1)
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
