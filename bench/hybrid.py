"""A model with recurrent layers: time with a prefix cache, and the number of tokens hit.

    python bench/hybrid.py [--shape lfm2-1.2b] [--threads 2]

The loads are those of `loads.py` (long document, chat, shared prefix), then prompts that share 900
of 1,000 tokens. Each line has the time and the tokens that were hit. Weights are random.
"""

import argparse
import random
from statistics import median
from time import perf_counter

from loads import chat, long_document, shared_prefix, tokens
from shapes import SHAPES, model_folder

import headstart


class Bench:
    """An engine, and its answers to token ids."""

    def __init__(self, shape: str, threads: int) -> None:
        self.llm = headstart.LLM(str(model_folder(shape)), num_threads=threads, num_blocks=4096)
        self.vocabulary: int = SHAPES[shape].vocab_size
        facts = self.llm.frontend.facts
        print(
            f"{shape}, {threads} threads: K/V {facts.kv_cache_bytes / 1e6:,.0f} MB, "
            f"{facts.num_states} states {facts.state_bytes / 1e6:,.0f} MB"
        )

    def answer(
        self, prompts: list[list[int]], count: int
    ) -> tuple[float, list[list[int]], list[int]]:
        """Return the seconds, the answers, and the hit tokens of each prompt."""
        params = headstart.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return seconds, answers, [output.num_cached_tokens or 0 for output in outputs]

    def document(self) -> None:
        load = long_document(random.Random(1), self.vocabulary)
        document, times, hits = load["document"], [], []
        for question in load["questions"]:
            seconds, _, [hit] = self.answer([document + question], 1)
            times.append(seconds)
            hits.append(hit)
        decode = median(self.answer([document + load["questions"][0]], 17)[0] for _ in range(3))
        first = median(self.answer([document + load["questions"][0]], 1)[0] for _ in range(3))
        print(f"document: cold {times[0]:.2f} s, second {times[1]:.2f} s (hit {hits[1]} tokens)")
        print(f"  warm {1e3 * median(times[2:]):.0f} ms, {min(hits[2:])} of {len(document)} hit")
        print(f"  per token {1e3 * (decode - first) / 16:.1f} ms")

    def conversations(self) -> None:
        load = chat(random.Random(2), self.vocabulary)
        histories: list[list[int]] = [[] for _ in range(8)]
        start = perf_counter()
        reusable = hit = 0
        for turn, said in enumerate(load["said"]):
            prompts = [old + new for old, new in zip(histories, said, strict=True)]
            _, answers, hits = self.answer(prompts, load["count"])
            if turn:
                reusable += sum(map(len, histories))
                hit += sum(hits)
            histories = [old + new for old, new in zip(prompts, answers, strict=True)]
        share = hit / (reusable - 3 * 8)  # the last token of an answer is never computed
        print(f"chat: {perf_counter() - start:.2f} s, {100 * share:.1f} % of reusable tokens hit")

    def together(self) -> None:
        load = shared_prefix(random.Random(3), self.vocabulary)
        self.answer([load["first"]], 1)
        seconds, _, hits = self.answer(load["prompts"], load["count"])
        print(f"shared prefix: {seconds:.2f} s, {sum(hits)} of {16 * 2000} tokens hit")
        rng = random.Random(4)
        head = tokens(rng, self.vocabulary, 2000)
        seconds, _, hits = self.answer([head + prompt[2000:] for prompt in load["prompts"]], 64)
        print(f"  all at once, not cached: {seconds:.2f} s, {sum(hits)} of {15 * 2000} tokens hit")

    def forks(self) -> None:
        rng = random.Random(5)
        head = tokens(rng, self.vocabulary, 900)
        hits = [self.answer([head + tokens(rng, self.vocabulary, 100)], 1)[2][0] for _ in range(5)]
        print(f"prompts that share 900 of 1,000 tokens, one after another: hit {hits}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="lfm2-1.2b")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    bench = Bench(arguments.shape, arguments.threads)
    bench.document()
    bench.conversations()
    bench.together()
    bench.forks()
