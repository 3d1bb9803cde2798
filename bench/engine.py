"""The engine's own time per step: a model that costs nothing, so that only the rest is left.

    python bench/engine.py [--repeats 5]

1 to 128 greedy requests of 512 tokens decode together over a vocabulary of 32,000. A step is
scheduling, cache, batch assembly, and outputs; without a tokenizer, so no text. What limits it is
the interpreter. Mean microseconds of CPU over 64 steps, in which every request fills four blocks;
the least of the repeats. The limit is 150 us, and 5 us for each running request.

A model in bfloat16 on compiled kernels gives greedy requests their likeliest tokens. Others give
logits, of which the engine then takes the largest: the second figure, which memory limits where
requests are many. Ends in one JSON line.
"""

import argparse
import json
import random
import time

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, model_folder

from headstart.engine.engine import Engine
from headstart.engine.startup.loading import load_engine
from headstart.models.greedy_head import greedy_tokens

SHAPE, PROMPT, STEPS, BLOCKS = "small-llama", 512, 64, 8192
COUNTS = (1, 8, 32, 128)
FIXED, PER_REQUEST = 150, 5  # microseconds
MICRO = 1e6


def make_engine(*, logits: bool) -> Engine:
    """An engine whose model answers every step at once, with what was made before."""
    engine = load_engine(model_folder(SHAPE), num_threads=1, num_blocks=BLOCKS)
    rows = torch.randn(max(COUNTS), SHAPES[SHAPE].vocab_size)
    tokens = greedy_tokens(rows)

    def forward(
        token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, *more: object
    ) -> torch.Tensor:
        return rows[: len(logit_rows)]

    def choose(
        token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, *more: object
    ) -> list[int]:
        return (
            greedy_tokens(forward(token_ids, positions, logit_rows))
            if logits
            else tokens[: len(logit_rows)]
        )

    setattr(engine.model, "forward", forward)  # noqa: B010 (the model is not made for this)
    setattr(engine.model, "choose", choose)  # noqa: B010
    return engine


def time_steps(engine: Engine, count: int, rng: random.Random) -> float:
    """Mean seconds of a step in which `count` requests decode."""
    params = headstart.SamplingParams(temperature=0, max_tokens=STEPS * 2, ignore_eos=True)
    for _ in range(count):
        prompt = [rng.randrange(engine.model.vocab_size) for _ in range(PROMPT)]
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
    figures = {}
    table = Table("running requests", "us a step", "limit", "of limit", "where logits are given")
    columns = {
        kind: [
            min(time_steps(engine, count, random.Random(0)) for _ in range(repeats)) * MICRO
            for count in COUNTS
        ]
        for kind, engine in (
            ("tokens", make_engine(logits=False)),
            ("logits", make_engine(logits=True)),
        )
    }
    for count, least, with_logits in zip(COUNTS, *columns.values(), strict=True):
        limit = FIXED + PER_REQUEST * count
        share = f"{least / limit:.2f}"
        table.add_row(str(count), f"{least:.0f}", str(limit), share, f"{with_logits:.0f}")
        figures[f"step_{count}_us"] = round(least, 1)
        figures[f"step_{count}_logits_us"] = round(with_logits, 1)
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
