"""The server under load: time to first token, time per token, output tokens per second, hit rate.

    python bench/serve.py [--shape small-llama] [--threads 1] [--clients 1 8 64] [--rounds 5]
                          [--beside build/peers/vllm]

The server and its clients (this program) are separate processes. Each client sends one request
after another over a socket: streamed, greedy, token ids, an exact number of output tokens.

    chat      8 system prompts of 512 tokens, conversations of 3 turns of 64 tokens, 32 output
    document  4 documents of 2,000 tokens, questions of 32 tokens, 16 output
    short     96 unique tokens, 16 output

In each round, one client runs a load eight times, eight clients four times each, 64 clients once.

Each load runs with the cache and without it. The bare engine (`AsyncLLM` in a process without HTTP)
gets the same requests; the server may take 1.10 times the engine's time, in the median round. All
measurements are interleaved, with new prompts in each round, so that other load on the machine
affects all alike. `--beside` names a virtual environment with vLLM, whose server gets the same
requests. The limits are 0.8 of its median time to first token, and less than its 99th percentile
and its total time. Limiting resource for a small model: the interpreter, for the engine's steps and
for one event per token. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serve_loads import LOADS, Ids, Stream, Timing, run_load
from shapes import SHAPES, make_tokenizer, model_folder

SERVED = "bench"
ADDED, FIRST = 1.10, 0.8  # limits: server to bare engine, time to first token to vLLM's
POOL_TOKENS, LONGEST = 65_536, 4096


def over_http(session: aiohttp.ClientSession, url: str) -> Stream:
    """Return a function that streams answers of an OpenAI-compatible server."""

    async def stream(prompt: Ids, count: int) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        body = {
            "model": SERVED,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    usage = event["usage"]
                    details = usage.get("prompt_tokens_details") or {}
                    yield 0, usage | {"cached_tokens": details.get("cached_tokens") or 0}
                if event.get("choices"):
                    yield 1, None

    return stream


async def connect(session: aiohttp.ClientSession, url: str) -> None:
    """Open a connection that stays open, as clients do."""
    async with session.get(f"{url}/health") as response:
        await response.read()


def ask_server(url: str, load: str, clients: int, vocab: int, seed: str) -> Timing:
    """Run a load over HTTP."""

    async def ask() -> Timing:
        limit = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            await asyncio.gather(*(connect(session, url) for _ in range(clients)))
            return await run_load(over_http(session, url), load, clients, vocab, seed)

    return asyncio.run(ask())


@contextmanager
def server(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Start a server and yield its address; `PORT` in the command is replaced by a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [word.replace("PORT", port) for word in command]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(words, stdout=said, stderr=said, env=os.environ | environment) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_healthy(url, process)
        except RuntimeError:
            tell(said)
            raise
        else:
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def tell(said: IO[bytes]) -> None:
    """Print the end of a process's output."""
    said.seek(0)
    print(said.read().decode(errors="replace")[-10_000:], file=sys.stderr)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for an answer; raise RuntimeError if the process ends or needs over ten minutes."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} does not answer")


@contextmanager
def bare_engine(folder: Path, threads: int) -> Iterator[Callable[[str, int, int, str], Timing]]:
    """Start the engine without HTTP in a separate process."""
    command = [sys.executable, __file__, "--engine", str(folder), "--threads", str(threads)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        read, write = process.stdout, process.stdin

        def hear() -> str:
            line = read.readline()
            if not line:
                tell(said)
                raise RuntimeError("the bare engine has ended")
            return line

        def ask(load: str, clients: int, vocab: int, seed: str) -> Timing:
            print(json.dumps([load, clients, vocab, seed]), file=write, flush=True)
            return Timing(**json.loads(hear()))

        hear()

        yield ask
        write.close()


def be_the_engine(folder: str, threads: int) -> None:
    """Read a load from each line, run it, and print its figures."""
    import headstart
    from headstart.engine.params import RequestOutputKind

    llm = headstart.AsyncLLM(folder, **engine_options(threads))

    async def stream(prompt: Ids, count: int) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        params = headstart.SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "cached_tokens": output.num_cached_tokens,
            }
            yield (
                sum(len(one.token_ids) for one in output.outputs),
                (usage if output.finished else None),
            )

    print("ready", flush=True)
    for line in sys.stdin:
        timing = asyncio.run(run_load(stream, *json.loads(line)))
        print(json.dumps(vars(timing)), flush=True)
    llm.close()


def engine_options(threads: int) -> dict[str, Any]:
    """Return the options of our engine in every process."""
    return {
        "num_threads": threads,
        "num_blocks": POOL_TOKENS // 16,
        "max_model_len": LONGEST,
        "max_num_seqs": 64,
    }


def our_command(folder: Path, threads: int, *more: str) -> list[str]:
    """Return the command `headstart serve` with the options of `engine_options`."""
    options = [
        word
        for name, value in engine_options(threads).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    served = ["--served-model-name", SERVED, "--port", "PORT"]
    return [sys.executable, "-m", "headstart", "serve", "--model", str(folder), *served, *options,
            *more]  # fmt: skip


def their_command(folder: Path, venv: Path) -> list[str]:
    """Return the command `vllm serve` with the same options."""
    return [
        *(str(venv / "bin" / "vllm"), "serve", str(folder), "--served-model-name", SERVED),
        *("--port", "PORT", "--host", "127.0.0.1", "--max-model-len", str(LONGEST)),
        *("--max-num-seqs", "64", "--enable-prompt-tokens-details", "--dtype", "bfloat16"),
        *("--block-size", "32"),  # the smallest that vLLM's attention supports
    ]


def prepare_model(shape: str) -> Path:
    """Return the folder of a shape, with a tokenizer, which servers need."""
    folder = model_folder(shape)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(shape).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Measure each kind of server in all rounds, by load and number of clients."""
    folder = prepare_model(options.shape)
    vocab = SHAPES[options.shape].vocab_size
    kinds = {
        "cache": our_command(folder, options.threads),
        "no cache": our_command(folder, options.threads, "--no-enable-prefix-caching"),
    }
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    if options.beside is not None:
        kinds["vLLM"] = their_command(folder, options.beside)
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    seen: dict[str, dict[str, list[Timing]]] = {}
    cells = [(load, clients) for load in options.loads for clients in options.clients]
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=options.rounds * (len(kinds) + 1) * len(cells))
        asking = {"engine": stack.enter_context(bare_engine(folder, options.threads))}
        for kind, command in kinds.items():
            url = stack.enter_context(server(command, environment))
            asking[kind] = partial(ask_server, url)
        for load in options.loads:
            for ask in asking.values():
                ask(load, 2, vocab, "warm up")
        progress.update(task, description="rounds")
        for at in range(options.rounds):
            first = at % len(asking)
            in_turn = [*asking.items(), *asking.items()][first : first + len(asking)]
            for load, clients in cells:
                cell = seen.setdefault(f"{load} x{clients}", {kind: [] for kind in asking})
                for kind, ask in in_turn:
                    cell[kind].append(ask(load, clients, vocab, f"{load} {clients} {at}"))
                    progress.advance(task)
    return {cell: summarise(by_kind) for cell, by_kind in seen.items()}


def summarise(by_kind: dict[str, list[Timing]]) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of server; ours also has the ratio to the bare engine."""
    rows = {}
    for kind, runs in by_kind.items():
        whole = Timing()
        for run in runs:
            whole.add(run)
        rows[kind] = whole.summary()
    pairs = zip(by_kind["cache"], by_kind["engine"], strict=True)
    rows["cache"]["of_engine"] = statistics.median(
        one.seconds / bare.seconds for one, bare in pairs
    )
    return rows


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the table, and the ratios that have limits."""
    columns = {
        "first token, median ms": "first_p50_ms",
        "p99 ms": "first_p99_ms",
        "a token ms": "per_token_ms",
        "tokens/s": "tokens_per_s",
        "hit rate": "hit_rate",
    }
    table = Table(
        *("load", "", *columns, f"time relative to engine (<= {ADDED})"),
        f"relative to vLLM: first token (<= {FIRST}), p99, total (< 1)",
    )
    for cell, by_kind in results.items():
        for kind, row in by_kind.items():
            numbers = [f"{row[name]:,.{3 if row[name] < 10 else 0}f}" for name in columns.values()]
            added = f"{row['of_engine']:.2f}" if "of_engine" in row else ""
            peer = by_kind.get("vLLM") if kind == "cache" else None
            shares = (
                ""
                if peer is None
                else ", ".join(
                    f"{row[name] / peer[name]:.2f}"
                    for name in ("first_p50_ms", "first_p99_ms", "seconds")
                )
            )
            table.add_row(cell, kind, *numbers, added, shares)
    Console(width=120).print(table)
    print(json.dumps(results))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="small-llama", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="a virtual environment with vLLM")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        be_the_engine(options.engine, options.threads)
        return
    show(measure(options))


if __name__ == "__main__":
    main()
