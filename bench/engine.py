"""The engine's own time per step, measured with a model that takes no time.

    python bench/engine.py [--repeats 5]

1 to 128 greedy requests of 512 tokens decode together, with a vocabulary of 32,000. A step consists
of scheduling, cache, batch assembly and outputs. There is no tokenizer and no text. Limiting
resource: the interpreter. The figure is the mean CPU time of 64 steps, in which every request fills
four blocks. The lowest mean of all repeats counts. The limit is 150 us plus 5 us per running
request.

The first figure is for models that return greedy tokens (bfloat16 on compiled kernels). The second
is for models that return logits, whose maximum the engine computes. With many requests, memory
limits it.

Then steps of 32 requests without a JSON schema alternate with steps of 32 requests of which half
have one: with the model that takes no time, and with small-llama (ten million weights). With
small-llama, the limit is 1.25 times the step without schemas. Figures are medians. Ends in one JSON
line.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, make_tokenizer, model_folder

from headstart import StructuredOutputsParams
from headstart.engine.config import make_config
from headstart.engine.engine import EngineCore
from headstart.frontend.frontend import Frontend, make_frontend
from headstart.models.loader import load_model
from headstart.weights.greedy_head import greedy_tokens, mask_logits

SHAPE, PROMPT, STEPS, BLOCKS = "small-llama", 512, 64, 8192
COUNTS = (1, 8, 32, 128)
MIXED, MIXED_LIMIT = 32, 1.25
FIXED, PER_REQUEST = 150, 5  # microseconds
MICRO = 1e6
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["a", "b", "c"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


def make_engine(*, logits: bool, tokenizer: bool = False) -> tuple[EngineCore, Frontend]:
    """Return an engine whose model returns prepared logits or tokens at once.

    With a tokenizer each step gets a copy of the logits, since a schema changes them in place.
    """
    engine, frontend = load(tokenizer=tokenizer)
    rows = torch.randn(max(COUNTS), SHAPES[SHAPE].vocab_size)
    tokens = greedy_tokens(rows)

    def forward(
        token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, *more: object
    ) -> torch.Tensor:
        given = rows[: len(logit_rows)]
        return given.clone() if tokenizer else given

    def choose(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        embeddings: object = None,
        allowed: np.ndarray | None = None,
    ) -> list[int]:
        if not logits:
            return tokens[: len(logit_rows)]
        given = forward(token_ids, positions, logit_rows)
        if allowed is not None:
            mask_logits(given, allowed)
        return greedy_tokens(given)

    setattr(engine.model, "forward", forward)  # noqa: B010 (the model is not made for this)
    setattr(engine.model, "choose", choose)  # noqa: B010
    return engine, frontend


def load(*, tokenizer: bool) -> tuple[EngineCore, Frontend]:
    """Return an engine with one thread, and its frontend."""
    made = make_tokenizer(SHAPE) if tokenizer else None
    config = make_config({"num_threads": 1, "num_blocks": BLOCKS})
    engine = EngineCore(load_model(model_folder(SHAPE), "auto", "cpu"), made, config)
    return engine, make_frontend(engine, made)


def time_steps(
    engine: EngineCore, frontend: Frontend, count: int, rng: random.Random, *, bound: int = 0
) -> float:
    """Return the mean seconds of a step of `count` decoding requests, `bound` with a schema."""
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True) if bound else None
    for at in range(count):
        prompt = [rng.randrange(engine.model.vocab_size) for _ in range(PROMPT)]
        params = headstart.SamplingParams(
            temperature=0,
            max_tokens=STEPS * 2,
            ignore_eos=True,
            structured_outputs=form if at < bound else None,
        )
        engine.submit(frontend.prepare(prompt, params))
    while len(engine.step()) < count:
        pass
    start = time.process_time()
    for _ in range(STEPS):
        engine.step()
    spent = time.process_time() - start
    while engine.has_unfinished:
        engine.step()
    return spent / STEPS


def compare_bound(repeats: int) -> dict[str, float]:
    """Compare steps without schemas and steps with schemas for half of the requests."""
    figures: dict[str, float] = {}
    table = Table(
        f"{MIXED} requests", "no schema, us", f"{MIXED // 2} with one, us", "ratio", "limit"
    )
    for name, (engine, frontend), limit in (
        ("the engine alone", make_engine(logits=True, tokenizer=True), None),
        ("with the model's passes", load(tokenizer=True), MIXED_LIMIT),
    ):
        turns: dict[int, list[float]] = {0: [], MIXED // 2: []}
        for _ in range(repeats):
            for bound, times in turns.items():
                times.append(
                    time_steps(engine, frontend, MIXED, random.Random(0), bound=bound) * MICRO
                )
        without, half = map(statistics.median, turns.values())
        shown = "" if limit is None else str(limit)
        table.add_row(name, f"{without:.0f}", f"{half:.0f}", f"{half / without:.2f}", shown)
        key = "structured_engine" if limit is None else "structured_model"
        figures |= {f"{key}_us": round(half, 1), f"{key}_ratio": round(half / without, 3)}
    Console().print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    figures = {}
    table = Table("running requests", "us per step", "limit", "of limit", "us with logits")
    columns = {
        kind: [
            min(time_steps(engine, frontend, count, random.Random(0)) for _ in range(repeats))
            * MICRO
            for count in COUNTS
        ]
        for kind, (engine, frontend) in (
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
    figures |= compare_bound(repeats)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
