"""The four loads that are timed: what an engine is asked. How it is asked is in `peer.py`.

Token ids are random with fixed seeds; loads 1 to 3 are for the shape of Qwen2.5-0.5B, load 4 for a
small Llama:

    1  long document: 3,000 tokens, 16 questions of 40, 16 out, one after another
    2  chat: 8 conversations at once, 4 turns of 120 tokens in and 40 out
    3  shared prefix: 16 requests at once on 2,000 cached tokens, 20 of their own, 64 out
    4  overhead: 32 requests at once of 512 tokens, 256 of them shared, 64 out
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from shapes import SHAPES

BIG, SMALL = "qwen2.5-0.5b", "small-llama"

Ids = list[int]
Asked = dict[str, Any]  # what peer.py reads of a load


def tokens(rng: random.Random, vocab: int, count: int) -> Ids:
    """Random token ids of a model's vocabulary."""
    return [rng.randrange(vocab) for _ in range(count)]


def long_document(rng: random.Random, vocab: int) -> Asked:
    """Load 1: a cold question, fifteen warm ones."""
    document = tokens(rng, vocab, 3000)
    questions = [tokens(rng, vocab, 40) for _ in range(16)]
    return {"load": "document", "document": document, "questions": questions, "count": 16}


def chat(rng: random.Random, vocab: int) -> Asked:
    """Load 2: eight conversations of four turns."""
    said = [[tokens(rng, vocab, 120) for _ in range(8)] for _ in range(4)]
    return {"load": "chat", "said": said, "count": 40}


def shared_prefix(rng: random.Random, vocab: int) -> Asked:
    """Load 3: decoding of requests that begin alike, their beginning cached."""
    head = tokens(rng, vocab, 2000)
    prompts = [head + tokens(rng, vocab, 20) for _ in range(16)]
    return {"load": "together", "first": head, "prompts": prompts, "count": 64}


def overhead(rng: random.Random, vocab: int) -> Asked:
    """Load 4: so small a model that what surrounds it tells."""
    head = tokens(rng, vocab, 256)
    prompts = [head + tokens(rng, vocab, 256) for _ in range(32)]
    return {"load": "together", "first": [], "prompts": prompts, "count": 64}


class Load(NamedTuple):
    """A load of `shape`, `times` times a round; `timed` names its time where `peer.py` does not."""

    shape: str
    times: int
    prompts: Callable[[random.Random, int], Asked]
    timed: str = ""


LOADS = {
    "1": Load(BIG, 1, long_document),
    "2": Load(BIG, 1, chat),
    "3": Load(BIG, 1, shared_prefix, "shared"),
    "4": Load(SMALL, 5, overhead, "overhead"),
}


def make_load(name: str, at: int) -> Asked:
    """A load as it is asked for the `at`th time: each time with other prompts."""
    load = LOADS[name]
    return load.prompts(random.Random(f"load {name}, {at}"), SHAPES[load.shape].vocab_size)
