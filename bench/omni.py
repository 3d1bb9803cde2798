"""Time that caching between stages saves, and its cost if it saves nothing.

    python bench/omni.py [--model FOLDER] [--tokens 1500] [--rounds 5] [--threads 1]

Each round sends a speech model two questions about a new document (cold, warm), alternately with
caching on and off. The default model has random weights: a thinker of width 384 with 6 layers, a
talker of width 192 with 4 layers, and a diffusion vocoder. Figures are seconds until the thinker's
first token, the talker's first token, the first audio and the end of the audio, and the time of
each stage; medians. Limiting resource when cold: the prefill of the document. When warm: decoding
(one step per token in thinker and talker) and the vocoder, which caching hardly affects: it hits
only if all codes of an answer are equal.

Then the cost of a miss: storing rows and computing block identities may take 2 % of the time of
thinker and talker in a cold answer. Last, the store is compared with another layout:
one tensor `[num_blocks * block_size, D]` that mirrors the KV slots, for rows of a large model
(bf16, D = 3584). Ends in one JSON line.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from examples.small_models.omni import demo_omni_path
from headstart.cache import BlockKey, Namespace
from headstart.omni.engine_stage import EngineStage, TalkerFeed
from headstart.omni.output_cache import ENTRY_BYTES, NODE_BYTES, BlockPath, OutputCache

TEXT, SPEECH, LIMIT, WARM_UP = 16, 32, 0.02, 3
STORE = 8 << 20  # bytes: three documents of the demo model
ROWS, WIDTH, BLOCK = 2048, 3584, 16


def graph_text(text: str, *, caching: bool) -> str:
    """Return a model's pipeline, with or without caching in all stages."""
    if caching:
        return text
    lines = [
        f"{line}\nenable_prefix_caching = false" if line.startswith("[stages.") else line
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def framed(folder: Path, words: list[int]) -> list[int]:
    """Return the words in the model's prompt format: Qwen3-Omni answers only chat turns."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen3_omni_moe":
        return words
    start, end = config["im_start_token_id"], config["im_end_token_id"]
    newline = 10
    user = [start, config["user_token_id"], newline, *words, end, newline]
    return [*user, start, config["assistant_token_id"], newline]


def ask(omni: headstart.Omni, prompt: list[int], seed: int) -> dict[str, float]:
    """Send a question; return its times in seconds, from its arrival and in each stage."""
    params = headstart.OmniParams(
        text=headstart.SamplingParams(seed=seed, max_tokens=TEXT, ignore_eos=True),
        speech=headstart.SamplingParams(seed=seed, max_tokens=SPEECH, min_tokens=SPEECH),
        seed=seed,
    )
    [output] = omni.generate(prompt, params)
    metrics = output.metrics
    [vocoder] = metrics.keys() - {"thinker", "talker"}
    return {
        "thinker's first token": metrics["thinker"].first_output or 0.0,
        "talker's first token": metrics["talker"].first_output or 0.0,
        "first audio": metrics[vocoder].first_output or 0.0,
        "end of the audio": metrics[vocoder].total or 0.0,
        **{f"{name} at work": metrics[name].seconds for name in ("thinker", "talker")},
        "vocoder at work": metrics[vocoder].seconds,
    }


def measure(
    omnis: dict[str, headstart.Omni], folder: Path, tokens: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the medians for each kind of question and each pipeline, measured in turns."""
    rng = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {}
    for at in range(rounds + WARM_UP):
        document = [rng.randrange(32, 127) for _ in range(tokens)]
        questions = [[rng.randrange(32, 127) for _ in range(40)] for _ in range(2)]
        for name, omni in omnis.items():
            for kind, question in zip(("cold", "warm"), questions, strict=True):
                prompt = framed(folder, document + question)
                seconds = ask(omni, prompt, seed=2 * at + (kind == "warm"))
                if at >= WARM_UP:
                    found.setdefault(f"{name}, {kind}", []).append(seconds)
    return {
        kind: {key: statistics.median(entry[key] for entry in entries) for key in entries[0]}
        for kind, entries in found.items()
    }


@contextmanager
def timed(owner: object, name: str, spent: defaultdict[str, float]) -> Iterator[None]:
    """Add up the time of a method under its name, within a context."""
    inner = getattr(owner, name)

    def method(*given: object) -> object:
        start = time.perf_counter()
        try:
            return inner(*given)
        finally:
            spent[name] += time.perf_counter() - start

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def cost_of_a_miss(
    omni: headstart.Omni, folder: Path, tokens: int, rounds: int
) -> dict[str, float]:
    """Return the shares of thinker's and talker's time on new documents that rows take.

    handing: passing a step's rows on, and storing them. naming: computing block identities.
    """
    thinker = omni.pipeline.stages["thinker"]
    assert isinstance(thinker, EngineStage)
    rng = random.Random(1)
    spent: defaultdict[str, float] = defaultdict(float)
    works = 0.0
    with (
        timed(thinker.rows, "computed", spent),
        timed(thinker.engine.manager, "block_hashes", spent),
        timed(TalkerFeed, "_identify", spent),
    ):
        for at in range(rounds):
            prompt = framed(folder, [rng.randrange(32, 127) for _ in range(tokens)])
            seconds = ask(omni, prompt, seed=at)
            works += seconds["thinker at work"] + seconds["talker at work"]
    naming = spent["block_hashes"] + spent["_identify"]
    return {"handing": spent["computed"] / works, "naming": naming / works}


def compare_layouts(repeats: int = 7) -> dict[str, float]:
    """Return the seconds to store and to load 2,048 rows: the store, and a mirror of KV slots."""
    rows = torch.randn(ROWS, WIDTH).bfloat16()
    entry = BLOCK * WIDTH * 2 + ENTRY_BYTES + NODE_BYTES + 1
    store = OutputCache(2 * (ROWS // BLOCK + 1) * entry)
    salts = itertools.count()

    def path(salt: int) -> BlockPath:
        keys = [BlockKey(bytes([n])) for n in range(ROWS // BLOCK)]
        return BlockPath("s", Namespace(None, str(salt)), keys)

    mirror = torch.zeros(ROWS * 2, WIDTH, dtype=torch.bfloat16)
    slots = torch.randperm(ROWS * 2 // BLOCK)[: ROWS // BLOCK].repeat_interleave(BLOCK) * BLOCK
    slots += torch.arange(BLOCK).repeat(ROWS // BLOCK)

    def keep() -> None:
        """Store rows. After the second call the store is full and evicts the oldest rows."""
        where = path(next(salts))
        for index in range(ROWS // BLOCK):
            store.put(where, index, {"h": rows[index * BLOCK :][:BLOCK]})
        store.touch(where)

    def give() -> None:
        torch.cat([block["h"] for block in store.find(path(repeats - 1))])

    return {
        "store, keep": fastest(keep, repeats),
        "mirror, keep": fastest(lambda: mirror.index_copy_(0, slots, rows), repeats),
        "store, give": fastest(give, repeats),
        "mirror, give": fastest(lambda: mirror.index_select(0, slots), repeats),
    }


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Return the least time of several runs, in seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    folder = given.model or demo_omni_path()
    # Space for two documents, so that the warm-up writes all memory once: the first write to a page
    # takes 10 us.
    blocks = -(-(given.tokens + 300) // BLOCK) * 2
    options = {"num_blocks": blocks, "block_size": BLOCK, "num_threads": given.threads}
    omnis = {"on": headstart.Omni(folder, options=options, cache_bytes=STORE)}
    off = graph_text(omnis["on"].graph, caching=False)
    omnis["off"] = headstart.Omni(folder, pipeline=off, options=options)
    torch.set_num_threads(given.threads)
    with closing(omnis["on"]), closing(omnis["off"]):
        medians = measure(omnis, folder, given.tokens, given.rounds)
        shares = {n: cost_of_a_miss(omnis[n], folder, given.tokens, given.rounds) for n in omnis}
    layouts = compare_layouts()
    table = Table("seconds", *medians)
    for key in next(iter(medians.values())):
        table.add_row(key, *(f"{column[key]:.4f}" for column in medians.values()))
    console = Console(width=100)
    console.print(table)
    on, handed = shares["on"], shares["off"]["handing"]
    miss = on["handing"] - handed + on["naming"]
    console.print(
        f"a miss costs {miss:.2%} of thinker and talker (limit {LIMIT:.0%}): storing rows "
        f"{on['handing'] - handed:.2%}, block identities {on['naming']:.2%}; passing rows on takes "
        f"{handed:.2%} with and without caching: {'met' if miss <= LIMIT else 'NOT MET'}"
    )
    for name, seconds in layouts.items():
        console.print(f"{name} {ROWS} rows of {WIDTH}: {seconds * 1e3:.2f} ms")
    print(json.dumps({"seconds": medians, "miss": miss, "layouts": layouts}))


if __name__ == "__main__":
    main()
