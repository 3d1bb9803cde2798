"""Kill engines that store prefixes on disk, and check the answers of the next engine.

    python tools/kill_engine.py MODEL [--rounds 300] [--seed 0]

In each round an engine with `cache_dir` answers prompts in a separate process and gets SIGKILL,
SIGTERM or SIGINT at a random time; after SIGINT it answers again. Then an engine in a new process
must generate the same tokens as an engine without a store. The budget of the store is too small for
all prompts. A round takes about two seconds with the smallest model. Ends in one JSON line; exit
status 1 if an answer differs, or a process fails or hangs.
"""

import argparse
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headstart import LLM, SamplingParams
from headstart.tiers.contents import verify

_BLOCKS = 30  # that fit into the store
_TIMEOUT = 120.0  # seconds after which a process counts as hanging
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
Answers = list[list[int]]


def make_prompts(random: Random) -> list[list[int]]:
    """Return prompts with common prefixes."""
    begins = [[random.randrange(3, 140) for _ in range(80)] for _ in range(4)]
    return [
        begins[index % 4] + [random.randrange(3, 140) for _ in range(random.randrange(1, 60))]
        for index in range(8)
    ]


def ask(model: str, prompts: list[list[int]], folder: str | None, ready: Callable[[], None]) -> str:
    """Return an engine's answers as JSON: tokens, and the number of cached prompt tokens.

    ready: called when the engine is ready.
    """
    llm = LLM(
        model,
        dtype="float32",
        num_blocks=24,
        num_threads=1,
        deterministic=True,
        cache_dir=folder,
        cache_dir_bytes=_BLOCKS * 4608,
    )
    ready()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [{"prompt_token_ids": tokens} for tokens in prompts]
    try:
        outputs = llm.generate(requests, params, use_tqdm=False)
    except KeyboardInterrupt:
        outputs = llm.generate(requests, params, use_tqdm=False)
    llm.close()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return json.dumps([tokens, sum(output.num_cached_tokens or 0 for output in outputs)])


def start(work: Callable[[Callable[[], None]], str]) -> tuple[int, int]:
    """Start work in a separate process; return the process id and the pipe of its answer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, work(lambda: _write(writing, b"!")).encode())
            status = 0
        except KeyboardInterrupt:
            status = 2  # the signal arrived before or after the answers
        finally:
            os._exit(status)
    os.close(writing)
    return child, reading


def _write(pipe: int, data: bytes) -> None:
    os.write(pipe, data)


def read(reading: int) -> bytes:
    """Wait for output of a process and return it, or b"" at its end."""
    if not select.select([reading], [], [], _TIMEOUT)[0]:
        raise TimeoutError("a process hangs")
    return os.read(reading, 1 << 20)


def finish(child: int, reading: int) -> str:
    """Return the answer of a process, or "" if it ended without one."""
    answer = b""
    try:
        while part := read(reading):
            answer += part
    finally:
        os.close(reading)
        if not answer:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return answer.lstrip(b"!").decode()


def main(arguments: list[str]) -> int:
    """Run the tool; return exit status 0 if every answer was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable()
    random = Random(options.seed)
    prompts = make_prompts(random)
    counts = Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="headstart-killed-") as folder,
        Progress(console=Console(stderr=True), auto_refresh=False) as progress,
    ):
        # Run once in this process, to import all modules that the forked processes need.
        ask(options.model, prompts[:1], None, lambda: None)
        started = time.perf_counter()
        alone = json.loads(ask(options.model, prompts, None, lambda: None))[0]
        seconds = time.perf_counter() - started
        for _ in progress.track(range(options.rounds), description="rounds"):
            moment = random.random() * seconds * 1.5
            one_round(
                partial(ask, options.model, prompts, folder),
                random.choice(_SIGNALS),
                moment,
                alone,
                counts,
            )
            found = verify(Path(folder)).total
            counts["blocks damaged or lost"] += found.damaged + found.lost
    return show(counts)


def one_round(
    work: Callable[[Callable[[], None]], str],
    kind: signal.Signals,
    moment: float,
    alone: Answers,
    counts: Counter[str],
) -> None:
    """Send an engine a signal `moment` seconds after it is ready; check the next engine."""
    counts[f"rounds with {kind.name}"] += 1
    child, reading = start(work)
    ready = read(reading)
    time.sleep(moment)
    if ready == b"!":
        os.kill(child, kind)
    answer = finish(child, reading)
    if answer:
        counts["answers before the end"] += 1
        counts["wrong"] += json.loads(answer)[0] != alone
    child, reading = start(work)
    answer = finish(child, reading)
    if not answer:
        counts["failed"] += 1
        return
    tokens, cached = json.loads(answer)
    counts["wrong"] += tokens != alone
    counts["cached tokens"] += cached


def show(counts: Counter[str]) -> int:
    """Print the table and the JSON line; return the exit status."""
    found = {"wrong": 0, "failed": 0, **counts}
    table = Table("after the signal", "")
    for what, count in found.items():
        table.add_row(what, f"{count:,}")
    Console().print(table)
    print(json.dumps(found))
    return int(bool(found["wrong"] or found["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
