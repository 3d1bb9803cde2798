"""What a cached prefix saves: time to first token, cold and warm, side by side in one run.

    python bench/prefix.py [--shape demo|qwen2.5-0.5b] [--threads 2] [--rounds 5]

Each round asks a 40-token question about a fresh document of 3,000 tokens (cold), then another
about the same document (warm), 16 tokens out, greedy; token ids are random with a fixed seed, so
are the weights. Medians over the rounds, and the ratio warm : cold, which must be at most 1 : 8.
Cold is limited by the GEMMs of 3,040 tokens, warm by those of 40 and attention over 3,000 rows.
Ends in one JSON line.
"""

import argparse
import json
import os
import random
import statistics
from contextlib import closing

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, model_folder

PREFIX, QUESTION, ANSWER, LIMIT = 3000, 40, 16, 1 / 8


def ask(llm: headstart.LLM, document: list[int], rng: random.Random) -> headstart.RequestOutput:
    """One question about the document."""
    vocabulary = llm.engine.model.vocab_size
    question = [rng.randrange(3, vocabulary) for _ in range(QUESTION)]
    params = headstart.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    [output] = llm.generate(document + question, params, use_tqdm=False)
    return output


def measure(llm: headstart.LLM, rounds: int) -> dict[str, float]:
    """Median seconds to the first token, cold and warm, and for each token after it."""
    rng = random.Random(0)
    vocabulary = llm.engine.model.vocab_size
    cold, warm, later = [], [], []
    for at in range(rounds + 1):
        document = [rng.randrange(3, vocabulary) for _ in range(PREFIX)]
        outputs = [ask(llm, document, rng) for _ in range(2)]
        assert outputs[0].num_cached_tokens < 16 <= PREFIX <= outputs[1].num_cached_tokens
        if at:  # the first round warms the libraries up
            cold.append(outputs[0].metrics.time_to_first_token or 0.0)
            warm.append(outputs[1].metrics.time_to_first_token or 0.0)
            later.append(outputs[1].metrics.time_per_token or 0.0)
    return {
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "per_token_s": statistics.median(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    with console.status("making the model, measuring"):
        folder = model_folder(options.shape)
        with closing(headstart.LLM(folder, num_threads=options.threads, num_blocks=2048)) as llm:
            figures = measure(llm, options.rounds)
        threads = torch.get_num_threads()
    ratio = figures["warm_s"] / figures["cold_s"]
    table = Table(f"{options.shape}, {threads} threads", "")
    table.add_row(
        f"cold, {PREFIX + QUESTION} tokens to compute", f"{figures['cold_s'] * 1e3:.1f} ms"
    )
    table.add_row(f"warm, {QUESTION} tokens to compute", f"{figures['warm_s'] * 1e3:.1f} ms")
    table.add_row("each later token", f"{figures['per_token_s'] * 1e3:.1f} ms")
    table.add_row("warm : cold", f"1 : {1 / ratio:.1f}   (limit 1 : {1 / LIMIT:.0f})")
    console.print(table)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rounded = {name: round(value, 5) for name, value in figures.items()}
    more = {"ratio": round(ratio, 4), "limit": LIMIT, "shape": options.shape}
    print(json.dumps(rounded | more | {"threads": threads, "load": load}))


if __name__ == "__main__":
    main()
