"""Two curves: time saved by a cached prefix of each length, and by sharing a prefix in decoding.

    python bench/curves.py [--shape demo|qwen2.5-0.5b] [--threads 1] [--save docs/performance.json]

First token: a question of 40 tokens about a new document (cold), then three more questions about it
(warm, their median), for documents of several lengths. Cold is limited by the GEMMs of all tokens,
warm by the GEMMs of 40 tokens and by reading the document's K and V.

Decoding: requests with one cached prefix of 2,000 tokens, 20 own tokens and 33 output tokens. The
figure is output tokens per second after the first token, with attention to the prefix computed once
for all requests (`share_attention`) and separately for each. Token ids and weights are random with
a fixed seed. Ends in one JSON line. `--save` writes it to a file, from which `make figures` draws.
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from datetime import date
from pathlib import Path

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
from rich.console import Console
from rich.table import Table
from roofline import measure_limits
from shapes import SHAPES, model_folder

LENGTHS = (250, 500, 1000, 2000, 4000)
SHARERS = (1, 2, 4, 8, 16, 32)
QUESTION, PREFIX, OWN, OUT = 40, 2000, 20, 33
TURNS = 2
LIMIT = 1 / 8  # of the cold time, for the longest document

progress = Console(stderr=True, highlight=False)


def random_tokens(llm: headstart.LLM, rng: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(llm.engine.model.vocab_size) for _ in range(count)]


def answer(count: int) -> headstart.SamplingParams:
    """Return the parameters of a greedy answer of exactly `count` tokens."""
    return headstart.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def first_token(llm: headstart.LLM, length: int, rng: random.Random) -> tuple[float, float]:
    """Return the seconds to the first token after a document, cold and warm."""
    document = random_tokens(llm, rng, length)
    seconds = []
    for at in range(4):
        prompt = document + random_tokens(llm, rng, QUESTION)
        [output] = llm.generate(prompt, answer(1), use_tqdm=False)
        assert output.num_cached_tokens >= length if at else output.num_cached_tokens < 16
        seconds.append(output.metrics.time_to_first_token or 0.0)
    return seconds[0], statistics.median(seconds[1:])


def decode_rate(llm: headstart.LLM, document: list[int], users: int, rng: random.Random) -> float:
    """Return the output tokens per second of `users` requests on one cached document."""
    prompts = [document + random_tokens(llm, rng, OWN) for _ in range(users)]
    outputs = llm.generate(prompts, answer(OUT), use_tqdm=False)
    return users / statistics.mean(output.metrics.time_per_token or 0.0 for output in outputs)


def measure(shape: str, threads: int) -> dict[str, list[float]]:
    """Return all curves, each as a list."""
    rng = random.Random(0)
    found: dict[str, list[float]] = defaultdict(list)
    rates: dict[bool, dict[int, list[float]]] = {key: defaultdict(list) for key in (True, False)}
    # Measure in both orders: memory that is allocated later may be 5 to 10 % faster or slower.
    for order in ((True, False), (False, True)):
        with ExitStack() as stack:
            engines = {share: stack.enter_context(_open(shape, threads, share)) for share in order}
            for llm in engines.values():
                first_token(llm, 100, rng)  # warm up
            for length in LENGTHS if order[0] else ():
                progress.print(f"first token after {length} tokens")
                cold, warm = first_token(engines[True], length, rng)
                found["cold_s"].append(round(cold, 4))
                found["warm_s"].append(round(warm, 4))
            document = random_tokens(engines[True], rng, PREFIX)
            for llm in engines.values():
                decode_rate(llm, document, 1, rng)
            for users in SHARERS:
                progress.print(f"{users} requests decode, with and without shared attention")
                for _ in range(TURNS):
                    for share, llm in engines.items():
                        rates[share][users].append(decode_rate(llm, document, users, rng))
    for key, share in (("shared_rate", True), ("alone_rate", False)):
        found[key] = [round(statistics.median(rates[share][users]), 1) for users in SHARERS]
    return found


def _open(shape: str, threads: int, share: bool) -> "closing[headstart.LLM]":
    folder = model_folder(shape)
    return closing(
        headstart.LLM(folder, num_threads=threads, num_blocks=2048, share_attention=share)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    found = measure(options.shape, options.threads)
    limits = measure_limits(options.threads)
    table = Table(f"{options.shape}, {options.threads} threads", "cold", "warm", "warm : cold")
    for length, cold, warm in zip(LENGTHS, found["cold_s"], found["warm_s"], strict=True):
        times = f"1 : {cold / warm:.1f}"
        table.add_row(f"{length} tokens", f"{cold * 1e3:.0f} ms", f"{warm * 1e3:.0f} ms", times)
    table.add_section()
    table.add_row("output tokens/s", "shared", "alone", "shared : alone")
    for users, on, off in zip(SHARERS, found["shared_rate"], found["alone_rate"], strict=True):
        table.add_row(f"{users} sharers", f"{on:.0f}", f"{off:.0f}", f"{on / off:.2f} : 1")
    Console().print(table)
    progress.print(f"{time.perf_counter() - start:.0f} s in all")
    ratio = found["warm_s"][-1] / found["cold_s"][-1]
    figures = {"lengths": LENGTHS, "sharers": SHARERS, **found, "ratio": round(ratio, 4)}
    about = {"limit": LIMIT, "shape": options.shape, "threads": options.threads}
    machine = {"gemm_gflops": round(limits.gemm), "memory_gbs": round(limits.memory, 1)}
    line = json.dumps({"date": date.today().isoformat(), **about, **machine, **figures})
    if options.save is not None:
        options.save.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
