"""What a tenant notices of another's flood: its hits, and its time to the first token.

    python bench/fairness.py [--questions 60] [--flooders 24]

One tenant asks questions about four documents, one at a time, first alone and then while another
keeps `--flooders` requests open, each a prompt that was never sent before. With keys the hit rate
must stay within 5 points, and the 99th percentile of the time to the first token within 2 x of
what it is alone. The same without keys shows what the flood does to who is not protected. All over
a socket, to a server in a process of its own, with the demo model.

What limits it: a step that is under way when a question comes is waited for, and every step of the
question's own prompt also computes a token for each of the flood's requests that run; and on one
machine the clients that flood take time of the CPU that serves. Ends in one JSON line.
"""

import argparse
import json
import random
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from serving import Server, serving

HITS, TIMES = 0.05, 2.0
DOCUMENT, QUESTION, DOCUMENTS = 960, 320, 4
STEP, BLOCKS = 128, 1024


def text(rng: random.Random, count: int) -> str:
    """A text of so many tokens: the demo model has one for each byte."""
    return "".join(chr(rng.randrange(97, 123)) for _ in range(count))


def ask(server: Server, questions: int, seed: int) -> dict[str, float]:
    """Ask one question after another; the first of each document does not count."""
    rng = random.Random(0)
    documents = [text(rng, DOCUMENT) for _ in range(DOCUMENTS)]
    rng = random.Random(seed)
    answers = []
    for at in range(questions + DOCUMENTS):
        prompt = documents[at % DOCUMENTS] + text(rng, QUESTION)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
        answers.append(server.ask("asker", "/v1/completions", body))
    counted = answers[DOCUMENTS:]
    times = sorted(answer.first_token for answer in counted)
    return {
        "hit_rate": sum(one.cached for one in counted) / sum(one.prompt for one in counted),
        "median_s": statistics.median(times),
        "p99_s": times[min(len(times) - 1, len(times) * 99 // 100)],
    }


@contextmanager
def flooded(server: Server, flooders: int) -> Iterator[list[int]]:
    """Another tenant keeps requests open meanwhile; the list grows with its answers."""
    over = threading.Event()
    answered: list[int] = []

    def flood(number: int) -> None:
        rng = random.Random(100 + number)
        while not over.is_set():
            prompt = text(rng, rng.randrange(100, 1500))
            body = {"model": "demo", "prompt": prompt, "max_tokens": 8}
            answered.append(server.ask("flood", "/v1/completions", body).prompt)

    threads = [threading.Thread(target=flood, args=[number]) for number in range(flooders)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        over.set()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--flooders", type=int, default=24)
    options = parser.parse_args()
    table = Table("", "hits", "median", "p99 of the time to the first token", "the flood's answers")
    figures: dict[str, float] = {}
    engine = ["--num-blocks", str(BLOCKS), "--max-num-batched-tokens", str(STEP)]
    # Without keys every question waits for the whole flood: a few show it.
    modes = (("keys", ("asker", "flood"), options.questions), ("open", (), 5))
    for mode, tenants, questions in modes:
        with serving("demo", tenants, [*engine, "--max-num-seqs", "16"]) as server:
            alone = ask(server, questions, 1)
            with flooded(server, options.flooders) as answered:
                beside = ask(server, questions, 2)
        for when, found, count in (("alone", alone, 0), ("flooded", beside, len(answered))):
            hits, times = f"{found['hit_rate']:.1%}", (found["median_s"], found["p99_s"])
            row = [hits, *(f"{seconds:.2f} s" for seconds in times)]
            print(mode, when, *row, flush=True)
            table.add_row(f"{mode}, {when}", *row, f"{count:,}")
            figures |= {f"{mode}_{when}_{name}": round(v, 4) for name, v in found.items()}
    lost = figures["keys_alone_hit_rate"] - figures["keys_flooded_hit_rate"]
    slower = figures["keys_flooded_p99_s"] / figures["keys_alone_p99_s"]
    Console().print(table)
    Console().print(f"lost {lost:.1%} (limit {HITS:.0%}), p99 x {slower:.2f} (limit {TIMES:g})")
    figures |= {"lost": round(lost, 4), "p99_ratio": round(slower, 2)}
    print(json.dumps(figures | {"within_limits": lost <= HITS and slower <= TIMES}))


if __name__ == "__main__":
    main()
