"""Information about another tenant's prompts that response times reveal.

    python bench/tenants.py [--prompts 300] [--images 100] [--answers 100]

The prompts are texts, texts after a public prefix that all tenants share, images, and texts after
the prefix whose answers are drafted.

A victim sends half of a set of prompts. A prober then sends all of them in random order, and
guesses which ones the victim has sent. It uses the time to first token and `cached_tokens`; for
answers, their time, the number of stream events and the accepted tokens. AUC is the probability
that a random prompt of the victim looks more cached than a random other prompt (or less, if that is
likelier): 0.5 is a random guess, 1 is certainty. With keys all AUCs must be below 0.55. Without
keys all tenants share one cache; the AUCs must then be above 0.95, or the attack is too weak. The
server is a separate process; requests go over a socket.

Limiting factor: the standard error of a random guess, which is printed; for 300 + 300 prompts it is
0.024. Ends in one JSON line.
"""

import argparse
import base64
import io
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serving import Answer, Server, serving

from examples.small_models.vision import demo_vision_path

GUESSING, CERTAIN = 0.55, 0.95
TOKENS = 256
ANSWER = 40  # tokens of an answer that is drafted
PREFIX = "You answer questions about tables. " * 8
Ask = Callable[[Server, str, int], Answer]
PROMPT_SIGNS: dict[str, Callable[[Answer], float]] = {
    "time": lambda answer: -answer.first_token,
    "cached_tokens": lambda answer: answer.cached,
}
ANSWER_SIGNS: dict[str, Callable[[Answer], float]] = {
    "time": lambda answer: answer.first_token - answer.last_token,
    "events": lambda answer: -answer.events,
    "accepted_tokens": lambda answer: answer.accepted,
}


def auc(sent: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that a value of `sent` exceeds one of `others`, or the reverse."""
    pairs = list(itertools.product(sent, others))
    found = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    return max(found, 1 - found)


def standard_error(count: int) -> float:
    """Return the standard error of the AUC of random guesses (Mann and Whitney, 1947).

    count: size of each of the two samples.
    """
    return float(((2 * count + 1) / (12 * count * count)) ** 0.5)


def ask_text(server: Server, tenant: str, number: int) -> Answer:
    """Send a prompt of random letters."""
    rng = random.Random(number)
    text = "".join(chr(rng.randrange(97, 123)) for _ in range(TOKENS))
    body = {"model": "demo", "prompt": text, "max_tokens": 1}
    return server.ask(tenant, "/v1/completions", body)


def ask_behind_prefix(server: Server, tenant: str, number: int) -> Answer:
    """Send a prompt of random letters after the public prefix."""
    rng = random.Random(number)
    text = PREFIX + "".join(chr(rng.randrange(97, 123)) for _ in range(TOKENS))
    return server.ask(tenant, "/v1/completions", {"model": "demo", "prompt": text, "max_tokens": 1})


def ask_answer(server: Server, tenant: str, number: int) -> Answer:
    """Send a prompt of random letters after the public prefix, and sample with a seed."""
    rng = random.Random(number)
    text = PREFIX + "".join(chr(rng.randrange(97, 123)) for _ in range(TOKENS))
    body = {"model": "demo", "prompt": text, "max_tokens": ANSWER, "ignore_eos": True}
    return server.ask(tenant, "/v1/completions", body | {"seed": number, "temperature": 1.0})


def ask_image(server: Server, tenant: str, number: int) -> Answer:
    """Send an image of noise."""
    pixels = np.random.default_rng(number + 1).integers(0, 256, (224, 224, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}]
    body: dict[str, Any] = {"model": "tiny-eyes", "messages": messages, "max_tokens": 1}
    return server.ask(tenant, "/v1/chat/completions", body)


def attack(server: Server, ask: Ask, count: int, progress: Progress) -> dict[str, float]:
    """Run an attack; return its AUCs."""
    for tenant, number in (("victim", 10**6), ("prober", 10**6 + 1)):
        ask(server, tenant, number)  # warm up; caches the public prefix
    for number in progress.track(range(count), description="the victim sends"):
        ask(server, "victim", number)
    order = list(range(2 * count))
    random.Random(0).shuffle(order)
    answers = {
        number: ask(server, "prober", number)
        for number in progress.track(order, description="the prober sends")
    }
    signs = ANSWER_SIGNS if ask is ask_answer else PROMPT_SIGNS
    values = {by: [sign(answers[n]) for n in range(2 * count)] for by, sign in signs.items()}
    return {by: round(auc(each[:count], each[count:]), 3) for by, each in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=300, help="texts of each kind")
    parser.add_argument("--images", type=int, default=100, help="images of each kind")
    parser.add_argument("--answers", type=int, default=100, help="answers of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "prefix.txt")
        prefix.write_text(PREFIX, encoding="utf-8")
        measure(options, str(prefix))


def measure(options: argparse.Namespace, prefix: str) -> None:
    """Attack every kind of prompt, with keys and without. prefix: file of the public prefix."""
    kinds: list[tuple[str, str, Ask, int, list[str]]] = [
        ("texts", "demo", ask_text, options.prompts, []),
        (
            *("texts_behind_prefix", "demo", ask_behind_prefix, options.prompts),
            ["--public-prefix", prefix],
        ),
        (
            *("images", str(demo_vision_path()), ask_image, options.images),
            ["--served-model-name", "tiny-eyes", "--encoder-cache-rows", "100000"],
        ),
        (
            *("answers", "demo", ask_answer, options.answers),
            ["--public-prefix", prefix],
        ),
    ]
    table = Table("", "tenants", "by", "AUC", "limit", "standard error of guessing")
    figures: dict[str, float] = {}
    right = True
    with Progress(console=Console(stderr=True)) as progress:
        for (name, model, ask, count, more), keys in itertools.product(kinds, (True, False)):
            if not count:
                continue
            tenants = ("victim", "prober") if keys else ()
            with serving(model, tenants, ["--num-blocks", "16384", *more]) as server:
                found = attack(server, ask, count, progress)
            for by, value in found.items():
                mode = "with keys" if keys else "without keys"
                limit = f"<= {GUESSING}" if keys else f">= {CERTAIN}"
                right &= value <= GUESSING if keys else value >= CERTAIN
                table.add_row(name, mode, by, f"{value:.3f}", limit, f"{standard_error(count):.3f}")
                figures[f"{name}_{'keys' if keys else 'open'}_{by}"] = value
    Console().print(table)
    print(json.dumps(figures | {"within_limits": right}))


if __name__ == "__main__":
    main()
