"""Weights in 8, 5 and 4 bits: time of a token and of a prefill, compared with float.

All kinds are interleaved in one process, so that other load on the machine affects all alike. With
one thread, CPU time of the process is measured. Limiting resource: memory for decoding, which
reads fewer bytes with fewer bits; multiplications for a prefill. Prints a table, and one JSON line.

    python bench/weights/speed.py [build/bench/qwen2.5-0.5b]      bench/shapes.py makes this folder
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from headstart import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import model_folder

KINDS = ("auto", "int8", "int5", "int4")
DTYPE = "float32"
PROMPT = 256
TOKENS = 8
BATCH = 8
ROUNDS = 3


def seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Return the time of a call, from prompt to last token; nothing is cached."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return clock() - begin


def measure(llm: LLM, vocabulary: int, seed: int) -> dict[str, float]:
    """Return the milliseconds of a prefill, of a token, and of a step of several requests."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (BATCH, PROMPT), generator=generator).tolist()
    prefill = seconds(llm, prompts[:1], 1)
    short = [prompt[:16] for prompt in prompts]
    decode = seconds(llm, short[:1], TOKENS + 1) - seconds(llm, short[:1], 1)
    batch = seconds(llm, short, TOKENS + 1) - seconds(llm, short, 1)
    return {
        f"prefill of {PROMPT} tokens": 1e3 * prefill,
        "a token": 1e3 * decode / TOKENS,
        f"a token of {BATCH} requests": 1e3 * batch / TOKENS,
    }


def main(folder: str) -> None:
    engines = {
        kind: LLM(
            folder, weights=kind, dtype=DTYPE, enable_prefix_caching=False, max_model_len=1024
        )
        for kind in KINDS
    }
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in range(ROUNDS + 1):
        for kind, llm in engines.items():
            found = measure(llm, llm.engine.model.vocab_size, seed)
            if seed:  # the first round warms up
                runs[kind].append(found)
    names = list(runs["auto"][0])
    medians = {
        kind: {name: statistics.median(run[name] for run in found) for name in names}
        for kind, found in runs.items()
    }
    dtype = str(engines["auto"].engine.model.dtype).removeprefix("torch.")
    print(
        f"{folder}, {torch.get_num_threads()} thread(s), medians of {ROUNDS} in ms; auto: {dtype}"
    )
    for name in names:
        plain = medians["auto"][name]
        values = (
            f"{kind} {found[name]:8.1f} ({plain / found[name]:.2f}x)"
            for kind, found in medians.items()
        )
        print(f"{name:24}", "   ".join(values))
    print(json.dumps({"model": folder, "float": dtype, "ms": medians}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder; default: a generated model")
    main(parser.parse_args().model or str(model_folder("qwen2.5-0.5b")))
