"""Four loads on the CPU: seconds, and the ratio to the least time that the machine allows.

    python bench/cpu.py [--threads 1] [--cpu-clock] [--loads 1,2,3,4,ready] [--rounds 1]

`loads.py` describes the loads. `ready` is the time from the start of a new process until it can
answer with a saved checkpoint. `peers.py` runs the loads in other engines too.

`--cpu-clock` measures the CPU seconds of the process, for one thread only: other processes affect
them little. The table compares each figure with its floor: the least possible time at the speed of
GEMM and memory that was measured in the same run. Ends in one JSON line.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field

import headstart  # noqa: F401 - before torch, whose threads read how long to spin when loaded

# isort: split
import torch
from loads import BIG, LOADS, SMALL, Prompts, make_load, tokens
from peer import DRIVERS, Headstart, shared_head
from rich.console import Console
from rich.table import Table
from roofline import Clock, Floor, Limits, Pass, floor, measure_limits, prefill
from shapes import SHAPES, model_folder

KEYS = {  # names in the JSON line, by timed part
    "cold": "cold_s",
    "warm": "warm_s",
    "per token": "per_token_ms",
    "chat": "chat_s",
    "shared": "shared_s",
    "overhead": "overhead_s",
    "ready": "ready_s",
}
BLOCK = 16
READY = """
import sys, time
import headstart
llm = headstart.LLM(sys.argv[1], num_threads=int(sys.argv[2]), num_blocks=2048)
print(time.process_time(), flush=True)
"""

progress = Console(stderr=True, highlight=False)


@dataclass
class Bench:
    """Settings of a run, and the measured seconds of each figure."""

    threads: int
    clock: Clock
    limits: Limits
    figures: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, Floor] = field(default_factory=dict)

    def load(self, shape: str) -> Headstart:
        """Return an engine for a shape, with every library warmed up."""
        engine = Headstart(str(model_folder(shape)), self.threads, "auto")
        rng = random.Random("warm up")
        for count in (1, 8, 16):
            engine.answer([tokens(rng, SHAPES[shape].vocab_size, 64) for _ in range(count)], 4)
        return engine

    def add(self, key: str, seconds: float) -> None:
        """Add a measured value; the median over the rounds is reported."""
        self.figures.setdefault(key, []).append(seconds)

    def median(self, key: str) -> float | None:
        """Return the median of the measured values; None if there are none."""
        return statistics.median(self.figures[key]) if key in self.figures else None


Passes = list[tuple[int, Pass]]  # passes in sequence, each with its number of repetitions


def document_passes(prompts: Prompts) -> dict[str, Passes]:
    """Return the passes of load 1: document, questions, and a token in the middle of an answer."""
    prefix, question = len(prompts["document"]), len(prompts["questions"][0])
    whole = prefix + question
    return {
        "cold": [(1, prefill(0, whole))],
        "warm": [(1, prefill(prefix, question))],
        "per token": [(1, prefill(whole + prompts["count"] // 2, 1))],
    }


def chat_passes(prompts: Prompts) -> dict[str, Passes]:
    """Return the passes of load 2, in which earlier turns are cached."""
    users, said, out = len(prompts["said"][0]), len(prompts["said"][0][0]), prompts["count"]
    passes: Passes = []
    for turn in range(len(prompts["said"])):
        known = turn * (said + out)
        one = prefill(known, said)
        passes.append((1, Pass(*(users * part for part in vars(one).values()))))
        context = users * (known + said + out // 2)
        passes.append((out - 1, Pass(users, users, context, context)))
    return {"chat": passes}


def together_passes(prompts: Prompts) -> dict[str, Passes]:
    """Return the passes of loads 3 and 4, whose shared prefix is computed and read once."""
    users, prefix = len(prompts["prompts"]), len(shared_head(prompts["prompts"]))
    own, out = len(prompts["prompts"][0]) - prefix, prompts["count"]
    one = prefill(prefix, own)
    begin = Pass(users * own, users, users * one.attended, prefix + users * own)
    mean = own + out // 2
    step = Pass(users, users, users * (prefix + mean), prefix + users * mean)
    first = Pass(prefix, 0, prefix * (prefix + 1) // 2, prefix)
    return {"together": [(int(not prompts["first"]), first), (1, begin), (out - 1, step)]}


PASSES = {"document": document_passes, "chat": chat_passes, "together": together_passes}


def run_load(bench: Bench, name: str, engine: Headstart, at: int) -> None:
    """Run a load once; record its times and floors."""
    prompts = make_load(name, at)
    kind, load = prompts["load"], LOADS[name]
    for key, passes in PASSES[kind](prompts).items():
        bench.floors[load.timed or key] = floor(passes, SHAPES[load.shape], bench.limits)
    arguments = {key: value for key, value in prompts.items() if key != "load"}
    engine.cached.clear()
    for key, seconds in DRIVERS[kind](engine, **arguments, clock=bench.clock)["seconds"].items():
        bench.add(load.timed or key, seconds)
    for question, hit in enumerate(engine.cached):
        known = len(prompts["document"])
        assert hit >= known if question else hit < BLOCK, f"question {question} hit {hit} tokens"


def ready(bench: Bench) -> None:
    """Measure the time from the start of a process until its model can answer."""
    command = [sys.executable, "-c", READY, str(model_folder(BIG)), str(bench.threads)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"the process that loads a model ended with {process.returncode}")
    bench.add("ready", float(line) if bench.clock is time.process_time else seconds)
    size = (model_folder(BIG) / "model.safetensors").stat().st_size
    bench.floors["ready"] = Floor(size / bench.limits.memory / 1e9, "imports, reading weights")


def run_loads(bench: Bench, chosen: list[str], rounds: int) -> None:
    """Run the chosen loads, model by model."""
    for shape in (BIG, SMALL):
        names = [name for name in chosen if name in LOADS and LOADS[name].shape == shape]
        if not names:
            continue
        progress.print(f"loading {shape}")
        engine = bench.load(shape)
        with closing(engine.llm):
            for name in names:
                times = rounds * LOADS[name].times
                for at in range(times):
                    progress.print(f"load {name}, {at + 1} of {times}")
                    engine.llm.reset_prefix_cache()
                    run_load(bench, name, engine, at)
    for at in range(rounds * ("ready" in chosen)):
        progress.print(f"import to ready, {at + 1} of {rounds}")
        ready(bench)


def unit(key: str) -> int:
    """Return the factor from seconds to the unit in which a figure is printed."""
    return 1000 if KEYS[key].endswith("_ms") else 1


def make_table(bench: Bench) -> Table:
    """Return a table of each figure and its floor."""
    gemm, memory = bench.limits
    title = f"{bench.threads} threads: GEMM {gemm:.0f} GFLOP/s, memory {memory:.1f} GB/s"
    table = Table("", "measured", "floor", "of floor", "limited by", title=title)
    for key in KEYS:
        value = bench.median(key)
        if value is not None:
            least, limit = bench.floors[key]
            cells = (f"{seconds * unit(key):.4g}" for seconds in (value, least))
            table.add_row(KEYS[key], *cells, f"{value / least:.2f}", limit)
    shared = bench.median("shared")
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
        parser.error(f"no load {', '.join(sorted(unknown))}; allowed: {', '.join(LOADS)}, ready")
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
    figures = {name: (bench.median(key), unit(key)) for key, name in KEYS.items()}
    rounded = {
        name: value and round(value * factor, 4) for name, (value, factor) in figures.items()
    }
    print(json.dumps(rounded | {"threads": options.threads}))


if __name__ == "__main__":
    main()
