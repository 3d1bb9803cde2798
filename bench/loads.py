"""The prompts of the four timed loads. `peer.py` sends them to an engine.

Token ids are random with fixed seeds; loads 1 to 3 are for the shape of Qwen2.5-0.5B, load 4 for a
small Llama:

    1  long document: 3,000 tokens, 16 questions of 40 tokens in sequence, 16 output tokens
    2  chat: 8 conversations in parallel, 4 turns of 120 tokens with 40 output tokens
    3  shared prefix: 16 parallel requests with 2,000 cached, 20 unique and 64 output tokens
    4  overhead: 32 parallel requests of 512 tokens, 256 of them shared, 64 output tokens
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from shapes import SHAPES

BIG, SMALL = "qwen2.5-0.5b", "small-llama"

Ids = list[int]
Prompts = dict[str, Any]  # a load in the form that peer.py reads


def tokens(rng: random.Random, vocab: int, count: int) -> Ids:
    """Return random token ids."""
    return [rng.randrange(vocab) for _ in range(count)]


def long_document(rng: random.Random, vocab: int) -> Prompts:
    """Return load 1: one cold question and fifteen warm ones."""
    document = tokens(rng, vocab, 3000)
    questions = [tokens(rng, vocab, 40) for _ in range(16)]
    return {"load": "document", "document": document, "questions": questions, "count": 16}


def chat(rng: random.Random, vocab: int) -> Prompts:
    """Return load 2: eight conversations of four turns."""
    said = [[tokens(rng, vocab, 120) for _ in range(8)] for _ in range(4)]
    return {"load": "chat", "said": said, "count": 40}


def shared_prefix(rng: random.Random, vocab: int) -> Prompts:
    """Return load 3: decoding of requests with a cached common prefix."""
    head = tokens(rng, vocab, 2000)
    prompts = [head + tokens(rng, vocab, 20) for _ in range(16)]
    return {"load": "together", "first": head, "prompts": prompts, "count": 64}


def overhead(rng: random.Random, vocab: int) -> Prompts:
    """Return load 4: a model so small that the engine's overhead dominates."""
    head = tokens(rng, vocab, 256)
    prompts = [head + tokens(rng, vocab, 256) for _ in range(32)]
    return {"load": "together", "first": [], "prompts": prompts, "count": 64}


class Load(NamedTuple):
    """A load for a shape. times: runs per round. timed: name of its time, if not `peer.py`'s."""

    shape: str
    times: int
    prompts: Callable[[random.Random, int], Prompts]
    timed: str = ""


LOADS = {
    "1": Load(BIG, 1, long_document),
    "2": Load(BIG, 1, chat),
    "3": Load(BIG, 1, shared_prefix, "shared"),
    "4": Load(SMALL, 5, overhead, "overhead"),
}


def make_load(name: str, at: int, shape: str = "") -> Prompts:
    """Return a load with the prompts of its run number `at`; each run has new prompts.

    shape: replaces the load's.
    """
    load = LOADS[name]
    vocabulary = SHAPES[shape or load.shape].vocab_size
    return load.prompts(random.Random(f"load {name}, {at}"), vocabulary)
