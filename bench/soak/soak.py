"""Robustness test: the server under misbehaving clients for minutes.

    python bench/soak/soak.py [--minutes 10] [--clients 12] [--seed 0] [--replicas 2 | --hybrid]

The server of headstart-tiny runs in a separate process, with a pool that is too small for its load.
Clients use all its APIs at once, and most misbehave: they disconnect before, during and after an
answer, send half a body, read slowly, and send invalid JSON, wrong types, prompts that are too long
and bursts beyond the queue. Other requests inspect, fill and empty the cache.

    answers   six questions always get the same answers as before the test
    errors    no answer has a status of 500 or more; 429 is allowed for a full queue
    pool      all invariants hold, checked every few seconds; at the end no block is held, in any
              replica
    memory    its median in the last third is at most 1.02 times the median of the second third;
              with replicas, only the server's process counts

With --hybrid the model has recurrent layers: a tiny Qwen3.5 with random weights and the tokenizer
of headstart-tiny. At the end all its slots for states are free, except the slots of checkpoints.

With --replicas several engines on a separate Ray answer; each checks its pool after every step.
Every 20 s a running replica is killed, or stopped for some seconds, and 1 in 5 cache messages is
lost. Only streams that a killed replica had begun may end with an error.

Ends in one JSON line, and with status 1 if a condition is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import torch
from rich.console import Console
from rich.progress import Progress
from server import MODEL, WAITING
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from headstart.models.files import find_folder

SERVER = Path(__file__).with_name("server.py")
HARM = 20  # seconds between two attacks on a replica
GROWTH = 1.02  # limit of memory: last third relative to second third
NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fred")
TABLE = "\n".join(f"{name} is {31 + 7 * at} years old." for at, name in enumerate(NAMES))
ODD: list[Any] = [None, -1, 10**30, 1.5, "", "\ud800", [], {}, [[]], True, "x" * 5000, {"a": {}}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

Json = dict[str, Any]
progress = Console(stderr=True, highlight=False)


@dataclass
class Soak:
    """Requests to the server, and their results."""

    url: str
    rng: random.Random
    session: aiohttp.ClientSession
    known: dict[str, str] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # process ids of running replicas

    async def wait_until_ready(self) -> None:
        """Wait until the server accepts connections; it prints its port before that."""
        while True:
            with suppress(aiohttp.ClientConnectorError):
                async with self.session.get(f"{self.url}/health"):
                    return
            await asyncio.sleep(0.1)

    async def post(self, path: str, body: Json) -> tuple[int, str]:
        """Send a request; return status and text of the answer."""
        async with self.session.post(self.url + path, json=body) as response:
            return self.note(path, response.status, await response.text())

    def note(self, path: str, status: int, text: str) -> tuple[int, str]:
        """Count an answer; record a fault if no client should get it."""
        self.statuses[status] += 1
        if status >= 500:
            self.faults.append(f"{path}: {status} {text[:200]}")
        return status, text

    def chat(self, **more: Any) -> Json:
        """Return a question about a table, whose first lines many questions share."""
        text = question(self.rng.choice(NAMES)) if self.rng.random() < 0.7 else self.noise(200)
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 24}
        return body | more

    def noise(self, most: int) -> str:
        count = self.rng.randrange(1, most)
        return " ".join(self.rng.choice(["old", "is", "3", "the", "?"]) for _ in range(count))


def question(name: str) -> str:
    """Return a question about the table."""
    return f"{TABLE}\nHow old is {name}?"


async def known_answer(soak: Soak, name: str | None = None) -> None:
    """Check that a greedy answer equals the first answer to its question."""
    name = name or soak.rng.choice(NAMES)
    messages = [{"role": "user", "content": question(name)}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
    status, text = await soak.post("/v1/chat/completions", body)
    if status == 200:
        said = json.loads(text)["choices"][0]["message"]["content"]
        soak.done["known answers"] += 1
        if soak.known.setdefault(name, said) != said:
            soak.faults.append(f"{name}: {soak.known[name]!r} became {said!r}")


async def conversation(soak: Soak) -> None:
    """Run a chat of several turns, and rephrase the last turn: a fork."""
    messages: list[Json] = [{"role": "system", "content": soak.rng.choice([TABLE, "old"])}]
    for _ in range(soak.rng.randrange(1, 4)):
        messages.append({"role": "user", "content": soak.noise(20)})
        for fork in range(soak.rng.choice([1, 1, 2])):
            if fork:
                messages[-2:] = [{"role": "user", "content": soak.noise(20)}]
                soak.done["forks"] += 1
            body = soak.chat(messages=messages, max_tokens=soak.rng.randrange(1, 24))
            status, text = await soak.post("/v1/chat/completions", body)
            if status != 200:
                return
            messages.append(json.loads(text)["choices"][0]["message"])


async def streamed(soak: Soak) -> None:
    """Read a stream to its end, read it slowly, or disconnect within it."""
    body = soak.chat(stream=True, n=soak.rng.choice([1, 1, 2]))
    leaves = soak.rng.choice([None, 0, 1, 3])
    slow = soak.rng.random() < 0.2
    async with soak.session.post(soak.url + "/v1/chat/completions", json=body) as response:
        soak.note("stream", response.status, "")
        at = 0
        async for line in response.content:
            soak.done["streams that broke off"] += b"replica_lost" in line
            if at == leaves:
                soak.done["left streams"] += 1
                response.close()
                return
            if slow:
                await asyncio.sleep(0.05)
            at += 1


async def left_early(soak: Soak) -> None:
    """Disconnect before the answer."""
    task = asyncio.ensure_future(soak.post("/v1/chat/completions", soak.chat(max_tokens=64)))
    await asyncio.sleep(soak.rng.random() * 0.2)
    if not task.done():
        soak.done["left before the answer"] += 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def half_a_body(soak: Soak) -> None:
    host, port = soak.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f'{head}Content-Length: 1000\r\n\r\n{{"model": '.encode())
    await writer.drain()
    await asyncio.sleep(soak.rng.random() * 0.1)
    writer.close()


async def no_json(soak: Soak) -> None:
    bad = soak.rng.choice([b"", b"{", b"[" * 20_000, b"\xff\xfe", b'{"model": NaN}', b"null"])
    headers = {"Content-Type": "application/json"}
    path = soak.rng.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
    async with soak.session.post(soak.url + path, data=bad, headers=headers) as response:
        soak.note(path, response.status, await response.text())


async def odd_values(soak: Soak) -> None:
    body = soak.chat(stream=False)
    names = ["messages", "max_tokens", "temperature", "n", "stop", "logit_bias", "tools", "seed"]
    for name in soak.rng.sample(names, 2):
        body[name] = soak.rng.choice(ODD)
    await soak.post("/v1/chat/completions", body)


async def too_long(soak: Soak) -> None:
    content = "old " * soak.rng.choice([600, 5000, 50_000])
    await soak.post("/v1/completions", {"model": MODEL, "prompt": content, "max_tokens": 4})


async def other_apis(soak: Soak) -> None:
    text = soak.noise(60)
    schema = {"name": "age", "schema": SCHEMA}
    path, body = soak.rng.choice(
        [
            ("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 16}),
            ("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 8, "logprobs": 2}),
            (
                "/v1/messages",
                {
                    "model": MODEL,
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": text}],
                    "system": [
                        {"type": "text", "text": TABLE, "cache_control": {"type": "ephemeral"}}
                    ],
                },
            ),
            (
                "/v1/chat/completions",
                soak.chat(response_format={"type": "json_schema", "json_schema": schema}),
            ),
        ]
    )
    await soak.post(path, body)


async def cache_calls(soak: Soak) -> None:
    path = soak.rng.choice(["explain", "prewarm", "reset", "", "advice", "metrics", "live"])
    if path in ("explain", "prewarm"):
        await soak.post(f"/cache/{path}", {"model": MODEL, "prompt": soak.noise(100)})
    elif path == "reset":
        await soak.post("/cache/reset", {})
    else:
        where = "/metrics" if path == "metrics" else f"/cache/{path}".rstrip("/")
        async with soak.session.get(soak.url + where) as response:
            first = await response.content.read(100)
            soak.note(where, response.status, first.decode(errors="replace"))
            response.close()  # the live stream never ends


async def burst(soak: Soak) -> None:
    asked = [soak.post("/v1/chat/completions", soak.chat()) for _ in range(3 * WAITING)]
    answers = await asyncio.gather(*asked)
    soak.done["refused by a full queue"] += sum(status == 429 for status, _ in answers)


WAYS: list[tuple[Callable[[Soak], Awaitable[None]], int]] = [
    (known_answer, 8),
    (conversation, 6),
    (streamed, 8),
    (left_early, 4),
    (half_a_body, 2),
    (no_json, 2),
    (odd_values, 3),
    (too_long, 1),
    (other_apis, 6),
    (cache_calls, 3),
    (burst, 1),
]


async def client(soak: Soak, until: float) -> None:
    ways, weights = zip(*WAYS, strict=True)
    while time.monotonic() < until:
        [way] = soak.rng.choices(ways, weights)
        try:
            await way(soak)
        except (aiohttp.ClientError, OSError) as error:
            soak.faults.append(f"{way.__name__}: {type(error).__name__}: {error}")
        soak.done[way.__name__] += 1


async def harm(soak: Soak, until: float) -> None:
    """Kill or stop a running replica from time to time, but never the last one."""
    while time.monotonic() < until - 2 * HARM:
        await asyncio.sleep(HARM)
        while len(soak.replicas) < 2:  # wait until a replica is back
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.1)
        victim = soak.rng.choice(soak.replicas)
        kills = soak.rng.random() < 0.5
        soak.done["killed" if kills else "stopped for a while"] += 1
        os.kill(victim, signal.SIGKILL if kills else signal.SIGSTOP)
        soak.replicas.remove(victim)
        if not kills:
            await asyncio.sleep(soak.rng.uniform(1, 10))
            os.kill(victim, signal.SIGCONT)


class Server:
    """The server's process, which reports its pool and memory on request."""

    def __init__(self, replicas: int, model: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, str(SERVER), str(replicas), model]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.url = f"http://127.0.0.1:{self._read()['port']}"

    def ask(self) -> Json:
        """Check the pool; return its blocks, its free blocks, and the memory in MB."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        results = self._read()
        if "error" in results:
            raise RuntimeError(f"the pool's check failed: {results['error']}")
        return results

    def close(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(60)

    def _read(self) -> Json:
        assert self.process.stdout is not None
        results: Json = json.loads(self.process.stdout.readline())
        return results


async def soak_server(server: Server, options: argparse.Namespace) -> Json:
    """Run the test until its time is over; return its results."""
    memory: list[float] = []
    start = time.monotonic()
    until = start + options.minutes * 60
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        soak = Soak(server.url, random.Random(options.seed), session)
        await soak.wait_until_ready()
        for name in NAMES:
            await known_answer(soak, name)
        clients = [asyncio.ensure_future(client(soak, until)) for _ in range(options.clients)]
        if options.replicas:
            clients.append(asyncio.ensure_future(harm(soak, until)))
        with Progress(console=progress) as shown:
            bar = shown.add_task("soaking", total=options.minutes * 60)
            while any(not one.done() for one in clients):
                await asyncio.sleep(2)
                results = await asyncio.to_thread(server.ask)
                memory.append(results["megabytes"])
                soak.replicas = results.get("replicas", [])
                about = f"{sum(soak.statuses.values())} answers, {len(soak.faults)} faults"
                shown.update(bar, completed=time.monotonic() - start, description=about)
        await asyncio.gather(*clients)
    last = await asyncio.to_thread(server.ask)
    for _ in range(100):  # disconnected clients are noticed within a step
        if last["free"] == last["blocks"]:
            break
        await asyncio.sleep(0.1)
        last = await asyncio.to_thread(server.ask)
    third = len(memory) // 3
    second, final = (statistics.median(part) for part in (memory[third:-third], memory[-third:]))
    if last["free"] != last["blocks"]:
        soak.faults.append(f"{last['blocks'] - last['free']} blocks are held without a request")
    if last.get("slots", 0) != last.get("checkpoints", 0) + last.get("free_slots", 0):
        soak.faults.append("slots for states are held without a request")
    if final > GROWTH * second:
        soak.faults.append(f"memory grew from {second:.1f} to {final:.1f} MB in the last third")
    return {
        "minutes": options.minutes,
        "did": dict(soak.done),
        "statuses": {str(status): count for status, count in sorted(soak.statuses.items())},
        "megabytes": [
            round(statistics.median(memory[:third]), 1),
            round(second, 1),
            round(final, 1),
        ],
        **{name: last[name] for name in ("slots", "checkpoints", "dropped") if name in last},
        "faults": soak.faults[:20],
    }


def make_hybrid(folder: Path) -> str:
    """Write a tiny model with recurrent layers, and headstart-tiny's tokenizer, into a folder."""
    tiny = find_folder(MODEL)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder)
    config = Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large values, so that answers depend on the prompt
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--hybrid", action="store_true")
    options = parser.parse_args()
    if options.hybrid and options.replicas:
        parser.error("--hybrid and --replicas exclude each other")
    with TemporaryDirectory() as folder:
        server = Server(options.replicas, make_hybrid(Path(folder)) if options.hybrid else MODEL)
        try:
            results = asyncio.run(soak_server(server, options))
        finally:
            status = server.close()
    if status:
        results["faults"].append(f"the server ended with {status}")
    print(json.dumps(results))
    sys.exit(bool(results["faults"]))


if __name__ == "__main__":
    main()
