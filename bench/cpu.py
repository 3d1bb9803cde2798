"""Four loads on the CPU: seconds, and how near that is to what the machine can do.

    python bench/cpu.py [--threads 1] [--cpu-clock] [--loads 1,2,3,4,ready] [--rounds 1]

Token ids are random with a fixed seed, as are the weights; greedy, the end of the text ignored,
blocks of 16, bfloat16. Loads 1 to 3 run on the shape of Qwen2.5-0.5B, load 4 on a small Llama:

    1      long document: 3,000 tokens, 16 questions of 40, 16 out, one after another
    2      chat: 8 conversations at once, 4 turns of 120 tokens in and 40 out
    3      shared prefix: 16 requests at once on 2,000 cached tokens, 20 of their own, 64 out
    4      overhead: 32 requests at once of 512 tokens, 256 of them shared, 64 out
    ready  a fresh process: from its start until a saved checkpoint can be asked

`--cpu-clock` counts the process's own CPU seconds, which other processes change little; with one
thread only. The table holds each figure against its floor: the time in which this machine, by
its GEMM and memory speed measured in the same run, could do no better. Ends in one JSON line.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from limits import Clock, Floor, Limits, Pass, floor, measure_limits, prefill
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, model_folder

BIG, SMALL = "qwen2.5-0.5b", "small-llama"
BLOCKS, BLOCK = 2048, 16
KEYS = ("cold_s", "warm_s", "per_token_ms", "chat_s", "shared_s", "overhead_s", "ready_s")
READY = """
import sys, time
import headstart
llm = headstart.LLM(sys.argv[1], num_threads=int(sys.argv[2]), num_blocks=int(sys.argv[3]))
print(time.process_time(), flush=True)
"""

progress = Console(stderr=True, highlight=False)


@dataclass
class Bench:
    """How to run and to time; what was measured gathers in `figures`, a list for each key."""

    threads: int
    clock: Clock
    limits: Limits
    figures: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, Floor] = field(default_factory=dict)

    def load(self, shape: str) -> headstart.LLM:
        """An engine for a shape, with every library warmed up."""
        llm = headstart.LLM(
            model_folder(shape), num_threads=self.threads, num_blocks=BLOCKS, block_size=BLOCK
        )
        rng = random.Random(1)
        for count in (1, 8, 16):
            run(llm, [tokens(llm, rng, 64) for _ in range(count)], 4)
        llm.reset_prefix_cache()
        return llm

    def add(self, key: str, value: float) -> None:
        """A measured value, of which the median over the rounds is told."""
        self.figures.setdefault(key, []).append(value)

    def median(self, key: str) -> float | None:
        """The median of what was measured; None if nothing was."""
        return statistics.median(self.figures[key]) if key in self.figures else None


def tokens(llm: headstart.LLM, rng: random.Random, count: int) -> list[int]:
    """Random token ids of the model's vocabulary."""
    return [rng.randrange(llm.engine.model.vocab_size) for _ in range(count)]


def answer(count: int) -> headstart.SamplingParams:
    """Greedy, exactly `count` tokens."""
    return headstart.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def run(llm: headstart.LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Answer the prompts together; each answer's tokens."""
    outputs = llm.generate(prompts, answer(count), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def long_document(bench: Bench, llm: headstart.LLM, rng: random.Random) -> None:
    """Load 1: a cold question, fifteen warm ones."""
    prefix, question, out, questions = 3000, 40, 16, 16
    document = tokens(llm, rng, prefix)
    warm, later = [], []
    for at in range(questions):
        stream = llm.stream(document + tokens(llm, rng, question), answer(out))
        start = bench.clock()
        output = next(stream)
        first = bench.clock()
        hit = output.num_cached_tokens
        assert hit < BLOCK if at == 0 else hit >= prefix, f"question {at} hit {hit} tokens"
        for _ in stream:
            pass
        later.append((bench.clock() - first) / (out - 1))
        warm.append(first - start)
    bench.add("cold_s", warm.pop(0))
    bench.add("warm_s", statistics.median(warm))
    bench.add("per_token_ms", statistics.median(later) * 1e3)
    whole = prefix + question
    bench.floors["cold_s"] = floor([(1, prefill(0, whole))], SHAPES[BIG], bench.limits)
    bench.floors["warm_s"] = floor([(1, prefill(prefix, question))], SHAPES[BIG], bench.limits)
    one = floor([(1, prefill(whole + out // 2, 1))], SHAPES[BIG], bench.limits)
    bench.floors["per_token_ms"] = one._replace(seconds=one.seconds * 1e3)


def chat(bench: Bench, llm: headstart.LLM, rng: random.Random) -> None:
    """Load 2: conversations whose turns begin with all that was said before."""
    users, turns, said, out = 8, 4, 120, 40
    talks: list[list[int]] = [[] for _ in range(users)]
    passes = []
    spent = 0.0
    for turn in range(turns):
        known = turn * (said + out)
        talks = [talk + tokens(llm, rng, said) for talk in talks]
        start = bench.clock()
        replies = run(llm, talks, out)
        spent += bench.clock() - start
        talks = [talk + reply for talk, reply in zip(talks, replies, strict=True)]
        one = prefill(known, said)
        passes.append((1, Pass(*(users * part for part in vars(one).values()))))
        context = users * (known + said + out // 2)
        passes.append((out - 1, Pass(users, users, context, context)))
    bench.add("chat_s", spent)
    bench.floors["chat_s"] = floor(passes, SHAPES[BIG], bench.limits)


def shared_prefix(bench: Bench, llm: headstart.LLM, rng: random.Random) -> None:
    """Load 3: decoding of requests that begin alike, their beginning cached."""
    users, prefix, own, out = 16, 2000, 20, 64
    document = tokens(llm, rng, prefix)
    run(llm, [document], 1)
    prompts = [document + tokens(llm, rng, own) for _ in range(users)]
    start = bench.clock()
    run(llm, prompts, out)
    bench.add("shared_s", bench.clock() - start)
    bench.floors["shared_s"] = floor(_together(users, prefix, own, out), SHAPES[BIG], bench.limits)


def overhead(bench: Bench, llm: headstart.LLM, rng: random.Random) -> None:
    """Load 4: so small a model that what surrounds it tells."""
    users, prefix, own, out = 32, 256, 256, 64
    head = tokens(llm, rng, prefix)
    prompts = [head + tokens(llm, rng, own) for _ in range(users)]
    start = bench.clock()
    run(llm, prompts, out)
    bench.add("overhead_s", bench.clock() - start)
    first = Pass(prefix, 0, prefix * (prefix + 1) // 2, prefix)
    passes = [(1, first), *_together(users, prefix, own, out)]
    bench.floors["overhead_s"] = floor(passes, SHAPES[SMALL], bench.limits)


def _together(users: int, prefix: int, own: int, out: int) -> list[tuple[int, Pass]]:
    """Requests that share a cached prefix and decode together, the prefix read once a step."""
    one = prefill(prefix, own)
    begin = Pass(users * own, users, users * one.attended, prefix + users * own)
    mean = own + out // 2
    step = Pass(users, users, users * (prefix + mean), prefix + users * mean)
    return [(1, begin), (out - 1, step)]


def ready(bench: Bench) -> None:
    """From the start of a process until a model can be asked."""
    command = [sys.executable, "-c", READY, str(model_folder(BIG)), str(bench.threads), str(BLOCKS)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"the process that loads a model ended with {process.returncode}")
    bench.add("ready_s", float(line) if bench.clock is time.process_time else seconds)
    size = (model_folder(BIG) / "model.safetensors").stat().st_size
    bench.floors["ready_s"] = Floor(size / bench.limits.memory / 1e9, "imports, reading weights")


Load = Callable[[Bench, headstart.LLM, random.Random], None]
LOADS: dict[str, tuple[str, int, Load]] = {  # shape, times in a round, what to run
    "1": (BIG, 1, long_document),
    "2": (BIG, 1, chat),
    "3": (BIG, 1, shared_prefix),
    "4": (SMALL, 5, overhead),
}


def run_loads(bench: Bench, chosen: list[str], rounds: int) -> None:
    """All chosen loads, model by model."""
    for shape in (BIG, SMALL):
        names = [name for name in chosen if name in LOADS and LOADS[name][0] == shape]
        if not names:
            continue
        progress.print(f"loading {shape}")
        with closing(bench.load(shape)) as llm:
            for name in names:
                _, times, load = LOADS[name]
                for at in range(rounds * times):
                    progress.print(f"load {name}: {load.__name__}, {at + 1} of {rounds * times}")
                    llm.reset_prefix_cache()
                    load(bench, llm, random.Random(at))
    for at in range(rounds * ("ready" in chosen)):
        progress.print(f"import to ready, {at + 1} of {rounds}")
        ready(bench)


def make_table(bench: Bench) -> Table:
    """Each figure beside its floor."""
    gemm, memory = bench.limits
    title = f"{bench.threads} threads: GEMM {gemm:.0f} GFLOP/s, memory {memory:.1f} GB/s"
    table = Table("", "measured", "floor", "of floor", "limited by", title=title)
    for key in KEYS:
        value = bench.median(key)
        if value is not None:
            least, limit = bench.floors[key]
            table.add_row(key, f"{value:.4g}", f"{least:.3g}", f"{value / least:.2f}", limit)
    shared = bench.median("shared_s")
    if shared is not None:
        table.add_row("shared, output tokens/s", f"{16 * 64 / shared:.0f}")
    return table


def read_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-clock", action="store_true")
    parser.add_argument("--loads", default="1,2,3,4,ready")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    options.loads = options.loads.split(",")
    unknown = set(options.loads) - {*LOADS, "ready"}
    if unknown:
        parser.error(f"no load {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}, ready")
    if options.cpu_clock and options.threads != 1:
        parser.error("--cpu-clock adds up all threads' time: it needs --threads 1")
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_clock else time.perf_counter
    bench = Bench(options.threads, clock, measure_limits(options.threads, clock))
    for shape in (BIG, SMALL):
        progress.print(f"the model {shape} in {model_folder(shape)}")
    run_loads(bench, options.loads, options.rounds)
    Console().print(make_table(bench))
    figures = {key: bench.median(key) for key in KEYS}
    rounded = {key: value and round(value, 4) for key, value in figures.items()}
    print(json.dumps(rounded | {"threads": options.threads}))


if __name__ == "__main__":
    main()
