"""The server under load: times to first token, time per token, output tokens a second, hit rate.

    python bench/serve.py [--shape small-llama] [--threads 1] [--clients 1 8 64] [--rounds 3]
                          [--beside build/peers/vllm]

The server is a process of its own, and so is what asks it: this one. Each client asks one request
after another over a socket, streamed, greedy, of token ids, an exact number of tokens:

    chat      8 system prompts of 512 tokens, conversations of 3 turns of 64 in and 32 out
    document  4 documents of 2,000 tokens, questions of 32 in and 16 out
    short     96 tokens that nobody else sends, 16 out

Each load runs with the cache and without, and the same requests go to the bare engine (`AsyncLLM`
in a process without HTTP): the limit for the server's time is 1.10 times the engine's. `--beside`
names a virtual environment that has vLLM, whose server gets the same loads in turns; the limits
are 0.8 of its median time to first token, and less than its other times. What limits a small model
here is the interpreter, twice: the engine's steps, and an event a token. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shapes import SHAPES, make_tokenizer, model_folder

SERVED = "bench"
ADDED, FIRST = 1.10, 0.8  # limits: server to bare engine, time to first token to vLLM's
POOL_TOKENS, LONGEST = 65_536, 4096
Ids = list[int]


@dataclass
class Ask:
    """One request: a prompt, or what is added to the conversation so far."""

    prompt: Ids
    count: int
    goes_on: bool = False


@dataclass
class Timing:
    """What the clients of one run saw. Seconds, but for counts."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """Medians, the 99th percentile, and rates."""
        ordered = sorted(self.first)
        return {
            "first_p50_ms": 1000 * statistics.median(ordered),
            "first_p99_ms": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "per_token_ms": 1000 * statistics.median(self.per_token),
            "tokens_per_s": self.output_tokens / self.seconds,
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "seconds": self.seconds,
        }


def tokens(rng: random.Random, count: int, vocab: int) -> Ids:
    """Random token ids, none of which is special."""
    return [rng.randrange(300, vocab - 1) for _ in range(count)]


def chat(rng: random.Random, vocab: int, client: int) -> list[Ask]:
    """Three turns behind one of eight system prompts."""
    system = tokens(random.Random(f"system {client % 8}"), 512, vocab)
    said = [tokens(rng, 64, vocab) for _ in range(3)]
    return [Ask(system + said[0], 32), *(Ask(one, 32, goes_on=True) for one in said[1:])]


def document(rng: random.Random, vocab: int, client: int) -> list[Ask]:
    """Three questions about one of four documents."""
    text = tokens(random.Random(f"document {client % 4}"), 2000, vocab)
    return [Ask(text + tokens(rng, 32, vocab), 16) for _ in range(3)]


def short(rng: random.Random, vocab: int, client: int) -> list[Ask]:
    """Three prompts that have nothing in common."""
    return [Ask(tokens(rng, 96, vocab), 16) for _ in range(3)]


LOADS: dict[str, Callable[[random.Random, int, int], list[Ask]]] = {
    "chat": chat,
    "document": document,
    "short": short,
}
Stream = Callable[[Ids, int], AsyncIterator[tuple[int, dict[str, Any] | None]]]


async def run_load(stream: Stream, load: str, clients: int, vocab: int, seed: str) -> Timing:
    """Let so many clients ask at once; each waits for its answer before it asks on."""
    timing = Timing()

    async def run_client(client: int) -> None:
        rng = random.Random(f"{seed} {client}")
        so_far: Ids = []
        for ask in LOADS[load](rng, vocab, client):
            so_far = so_far + ask.prompt if ask.goes_on else ask.prompt
            start = time.perf_counter()
            first = last = 0.0
            seen = 0
            async for count, usage in stream(so_far, ask.count):
                if count:
                    last = time.perf_counter()
                    first = first or last
                    seen += count
                if usage is not None:
                    timing.prompt_tokens += usage["prompt_tokens"]
                    timing.output_tokens += usage["completion_tokens"]
                    timing.cached_tokens += usage["cached_tokens"]
            timing.first.append(first - start)
            timing.per_token.append((last - first) / (ask.count - 1))
            # An answer's ids are not told over HTTP; any go on as well.
            so_far = so_far + tokens(rng, ask.count, vocab)

    start = time.perf_counter()
    await asyncio.gather(*(run_client(client) for client in range(clients)))
    timing.seconds = time.perf_counter() - start
    return timing


def over_http(session: aiohttp.ClientSession, url: str) -> Stream:
    """Answers streamed by an OpenAI-compatible server."""

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


async def ask_server(url: str, load: str, clients: int, vocab: int, seed: str) -> Timing:
    """A load over HTTP."""
    limit = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
        return await run_load(over_http(session, url), load, clients, vocab, seed)


@contextmanager
def server(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """A server of this command line; `PORT` in it stands for a free one. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [word.replace("PORT", port) for word in command]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | environment
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_healthy(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when the process ends, or does not answer within ten minutes."""
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
    """The engine without HTTP, in a process of its own."""
    command = [sys.executable, __file__, "--engine", str(folder), "--threads", str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        read, write = process.stdout, process.stdin
        read.readline()

        def ask(load: str, clients: int, vocab: int, seed: str) -> Timing:
            print(json.dumps([load, clients, vocab, seed]), file=write, flush=True)
            return Timing(**json.loads(read.readline()))

        yield ask
        write.close()


def be_the_engine(folder: str, threads: int) -> None:
    """Read loads, a line each, and print what was seen of each."""
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
    """The options of our engine in every process."""
    return {
        "num_threads": threads,
        "num_blocks": POOL_TOKENS // 16,
        "max_model_len": LONGEST,
        "max_num_seqs": 64,
    }


def our_command(folder: Path, threads: int, *more: str) -> list[str]:
    """`headstart serve` with the options of `engine_options`."""
    options = [
        word
        for name, value in engine_options(threads).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    served = ["--served-model-name", SERVED, "--port", "PORT"]
    return [sys.executable, "-m", "headstart", "serve", "--model", str(folder), *served, *options,
            *more]  # fmt: skip


def their_command(folder: Path, venv: Path) -> list[str]:
    """`vllm serve` with the same."""
    return [
        *(str(venv / "bin" / "vllm"), "serve", str(folder), "--served-model-name", SERVED),
        *("--port", "PORT", "--host", "127.0.0.1", "--max-model-len", str(LONGEST)),
        *("--max-num-seqs", "64", "--enable-prompt-tokens-details", "--dtype", "bfloat16"),
        *("--block-size", "16"),
    ]


def prepare_model(shape: str) -> Path:
    """The folder of a shape, with a tokenizer, which servers want."""
    folder = model_folder(shape)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(shape).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the rounds of what each kind of server showed, by load and clients."""
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
    seen: dict[str, dict[str, list[dict[str, float]]]] = {}
    cells = [(load, clients) for load in options.loads for clients in options.clients]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=options.rounds * (len(kinds) + 1) * len(cells))

        def note(kind: str, load: str, clients: int, timing: Timing) -> None:
            cell = seen.setdefault(f"{load} x{clients}", {})
            cell.setdefault(kind, []).append(timing.summary())
            progress.advance(task)

        for at in range(options.rounds):
            for kind, command in kinds.items():
                with server(command, environment) as url:
                    asyncio.run(ask_server(url, "short", 2, vocab, "warm up"))
                    for load, clients in cells:
                        seed = f"{load} {clients} {at}"
                        timing = asyncio.run(ask_server(url, load, clients, vocab, seed))
                        note(kind, load, clients, timing)
            with bare_engine(folder, options.threads) as ask:
                ask("short", 2, vocab, "warm up")
                for load, clients in cells:
                    note(
                        "engine", load, clients, ask(load, clients, vocab, f"{load} {clients} {at}")
                    )
    return {
        cell: {
            kind: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
            for kind, runs in by_kind.items()
        }
        for cell, by_kind in seen.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """The table, and the shares that have a limit."""
    columns = {
        "first token, median ms": "first_p50_ms",
        "p99 ms": "first_p99_ms",
        "a token ms": "per_token_ms",
        "tokens/s": "tokens_per_s",
        "hit rate": "hit_rate",
    }
    table = Table(
        "load", "", *columns, f"of engine's time (<= {ADDED})", f"of vLLM's first (<= {FIRST})"
    )
    for cell, by_kind in results.items():
        for kind, row in by_kind.items():
            added = row["seconds"] / by_kind["engine"]["seconds"] if kind == "cache" else None
            peer = by_kind.get("vLLM") if kind == "cache" else None
            share = row["first_p50_ms"] / peer["first_p50_ms"] if peer is not None else None
            numbers = [f"{row[name]:,.{3 if row[name] < 10 else 0}f}" for name in columns.values()]
            shares = ["" if one is None else f"{one:.2f}" for one in (added, share)]
            table.add_row(cell, kind, *numbers, *shares)
    Console(width=120).print(table)
    print(json.dumps(results))


def main() -> None:
    """Read the options, measure, show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="small-llama", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="a virtual environment with vLLM")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        be_the_engine(options.engine, options.threads)
        return
    show(measure(options))


if __name__ == "__main__":
    main()
