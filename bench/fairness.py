"""Effects of one tenant's flood of requests on another tenant: hit rate and time to first token.

    python bench/fairness.py [--questions 60] [--flooders 24] [--answer 8] [--defaults]

One tenant sends questions about four documents, one at a time. It does so alone, and while another
tenant always has `--flooders` requests open, each with a new prompt. With keys, the flood may lower
the hit rate by at most 5 points and double the 99th percentile of the time to first token. The run
without keys shows the effect without this protection. The server is a separate process with the
demo model; requests go over a socket.

`--defaults` measures a server with default options: steps of 2,048 tokens, a pool that holds
everything, questions that hit except for their last 20 tokens, and flood prompts of 1,500 tokens.

A few questions alone alternate with a few questions during a flood, so that other load on the
machine affects both. Questions count only after half of the flood's first requests have been
answered. The flood's clients disconnect at its end.

Limiting factors: a question waits for the current step, and the flood's tokens fill up every step
of the question's own prompt. All clients run in one thread on the same machine; the benchmark
prints their share of a core. Ends in one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
from rich.console import Console
from rich.table import Table
from serving import Answer, Server, serving

HITS, TIMES = 0.05, 2.0
DOCUMENT, DOCUMENTS = 960, 4
SMALL = ["--max-num-batched-tokens", "128", "--num-blocks", "1024", "--max-num-seqs", "16"]
TURN = 6  # questions alone, and then as many during a flood


def text(rng: random.Random, count: int) -> str:
    """Return a string of `count` tokens: the demo model has a token for each byte."""
    return "".join(chr(rng.randrange(97, 123)) for _ in range(count))


class Asker:
    """A tenant that sends questions about the documents in turn."""

    def __init__(self, server: Server, question: int) -> None:
        self._server, self._question = server, question
        self._random = random.Random(0)
        self._documents = [text(self._random, DOCUMENT) for _ in range(DOCUMENTS)]
        self._asked = 0

    def ask(self, questions: int) -> list[Answer]:
        """Send questions one after another; return their answers."""
        return [self._ask() for _ in range(questions)]

    def _ask(self) -> Answer:
        prompt = self._documents[self._asked % DOCUMENTS] + text(self._random, self._question)
        self._asked += 1
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
        return self._server.ask("asker", "/v1/completions", body)


class Flood:
    """Another tenant, which always has requests open, in a separate thread."""

    def __init__(self, server: Server, flooders: int, answer: int, shortest: int) -> None:
        self._server, self._flooders, self._answer = server, flooders, answer
        self._shortest = shortest
        self._random = random.Random(100)
        self.answered = 0
        self.seconds = self.cpu = 0.0  # its duration, and the CPU time of this process
        self._is_on = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Flood within a context, which begins when half of the first requests are answered."""
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._flood())

        def run() -> None:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()

        start = time.perf_counter(), time.process_time()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not self._is_on.wait(1):
                assert thread.is_alive(), "the flood failed"
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            self._is_on.clear()
            self.seconds += time.perf_counter() - start[0]
            self.cpu += time.process_time() - start[1]

    async def _flood(self) -> None:
        first = self.answered
        headers = self._server.headers("flood")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=600, limits=limits, headers=headers
        ) as client:

            async def keep_asking() -> None:
                while True:
                    prompt = text(self._random, self._random.randrange(self._shortest, 1501))
                    body = {"model": "demo", "prompt": prompt, "max_tokens": self._answer}
                    sent = {**body, "stream": True}
                    (await client.post("/v1/completions", json=sent)).raise_for_status()
                    self.answered += 1
                    if self.answered - first >= self._flooders // 2:
                        self._is_on.set()

            async with asyncio.TaskGroup() as group:
                for _ in range(self._flooders):
                    group.create_task(keep_asking())


def percentile(times: Sequence[float], share: int) -> float:
    """Return a percentile."""
    return sorted(times)[min(len(times) - 1, len(times) * share // 100)]


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the hit rate of answers, and percentiles of their time to first token."""
    times = [answer.first_token for answer in answers]
    return {
        "hit_rate": sum(one.cached for one in answers) / sum(one.prompt for one in answers),
        "median_s": statistics.median(times),
        "p90_s": percentile(times, 90),
        "p99_s": percentile(times, 99),
    }


def measure(asker: Asker, flood: Flood, questions: int) -> dict[str, dict[str, float]]:
    """Measure questions alone and questions during the flood, a few of each in turn."""
    asker.ask(DOCUMENTS)
    answers: dict[str, list[Answer]] = {"alone": [], "flooded": []}
    while (left := questions - len(answers["alone"])) > 0:
        answers["alone"] += asker.ask(min(TURN, left))
        with flood.going_on():
            answers["flooded"] += asker.ask(min(TURN, left))
        asker.ask(1)  # by its answer, the server has noticed that the flood's clients left
    return {when: figures_of(given) for when, given in answers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--flooders", type=int, default=24)
    parser.add_argument("--answer", type=int, default=8, help="tokens of the flood's answers")
    parser.add_argument("--defaults", action="store_true", help="a server without options")
    options = parser.parse_args()
    names = "median", "p90", "p99"
    table = Table("time to the first token", "hits", *names, "the flood's answers")
    figures: dict[str, float] = {}
    engine, question, shortest = ([], 20, 1500) if options.defaults else (SMALL, 320, 100)
    # Without keys every question waits for the whole flood, so a few questions are enough.
    modes = (("keys", ("asker", "flood"), options.questions), ("open", (), 4))
    for mode, tenants, questions in modes:
        with serving("demo", tenants, engine) as server:
            asker = Asker(server, question)
            flood = Flood(server, options.flooders, options.answer, shortest)
            for when, found in measure(asker, flood, questions).items():
                hits, times = f"{found['hit_rate']:.1%}", [found[f"{name}_s"] for name in names]
                count = flood.answered if when == "flooded" else 0
                row = [hits, *(f"{1000 * seconds:.0f} ms" for seconds in times)]
                print(mode, when, *row, flush=True)
                table.add_row(f"{mode}, {when}", *row, f"{count:,}")
                figures |= {f"{mode}_{when}_{name}": round(v, 4) for name, v in found.items()}
            figures[f"{mode}_flood_per_s"] = round(flood.answered / flood.seconds, 2)
            figures[f"{mode}_client_cores"] = round(flood.cpu / flood.seconds, 3)
    lost = figures["keys_alone_hit_rate"] - figures["keys_flooded_hit_rate"]
    slower = {n: figures[f"keys_flooded_{n}_s"] / figures[f"keys_alone_{n}_s"] for n in names}
    Console().print(table)
    Console().print(
        f"lost {lost:.1%} (limit {HITS:.0%}), "
        + ", ".join(f"{name} x {ratio:.2f}" for name, ratio in slower.items())
        + f" (limit {TIMES:g} of p99); the clients took {figures['keys_client_cores']:.0%} of a "
        f"core, and the machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    figures |= {"lost": round(lost, 4), "p99_ratio": round(slower["p99"], 2)}
    figures |= {"load": os.getloadavg()[0]}
    print(json.dumps(figures | {"within_limits": lost <= HITS and slower["p99"] <= TIMES}))


if __name__ == "__main__":
    main()
