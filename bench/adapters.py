"""Cost of LoRA adapters: a batch without adapters, with one adapter, with one per request.

    python bench/adapters.py [--shape demo|qwen2.5-0.5b] [--threads 2] [--rank 16] [--rounds 15]
                             [--cpu-clock]

Eight requests decode in one batch, then eight prompts of 256 tokens are computed in one step. Four
variants: an engine without adapters, an engine with eight loaded adapters of which none is used,
one adapter for all requests, and eight different adapters. Steps of the variants are interleaved,
so that other load on the machine affects all alike. Figures are medians. Limits: unused adapters
take 1.02 times as long as no adapters; eight adapters take 1.3 times as long as one. An adapter
changes every linear layer of the decoder. Its cost is reading its matrices (2.5 % of the weights at
rank 16) and two small products per layer. `--cpu-clock` measures the CPU seconds of the process,
for one thread only: other processes affect them little. Ends in one JSON line.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import headstart  # before torch, whose threads read how long to spin when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from shapes import SHAPES, model_folder

from headstart.models.decoder import DecoderModel

ADAPTERS, PROMPT, WARM_UP = 8, 256, 4
IDLE_LIMIT, MIXED_LIMIT = 1.02, 1.3
WAYS = ("never had one", "none asked for", "one for all", "one for each")


def make_adapter(model: DecoderModel, folder: Path, rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, widths in model.linear_widths().items():
        if layer == model.output_layer:
            continue
        for side, shape in (("A", (rank, widths.inputs)), ("B", (widths.outputs, rank))):
            matrix = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{layer}.lora_{side}.weight"] = matrix.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Way:
    """An engine, and the adapters of its eight requests."""

    def __init__(
        self, llm: headstart.LLM, adapters: Sequence[str | None], clock: Callable[[], float]
    ) -> None:
        self._engine, self._frontend = llm.engine, llm.frontend
        self._adapters = adapters
        self._clock = clock
        self._rng = random.Random(0)

    def submit(self, tokens: int, answer: int) -> None:
        """Queue one request for each adapter; none hits the cache."""
        params = headstart.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        for adapter in self._adapters:
            prompt = [self._rng.randrange(3, 512) for _ in range(tokens)]
            self._engine.submit(self._frontend.prepare(prompt, params, adapter=adapter))

    def step(self) -> float:
        """Run a step; return its seconds."""
        start = self._clock()
        self._engine.step()
        return self._clock() - start

    def drain(self) -> None:
        """Run steps until all requests are finished."""
        while self._engine.has_unfinished:
            self._engine.step()


def measure_decode(ways: list[Way], rounds: int) -> list[float]:
    """Return the median seconds of a step in which eight requests decode, for each variant."""
    for way in ways:
        way.submit(16, rounds + WARM_UP + 2)
        for _ in range(1 + WARM_UP):
            way.step()
    return _take_turns([way.step for way in ways], rounds, ways)


def measure_prefill(ways: list[Way], rounds: int) -> list[float]:
    """Return the median seconds of a step that computes eight prompts, for each variant."""

    def prefill(way: Way) -> Callable[[], float]:
        def run() -> float:
            way.submit(PROMPT, 1)
            return way.step()

        return run

    for way in ways:
        prefill(way)()
    return _take_turns([prefill(way) for way in ways], rounds, ways)


def _take_turns(measures: list[Callable[[], float]], rounds: int, ways: list[Way]) -> list[float]:
    seconds: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for took, measure in zip(seconds, measures, strict=True):
            took.append(measure())
    for way in ways:
        way.drain()
    return [statistics.median(took) for took in seconds]


def open_ways(options: argparse.Namespace, folder: Path) -> tuple[list[Way], list[headstart.LLM]]:
    """Make the four variants, each with a separate engine, so that their steps can interleave."""
    model = model_folder(options.shape)
    engines = [
        headstart.LLM(
            model, num_threads=options.threads, num_blocks=1024, max_num_batched_tokens=4096
        )
        for _ in WAYS
    ]
    names = [f"adapter {number}" for number in range(ADAPTERS)]
    for number, name in enumerate(names):
        path = make_adapter(engines[0].engine.model, folder / name, options.rank, number)
        for llm in engines[1:]:
            llm.load_adapter(name, path)
    asked: list[Sequence[str | None]] = [
        [None] * ADAPTERS,
        [None] * ADAPTERS,
        [names[0]] * ADAPTERS,
        names,
    ]
    clock = time.process_time if options.cpu_clock else time.perf_counter
    return [Way(llm, a, clock) for llm, a in zip(engines, asked, strict=True)], engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-clock", action="store_true")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as name, console.status("making the model, measuring"):
        ways, engines = open_ways(options, Path(name))
        figures = {
            "decode": measure_decode(ways, options.rounds),
            "prefill": measure_prefill(ways, options.rounds),
        }
        threads = torch.get_num_threads()
        for llm in engines:
            llm.close()
    title = f"{options.shape}, rank {options.rank}, {threads} threads: a step of eight requests"
    table = Table("", *figures, title=title)
    result: dict[str, float] = {}
    for at, way in enumerate(WAYS):
        cells = [f"{seconds[at] * 1e3:.2f} ms" for seconds in figures.values()]
        table.add_row(way, *cells)
    for what, (bare, idle, one, each) in figures.items():
        ratios = {"s": bare, "idle_to_bare": idle / bare, "one_to_bare": one / bare}
        result |= {f"{what}_{key}": value for key, value in ratios.items()}
        result[f"{what}_eight_to_one"] = each / one
    for key, limit in (("idle_to_bare", IDLE_LIMIT), ("eight_to_one", MIXED_LIMIT)):
        cells = [f"{result[f'{what}_{key}']:.3f}" for what in figures]
        table.add_row(f"{key.replace('_', ' ')} (limit {limit})", *cells)
    console.print(table)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rounded = {name: round(value, 4) for name, value in result.items()}
    more = {"limits": [IDLE_LIMIT, MIXED_LIMIT], "shape": options.shape, "rank": options.rank}
    more |= {"clock": "cpu" if options.cpu_clock else "wall"}
    print(json.dumps(rounded | more | {"threads": threads, "load": load}))


if __name__ == "__main__":
    main()
