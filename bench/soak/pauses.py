"""Longest pauses of the server's event loop during long request bodies; all streams wait for them.

    python bench/soak/pauses.py [--mb 2] [--rounds 3]

A server of headstart-tiny accepts prompts of 131,072 tokens, and another process sends one body at
a time. The figure is the longest time between two iterations of the loop: wall time, and CPU time
of the server's process, which other programs do not affect. The CPU time includes the loop's own
work and single calls in C, during which no other Python thread can run. It is too large if another
thread computes without the interpreter's lock (a tokenizer) while the loop waits for a core. The
limit is 20 ms for bodies of 2 MB. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from headstart import AsyncLLM
from headstart.models.files import BUILT_IN, find_folder
from headstart.server.launch import HttpServer, create_app, listen, new_event_loop
from headstart.server.options import ServerOptions

LIMIT = 0.020  # seconds
LINE = "Anna is 31 years old, and Ben is 45 years old.\n"
CLIENT = """
import sys, urllib.error, urllib.request
for line in sys.stdin:
    url, path = line.split()
    data = open(path, "rb").read()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        print(urllib.request.urlopen(asked).status, flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
"""


class Pause(NamedTuple):
    """The longest time between two iterations of the loop, in seconds of wall and CPU time."""

    clock: float
    cpu: float


class Beat:
    """A task that measures the longest time between two iterations of the loop."""

    def __init__(self) -> None:
        self._longest = Pause(0, 0)
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        clock, cpu = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0.0005)
            now, used = time.perf_counter(), time.process_time()
            waited = Pause(now - clock, used - cpu)
            self._longest = Pause(*map(max, self._longest, waited))
            clock, cpu = now, used

    def take(self) -> Pause:
        """Return the longest pause since the last call."""
        longest, self._longest = self._longest, Pause(0, 0)
        return longest


def bodies(num_bytes: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the requests: name, path, and a body of about `num_bytes` bytes."""
    text = LINE * (num_bytes // len(LINE))
    ids = [random.randrange(100, 2000) for _ in range(num_bytes // 6)]
    parts = [{"type": "text", "text": LINE}] * (num_bytes // 78)  # too many tokens to be computed

    def chat(content: object) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

    yield "text", "/v1/completions", {"prompt": text}
    yield "chat", "/v1/chat/completions", chat(text)
    yield "chat, accents", "/v1/chat/completions", chat("é漢" * (num_bytes // 12))
    yield "parts of a chat", "/v1/chat/completions", chat(parts)
    yield "parts, Anthropic", "/v1/messages", {"model": BUILT_IN, **chat(parts[:19_900])}
    items = {"model": BUILT_IN, "input": chat(LINE)["messages"] * min(19_900, num_bytes // 90)}
    yield "items, Responses", "/v1/responses", items
    yield "token ids", "/v1/completions", {"prompt": ids}
    prompts = [ids[:4000]] * (len(ids) // 4000)  # only the first must be computed
    yield "prompts of ids", "/v1/completions", {"prompt": prompts, "max_tokens": 1}
    yield "wrong ids", "/v1/completions", {"prompt": [1.5] * min(num_bytes // 5, 260_000)}
    yield "stop_token_ids", "/v1/completions", {"prompt": "a", "stop_token_ids": ids}
    yield "/tokenize", "/tokenize", {"prompt": text}
    yield "/detokenize", "/detokenize", {"tokens": ids[:131_072]}


@contextmanager
def long_model(longest: int) -> Iterator[Path]:
    """Make a copy of headstart-tiny with more positions; its answers are irrelevant here."""
    with tempfile.TemporaryDirectory() as folder:
        for file in find_folder(BUILT_IN).iterdir():
            if file.name != "config.json":
                Path(folder, file.name).symlink_to(file)
        config = json.loads((find_folder(BUILT_IN) / "config.json").read_text())
        config["max_position_embeddings"] = longest
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


class Client:
    """A process that sends requests. It is started early, as a start blocks the loop for 20 ms."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", CLIENT]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1)
        self._url = url

    def send(self, path: str, file: str) -> str:
        """Send the body in a file; return the status of the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self._url}{path} {file}\n")
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def measure(url: str, args: argparse.Namespace) -> list[tuple[str, str, int, Pause, Pause]]:
    """Return for each body: name, bytes, status, and the longest pause without and with it."""
    beat = Beat()
    rows = []
    with closing(Client(url)) as client, tempfile.NamedTemporaryFile("w") as file:
        for name, path, body in bodies(int(args.mb * 1e6)):
            content = json.dumps(body)
            file.truncate(0)
            file.seek(0)
            file.write(content)
            file.flush()
            alone, beside, status = [], [], ""
            for _ in range(args.rounds):
                beat.take()
                await asyncio.sleep(0.5)
                alone.append(beat.take())
                status = await asyncio.to_thread(client.send, path, file.name)
                beside.append(beat.take())
            rows.append((name, status, len(content), min(alone), min(beside)))
    return rows


async def run(app: FastAPI, args: argparse.Namespace) -> list[Any]:
    """Run the server during the measurement."""
    with listen(ServerOptions(port=0)) as address:
        server = HttpServer(app, address)
        await server.start()
        try:
            return await measure(f"http://127.0.0.1:{address.getsockname()[1]}", args)
        finally:
            await server.stop(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2.0, help="bytes of a body, in millions")
    parser.add_argument("--rounds", type=int, default=3, help="the shortest pause counts")
    args = parser.parse_args()
    options = ServerOptions(api_keys=False)
    with long_model(1 << 17) as folder, closing(AsyncLLM(folder, num_blocks=1 << 13)) as llm:
        app = create_app(llm, BUILT_IN, options)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            rows = runner.run(run(app, args))
    table = Table("body", "MB", "status", "clock, ms", "CPU, ms", "CPU idle, ms")
    for name, status, size, alone, beside in rows:
        ms = [f"{value * 1e3:.1f}" for value in (*beside, alone.cpu)]
        table.add_row(name, f"{size / 1e6:.1f}", status, *ms)
    Console(width=100).print(table)
    worst = max(beside.cpu for *_, beside in rows)
    found = {name: [round(ms * 1e3, 1) for ms in beside] for name, *_, beside in rows}
    print(json.dumps({"mb": args.mb, "clock_cpu_ms": found, "within": worst <= LIMIT}))


if __name__ == "__main__":
    main()
