"""Effects of one tenant's flood on another: its hit rate, and its time to the first token.

    python bench/fairness.py [--questions 60] [--flooders 24] [--answer 8] [--defaults]

One tenant asks questions about four documents, one at a time, alone and while another keeps
`--flooders` requests open, each a prompt that was never sent before. With keys the hit rate
must stay within 5 points, and the 99th percentile of the time to the first token within 2 x of
what it is alone. The same without keys shows what the flood does to who is not protected. All over
a socket, to a server in a process of its own, with the demo model.

`--defaults` measures what a server without options does: steps of 2,048 tokens, a pool that holds
everything, questions that are hits up to their last 20 tokens, and a flood of 1,500 tokens each.

Questions alone and beside a flood take turns, a few at a time, so that what else the machine does
meets both. A flood has had an answer for every second of its requests before a question counts, and
its clients hang up at its end.

What limits it: a step that is under way when a question comes is waited for, and every step of the
question's own prompt is filled up by the flood's. The clients that flood share the machine, and are
one thread: the share of a core that they and the asker take is printed. Ends in one JSON line.
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
TURN = 6  # questions alone, and then as many beside a flood


def text(rng: random.Random, count: int) -> str:
    """A text of so many tokens: the demo model has one for each byte."""
    return "".join(chr(rng.randrange(97, 123)) for _ in range(count))


class Asker:
    """Asks about the documents in turn."""

    def __init__(self, server: Server, question: int) -> None:
        self._server, self._question = server, question
        self._random = random.Random(0)
        self._documents = [text(self._random, DOCUMENT) for _ in range(DOCUMENTS)]
        self._asked = 0

    def ask(self, questions: int) -> list[Answer]:
        """The answers to so many questions, one after another."""
        return [self._ask() for _ in range(questions)]

    def _ask(self) -> Answer:
        prompt = self._documents[self._asked % DOCUMENTS] + text(self._random, self._question)
        self._asked += 1
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
        return self._server.ask("asker", "/v1/completions", body)


class Flood:
    """Another tenant, who keeps requests open from a thread of his own."""

    def __init__(self, server: Server, flooders: int, answer: int, shortest: int) -> None:
        self._server, self._flooders, self._answer = server, flooders, answer
        self._shortest = shortest
        self._random = random.Random(100)
        self.answered = 0
        self.seconds = self.cpu = 0.0  # that it lasted, and that this process computed meanwhile
        self._is_on = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Flood meanwhile; half of its requests have been answered when this begins."""
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
                assert thread.is_alive(), "the flood broke off"
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
    """Return a percentile of these times."""
    return sorted(times)[min(len(times) - 1, len(times) * share // 100)]


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """The hit rate of these answers, and how long they took to begin."""
    times = [answer.first_token for answer in answers]
    return {
        "hit_rate": sum(one.cached for one in answers) / sum(one.prompt for one in answers),
        "median_s": statistics.median(times),
        "p90_s": percentile(times, 90),
        "p99_s": percentile(times, 99),
    }


def measure(asker: Asker, flood: Flood, questions: int) -> dict[str, dict[str, float]]:
    """So many questions alone, and as many beside the flood, a few of each in turn."""
    asker.ask(DOCUMENTS)
    answers: dict[str, list[Answer]] = {"alone": [], "flooded": []}
    while (left := questions - len(answers["alone"])) > 0:
        answers["alone"] += asker.ask(min(TURN, left))
        with flood.going_on():
            answers["flooded"] += asker.ask(min(TURN, left))
        asker.ask(1)  # by then the server has noticed that the flood is gone
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
    # Without keys every question waits for the whole flood: a few show it.
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
        f"core, and the machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} of them"
    )
    figures |= {"lost": round(lost, 4), "p99_ratio": round(slower["p99"], 2)}
    figures |= {"load": os.getloadavg()[0]}
    print(json.dumps(figures | {"within_limits": lost <= HITS and slower["p99"] <= TIMES}))


if __name__ == "__main__":
    main()
