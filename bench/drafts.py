"""Drafts: output tokens per second with and without them, side by side.

    python bench/drafts.py SmolLM2-135M-Instruct.Q4_1.gguf [--threads 1] [--rounds 3]
    python bench/drafts.py qwen2.5-0.5b

The model is a chat model, or a shape with random weights, for which only repeated, fresh and
concurrent requests are meaningful. Both engines answer in turn; each line has the median of the
ratios of seconds, without to with drafts, and the tokens per step.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

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
FRESH = "Write a long story about a small robot that wants to learn how to paint."
TOPICS = ("a river", "tea", "the moon", "old maps", "bread", "a violin", "ants", "snow")

Answer = tuple[float, int, int]
"""Seconds, tokens, and the drafted tokens among them."""


class Pair:
    """One model, loaded without and with drafts."""

    def __init__(self, model: str, threads: int) -> None:
        is_shape = model in SHAPES
        path = model_folder(model) if is_shape else Path(model)
        options: dict[str, Any] = {"num_threads": threads, "num_blocks": 4096}
        self.engines = [LLM(str(path), speculation=count, **options) for count in (0, 16)]
        self.vocabulary = SHAPES[model].vocab_size if is_shape else 0

    def answer(self, llm: LLM, texts: list[str], count: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = perf_counter()
        if self.vocabulary:
            prompts = [self.draw_tokens(text) for text in texts]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        else:
            chats = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(chats, params, use_tqdm=False)
        seconds = perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        return seconds, tokens, sum(m.num_accepted_tokens for m in metrics)

    def draw_tokens(self, text: str) -> list[int]:
        """Return the same random tokens for the same text."""
        chance = random.Random(text)
        return [chance.randrange(self.vocabulary) for _ in range(200)]

    def compare(self, name: str, rounds: int, run: Callable[[LLM], Answer]) -> None:
        """Print the ratio of a load, which both engines run in turn with empty caches."""
        ratios, accepted, tokens = [], 0, 0
        for _ in range(rounds):
            seconds = []
            for llm in self.engines:
                llm.reset_prefix_cache()
                took, count, drafted = run(llm)
                seconds.append(took)
            accepted, tokens = accepted + drafted, tokens + count
            ratios.append(seconds[0] / seconds[1])
        per_step = tokens / (tokens - accepted)
        print(f"{name:28}{median(ratios):5.2f}x  {per_step:4.1f} tokens a step", flush=True)

    def again(self, first: list[str], second: list[str], count: int) -> Callable[[LLM], Answer]:
        """Return a load that answers `first`, which is not timed, and then `second`."""

        def run(llm: LLM) -> Answer:
            if first:
                self.answer(llm, first, count)
            return self.answer(llm, second, count)

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    pair, count = Pair(options.model, options.threads), options.tokens
    mixed = [f"Write about {topic}." for topic in TOPICS] + [COPY, EDIT, FRESH, STORY] * 2
    loads = {
        "the same prompt again": pair.again([FRESH], [FRESH], count),
        "after an edit at its end": pair.again([FRESH], [FRESH + " It is blue."], count),
        "document, one word changed": pair.again([], [COPY], count),
        "code, one name changed": pair.again([], [EDIT], count),
        "fresh text": pair.again([], [FRESH], count),
        "16 requests of all kinds": pair.again([], mixed, count),
    }
    print(f"headstart {headstart.__version__}, {options.model}, {options.threads} threads")
    for name, run in loads.items():
        pair.compare(name, options.rounds, run)


if __name__ == "__main__":
    main()
