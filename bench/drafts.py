"""Drafts: output tokens per second with and without them, side by side.

    python bench/drafts.py SmolLM2-135M-Instruct.Q4_1.gguf [--threads 1] [--rounds 4]
    python bench/drafts.py SmolLM2-135M-Instruct.Q4_1.gguf --dtype float32 \\
        --llama-server build/bin/llama-server
    python bench/drafts.py qwen2.5-0.5b

The model is a chat model, or a shape with random weights, for which only repeated, fresh and
concurrent requests are meaningful. The engines with and without drafts answer in turn; which one is
first alternates. Each round starts with an empty cache, and with the acceptance of drafts that
earlier rounds and loads measured. Each line has the median speedup, the tokens per second with
drafts, and the tokens per step. With one thread, CPU time is measured, which other processes change
little. llama.cpp's server answers the same chats once for each kind of its n-gram drafts, with that
kind's own settings.
"""

import argparse
import random
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

from llama_drafts import KINDS, Answer, run_server
from shapes import SHAPES, model_folder

import headstart
from headstart import LLM, SamplingParams

STORY = (
    "The old lighthouse stood on a rocky island far from the coast. Every evening the keeper "
    "climbed the narrow stairs, lit the lamp, and wrote a line in his log. In winter the storms "
    "lasted for weeks, and no boat could bring food or letters. In summer children rowed out to "
    "visit him, and he talked of ships and whales. One night in March the lamp went out, and a "
    "large ship came close to the rocks. The keeper burned his own furniture to warn the crew. "
)
CODE = (
    "def price(items, tax):\n    total = 0\n    for item in items:\n"
    "        total += item.cost * item.count\n    if total > 100:\n        total = total * 0.9\n"
    "    total = total * (1 + tax)\n    return total\n\n"
)
COPY = f"Return this document with the word lighthouse changed to tower:\n\n{STORY * 3}"
EDIT = f"Rename the variable total to amount, and return the whole code:\n\n{CODE * 4}"
EDITS = (  # of a chat's last message: before and after
    ("Explain how photosynthesis works in plans.", "Explain how photosynthesis works in plants."),
    ("List ten healthy breakfast ideas.", "List twelve healthy breakfast ideas."),
    ("Write an email to my boss about Friday.", "Write an email to my boss about Monday."),
    ("What are the main causes of World War I?", "What were the main causes of World War I?"),
    ("Give me a recipe for pancakes.", "Give me a recipe for pancakes, please."),
    ("Tell the story of Romeo and Juliet.", "Tell the story of Romeo and Juliet briefly."),
    ("Write a Python function that reverses a string.", "Reverse a string in Python."),
)
FRESH = "Write a long story about a small robot that wants to learn how to paint."
TOPICS = ("a river", "tea", "the moon", "old maps", "bread", "a violin", "ants", "snow")


class Load(NamedTuple):
    """Chats that are answered together; those in `before` are answered first, and not timed."""

    before: list[str]
    chats: list[str]


class Pair:
    """One model, loaded without and with drafts."""

    def __init__(self, model: str, threads: int, dtype: str = "auto") -> None:
        is_shape = model in SHAPES
        path = model_folder(model) if is_shape else Path(model)
        options: dict[str, Any] = {"num_threads": threads, "num_blocks": 4096, "dtype": dtype}
        self.engines = [LLM(str(path), speculation=count, **options) for count in ("off", "auto")]
        self.clock = process_time if threads == 1 else perf_counter
        self.vocabulary = SHAPES[model].vocab_size if is_shape else 0

    def answer(self, llm: LLM, texts: list[str], count: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = self.clock()
        if self.vocabulary:
            prompts = [self.draw_tokens(text) for text in texts]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        else:
            chats = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(chats, params, use_tqdm=False)
        seconds = self.clock() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        return Answer(seconds, tokens, sum(m.num_accepted_tokens for m in metrics))

    def draw_tokens(self, text: str) -> list[int]:
        """Return the same random tokens for the same text."""
        chance = random.Random(text)
        return [chance.randrange(self.vocabulary) for _ in range(200)]

    def compare(self, name: str, load: Load, rounds: int, count: int) -> None:
        """Print the results of a load, which both engines run in turn with empty caches."""
        answers: list[list[Answer]] = [[] for _ in self.engines]
        order = list(zip(self.engines, answers, strict=True))
        for _ in range(rounds):
            for llm, results in order:
                llm.reset_prefix_cache()
                if load.before:
                    self.answer(llm, load.before, count)
                results.append(self.answer(llm, load.chats, count))
            order.reverse()
        print(f"{name}\n  headstart {median_ratio(*answers):5.2f}x  {format_speed(answers[1])}")


def median_ratio(without: list[Answer], drafted: list[Answer]) -> float:
    """Return the median of the ratios of seconds."""
    pairs = zip(without, drafted, strict=True)
    return median(a.seconds / b.seconds for a, b in pairs)


def format_speed(answers: list[Answer]) -> str:
    """Return the median of tokens per second, and the tokens per step."""
    speed = median(answer.tokens / answer.seconds for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    per_step = tokens / (tokens - sum(answer.accepted for answer in answers))
    return f"{speed:6.1f} tokens/s  {per_step:4.1f} per step"


def run_llama(program: str, model: str, threads: int, load: Load, rounds: int, count: int) -> None:
    """Print the results of a load with llama.cpp's server, which is restarted for each run."""
    answers: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, results in answers.items():
            with run_server(program, model, kind, threads, len(load.chats)) as server:
                if load.before:
                    server.answer(load.before, count)
                results.append(server.answer(load.chats, count))
    for kind, results in answers.items():
        ratio = median_ratio(answers["none"], results)
        print(f"  llama.cpp {ratio:5.2f}x  {format_speed(results)}  {kind}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="dtype of activations, K and V")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--llama-server", help="llama.cpp's program, to compare with")
    options = parser.parse_args()
    pair = Pair(options.model, options.threads, options.dtype)
    count = options.tokens
    mixed = [f"Write about {topic}." for topic in TOPICS] + [COPY, EDIT, FRESH, STORY] * 2
    loads = {
        "the same prompt again": Load([FRESH], [FRESH]),
        **{f"after an edit: {after}": Load([before], [after]) for before, after in EDITS},
        "document, one word changed": Load([], [COPY]),
        "code, one name changed": Load([], [EDIT]),
        "fresh text": Load([], [FRESH]),
        "16 requests of all kinds": Load([], mixed),
    }
    print(f"headstart {headstart.__version__}, {options.model}, {options.threads} threads")
    for name, load in loads.items():
        pair.compare(name, load, options.rounds, count)
        if options.llama_server:
            others = options.llama_server, options.model, options.threads
            run_llama(*others, load, options.rounds, count)


if __name__ == "__main__":
    main()
