"""The first token of a long prompt three ways, side by side: from memory, from disk, computed.

    python bench/tiers.py [--tokens 3000] [--rounds 5] [--threads 1] [--model qwen2.5-0.5b]

Each round asks an engine with an empty pool about a document whose K/V lie on disk, a question of
40 tokens, and then another question, for which they are in memory. The files are in the system's
page cache, as after a restart of the process; once more they are dropped from it first
(`posix_fadvise`), so that they come from the disk itself, beside a plain read of as many bytes.
Then requests decode beside a store that always has more to write, and without it. Weights are
random: only times count.

What limits it: the bytes of the K/V, copied twice (from the file, into the pool), with a CRC over
them. Ends in one JSON line.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shapes import FOLDER, SHAPES, model_folder

from headstart import LLM, SamplingParams
from headstart.cache import BlockHash
from headstart.tiers import DiskStore, ModelRecord, Saver, StoredBlock

LIMITS = {"disk": 1.3, "beside": 1.05, "cold_disk": 0.8}
QUESTION = 40
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def ask(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, the tokens that were cached, and those that were loaded."""
    begun = time.perf_counter()
    [output] = llm.generate({"prompt_token_ids": prompt}, FIRST, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return seconds, output.num_cached_tokens, output.num_loaded_tokens


def drop_from_page_cache(folder: Path) -> None:
    """The files' next reads come from the disk."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path, nbytes: int) -> float:
    """Seconds that reading so many bytes of the files takes, in parts of 8 MiB."""
    left = nbytes
    begun = time.perf_counter()
    for path in folder.glob("*.kv"):
        with path.open("rb", buffering=0) as file:
            part = bytearray(8 << 20)
            while left > 0 and (count := file.readinto(part)):
                left -= count
    return time.perf_counter() - begun


def time_first_tokens(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds, in seconds."""
    rng = random.Random(1)
    document = [rng.randrange(1000, 20_000) for _ in range(options.tokens)]

    def prompt() -> list[int]:
        """The document, and a question that was never asked."""
        return document + [rng.randrange(1000, 20_000) for _ in range(QUESTION)]

    found: dict[str, list[float]] = {"computed": [], "memory": [], "disk": [], "cold_disk": []}
    plain: list[float] = []
    engine = {"num_threads": options.threads, "max_model_len": options.tokens + 2 * QUESTION}
    with closing(LLM(folder, cache_dir=str(kept), **engine)) as llm:
        seconds, cached, _ = ask(llm, prompt())
        assert cached == 0, "the folder is not new"
        found["computed"].append(seconds)
    for _ in range(options.rounds):
        with closing(LLM(folder, cache_dir=str(kept), **engine)) as llm:
            llm.generate({"prompt_token_ids": [5] * 40}, FIRST, use_tqdm=False)  # warm up
            seconds, cached, loaded = ask(llm, prompt())
            assert loaded >= options.tokens - 32, f"{loaded} tokens were loaded"
            found["disk"].append(seconds)
            found["memory"].append(ask(llm, prompt())[0])
            llm.reset_prefix_cache()
            assert llm.engine.tiers is not None and llm.engine.tiers.flush(60)
            drop_from_page_cache(kept)
            seconds, _, loaded = ask(llm, prompt())
            found["cold_disk"].append(seconds)
            drop_from_page_cache(kept)
            nbytes = loaded // 16 * block_bytes(llm)
            plain.append(read_plainly(kept, nbytes))
    medians = {f"{name}_s": statistics.median(values) for name, values in found.items()}
    medians["plain_read_s"] = statistics.median(plain)
    medians["megabytes"] = nbytes / 1e6
    return medians


def block_bytes(llm: LLM) -> int:
    """Bytes of a block's K/V."""
    return llm.engine.kv_cache_bytes // (llm.engine.manager.config.num_blocks + 1)


@contextmanager
def writing(kept: Path, nbytes: int) -> Iterator[Saver]:
    """A saver of this process is offered blocks as fast as it takes them meanwhile."""
    over = threading.Event()
    payload = random.Random(2).randbytes(nbytes)
    record = ModelRecord("bench", "bench", 16, nbytes)
    with closing(DiskStore(kept, record, 2 << 30)) as store:
        saver = Saver(store, 64 * nbytes)
        saver.rest(True)  # as an engine that computes on the CPU has it

        def offer() -> None:
            for count in itertools.count():
                while not saver.has_room(32 * nbytes):  # an engine asks before it copies as well
                    if over.wait(0.001):
                        return
                if over.is_set():
                    return
                names = [BlockHash((count * 64 + at).to_bytes(32, "big")) for at in range(33)]
                saver.offer(
                    [
                        StoredBlock(name, parent, at, 1.0, time.time(), payload)
                        for at, (parent, name) in enumerate(pairwise(names))
                    ]
                )

        thread = threading.Thread(target=offer)
        thread.start()
        try:
            yield saver
        finally:
            over.set()
            thread.join()
            saver.close(60)


def time_decoding(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds a token of four requests: alone, and beside a store that is written. In turns."""
    params = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    written = 0.0
    with closing(LLM(folder, num_threads=options.threads, max_model_len=512)) as llm:
        size = block_bytes(llm)

        def decode(at: int) -> float:
            prompts = [{"prompt_token_ids": [1000 + 7 * n + at] * 20} for n in range(4)]
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return (time.perf_counter() - begun) / float(options.answer)

        decode(0)
        for number in range(options.rounds):
            found["alone"].append(decode(2 * number + 1))
            with writing(kept, size) as saver:
                begun = time.perf_counter()
                found["beside"].append(decode(2 * number + 2))
                written += saver.num_saved * size / (time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(found["beside"], found["alone"], strict=True)]
    return {
        "decode_alone_s": statistics.median(found["alone"]),
        "decode_beside_s": statistics.median(found["beside"]),
        "written_mb_s": written / options.rounds / 1e6,
        "beside": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    folder = model_folder(options.model)
    with tempfile.TemporaryDirectory(dir=FOLDER) as kept:
        figures = time_first_tokens(folder, Path(kept) / "first", options)
        figures |= time_decoding(folder, Path(kept) / "decode", options)
    figures["disk"] = figures["disk_s"] / figures["memory_s"]
    loading = max(figures["cold_disk_s"] - figures["memory_s"], 1e-9)
    figures["cold_disk"] = figures["plain_read_s"] / loading
    table = Table("", "seconds", title=f"{options.tokens:,} tokens of {options.model}")
    for name in ("computed", "memory", "disk", "cold_disk", "plain_read"):
        table.add_row(name.replace("_", " "), f"{figures[f'{name}_s']:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"{figures['megabytes']:.0f} MB; disk x {figures['disk']:.2f} of memory (limit "
        f"{LIMITS['disk']}); from a cold page cache {figures['cold_disk']:.0%} of the disk's speed "
        f"(limit {LIMITS['cold_disk']:.0%}); decoding beside {figures['written_mb_s']:.0f} MB/s of "
        f"writing x {figures['beside']:.3f} (limit {LIMITS['beside']})"
    )
    within = figures["disk"] <= LIMITS["disk"] and figures["beside"] <= LIMITS["beside"]
    within = within and figures["cold_disk"] >= LIMITS["cold_disk"]
    told = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps(told | {"within_limits": within}))


if __name__ == "__main__":
    main()
