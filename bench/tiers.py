"""Time to the first token of a long prompt: from memory, from disk, and computed.

    python bench/tiers.py [--tokens 3000] [--rounds 5] [--threads 1] [--model qwen2.5-0.5b]
                          [--beside build/peers/llama]

Each round is a new process with an empty pool. It gets a question of 40 tokens about a document
whose K/V are on disk (`disk`), then another question about it, which hits memory (`memory`). A hit
from disk ends at a block border, so a few more tokens are computed; `border` is a hit in memory
that ends at the same border.

In these cases the system's page cache has the files, as after a restart of the process. Then they
are dropped from it (`posix_fadvise`), so that the disk itself is read: `cold_disk` is the time to
first token, and `cold_read` the time in which the store alone reads and checks the same blocks.
`plain_read` reads as many bytes into used memory, and `direct_read` bypasses the page cache. Last,
requests decode while the store always has blocks to write, or never. Weights are random.

Two figures are limited relative to `plain_read`, the disk's own speed: `cold_read`, and
`cold_load`, the additional time to first token compared with `border`. That is lookup, reading,
checking and the copy into the pool. `cold_disk` has no limit, as it also contains the computation
of the tokens after the border.

`--beside` names a virtual environment with llama.cpp (`peers.py` explains how to make it). Its
measurements are interleaved, with weights and K/V of 16 bits. The document is computed, restored
from a file in a new process, and then hit in memory.

Other programs distort wall times. So CPU seconds of all threads are printed too (`*_cpu_s`), and
the time of decoding without the time that the engine's thread waited for a core (`beside_running`).

Limiting resources: the computation of the tokens after the last whole block, and the bytes of the
K/V, which are copied twice (from the file, into the pool) and checksummed. Ends in one JSON line.
"""

import argparse
import itertools
import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from shapes import FOLDER, SHAPES, gguf_file, model_folder

from headstart import LLM, SamplingParams
from headstart.cache import BlockHash, TokenSequence
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import described_models, slot_path
from headstart.tiers.store import ModelRecord, StoredBlock
from headstart.tiers.transfers import Saver
from headstart.tiers.worker import GuardedStore, StoreChain

LIMITS = {"disk": 1.3, "beside": 1.05, "cold_read": 0.8, "cold_load": 0.8}
PART = 8 << 20
QUESTION = 40
ROWS = (
    "computed",
    "memory",
    "border",
    "disk",
    "cold_disk",
    "cold_read",
    "plain_read",
    "direct_read",
    "llama_computed",
    "llama_memory",
    "llama_disk",
)
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Asked(NamedTuple):
    """Seconds to the first token, CPU seconds, cached tokens and loaded tokens."""

    seconds: float
    cpu: float
    cached: int
    loaded: int


def ask(llm: LLM, prompt: list[int]) -> Asked:
    begun, cpu = time.perf_counter(), time.process_time()
    [output] = llm.generate({"prompt_token_ids": prompt}, FIRST, use_tqdm=False)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return Asked(seconds, cpu, output.num_cached_tokens, output.num_loaded_tokens)


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next reads come from the disk."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(path: Path, nbytes: int, flags: int = 0) -> float:
    """Return the seconds to read `nbytes` of a file in parts of 8 MiB."""
    with closing(mmap.mmap(-1, PART)) as memory, memoryview(memory) as part:
        memory.write(bytes(PART))  # touch the memory before the timing
        fd = os.open(path, os.O_RDONLY | flags)
        try:
            begun = time.perf_counter()
            for at in range(0, nbytes, PART):
                os.preadv(fd, [part], at)
            return time.perf_counter() - begun
        finally:
            os.close(fd)


def read_blocks(kept: Path, model: ModelRecord, names: Sequence[BlockHash]) -> float:
    """Return the seconds that a store takes to read and check blocks."""
    with closing(DiskStore(kept, model, 10 << 30)) as store:
        assert store.find(names) == len(names), "a block is missing"
        begun = time.perf_counter()
        assert sum(1 for _ in store.load(names)) == len(names), "a block is damaged"
        return time.perf_counter() - begun


def time_cold(kept: Path, llm: LLM, tokens: list[int]) -> dict[str, float]:
    """Return the seconds to read the K/V of tokens from the disk, without an engine."""
    names = llm.engine.manager.block_hashes(TokenSequence("bench", tokens))
    model = max(described_models(kept), key=lambda one: one.block_bytes)  # the other: embeddings
    path, nbytes, times = slot_path(kept, model), len(names) * model.block_bytes, {}
    drop_from_page_cache(kept)
    times["cold_read"] = read_blocks(kept, model, names)
    drop_from_page_cache(kept)
    times["plain_read"] = read_plainly(path, nbytes)
    with suppress(OSError):  # some file systems do not support direct reads
        drop_from_page_cache(kept)
        times["direct_read"] = read_plainly(path, nbytes, os.O_DIRECT)
    times["megabytes"] = nbytes / 1e6
    return times


def time_round(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run one round, in a new process."""
    rng = random.Random(time.time())
    document = make_document(options)

    def prompt(kept: int | None = None) -> list[int]:
        """Return the document (or its first tokens) and a new question of constant length."""
        told = document[:kept]
        more = len(document) + QUESTION - len(told)
        return told + [rng.randrange(1000, 20_000) for _ in range(more)]

    for path in kept.glob("*.kv"):  # the previous round dropped the files from the page cache
        read_plainly(path, path.stat().st_size)
    asked: dict[str, Asked] = {}
    with closing(open_engine(folder, kept, options)) as llm:
        llm.generate({"prompt_token_ids": [5] * 40}, FIRST, use_tqdm=False)  # warm up
        asked["disk"] = ask(llm, prompt())
        loaded = asked["disk"].loaded
        assert loaded >= options.tokens - 32, f"{loaded} tokens were loaded"
        asked["memory"] = ask(llm, prompt())
        asked["border"] = ask(llm, prompt(loaded))
        assert asked["border"].cached == loaded, f"{asked['border'].cached} tokens were cached"
        llm.reset_prefix_cache()
        assert llm.engine.tiers is not None and llm.engine.tiers.flush(60)
        drop_from_page_cache(kept)
        asked["cold_disk"] = ask(llm, prompt())
        assert asked["cold_disk"].loaded == loaded, "not all tokens came from the disk"
        times = time_cold(kept, llm, document[:loaded])
    figures = {f"{name}_s": one.seconds for name, one in asked.items()}
    figures |= {f"{name}_cpu_s": one.cpu for name, one in asked.items()}
    megabytes = times.pop("megabytes")
    return figures | {f"{name}_s": one for name, one in times.items()} | {"megabytes": megabytes}


def make_document(options: argparse.Namespace) -> list[int]:
    """Return a document that is the same in every process."""
    rng = random.Random(1)
    return [rng.randrange(1000, 20_000) for _ in range(options.tokens)]


def open_engine(folder: Path, kept: Path, options: argparse.Namespace) -> LLM:
    """Open an engine that stores prefixes on disk."""
    return LLM(
        folder,
        cache_dir=str(kept),
        num_threads=options.threads,
        max_model_len=options.tokens + 2 * QUESTION,
    )


def time_first_tokens(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the medians over the rounds, in seconds."""
    with closing(open_engine(folder, kept, options)) as llm:
        computed = ask(llm, make_document(options) + [7] * QUESTION)
        assert computed.cached == 0, "the folder is not new"
    rounds, theirs = [], {}
    if options.beside is not None:
        theirs = {"llama_computed_s": ask_llama(kept, options)["computed"]}
    for _ in range(options.rounds):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new_process:
            rounds.append(new_process.submit(time_round, folder, kept, options).result())
        if options.beside is not None:
            for name, seconds in ask_llama(kept, options).items():
                rounds[-1][f"llama_{name}_s"] = seconds
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {"computed_s": computed.seconds, "computed_cpu_s": computed.cpu} | theirs | medians


def ask_llama(kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of llama.cpp. The first call of a run computes and stores the document."""
    rng = random.Random(time.time())
    asked = {"document": make_document(options)}
    for name in ("question", "other"):
        asked[name] = [rng.randrange(1000, 20_000) for _ in range(QUESTION)]
    program = Path(__file__).with_name("beside") / "llama.py"
    python, model = options.beside / "bin" / "python", gguf_file(options.model, "BF16")
    command = [python, program, model, str(options.threads), kept.with_suffix(".llama")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])
    told: dict[str, float] = json.loads(done.stdout)
    return told


def compare(figures: dict[str, float]) -> dict[str, float]:
    """Return the ratios that have limits, and ratios that explain them."""
    plain, cold = figures["plain_read_s"], figures["cold_disk_s"]
    return {
        "disk": figures["disk_s"] / figures["memory_s"],
        "disk_cpu": figures["disk_cpu_s"] / figures["memory_cpu_s"],
        "disk_to_border": figures["disk_s"] / figures["border_s"],
        "cold_read": plain / figures["cold_read_s"],
        "cold_load": plain / max(cold - figures["border_s"], 1e-9),
        "cold_disk": plain / max(cold - figures["memory_s"], 1e-9),
    }


def block_bytes(llm: LLM) -> int:
    """Return the bytes of a block's K/V."""
    return llm.engine.kv_cache_bytes // (llm.engine.manager.config.num_blocks + 1)


@contextmanager
def writing(kept: Path, nbytes: int) -> Iterator[Saver]:
    """Offer blocks to a saver, as fast as it accepts them, within a context."""
    over = threading.Event()
    payload = random.Random(2).randbytes(nbytes)
    record = ModelRecord("bench", "bench", 16, nbytes)
    with closing(DiskStore(kept, record, 2 << 30)) as store:
        saver = Saver(StoreChain([GuardedStore(store)]), 64 * nbytes, store.faults)
        saver.rest(True)  # as in an engine on the CPU

        def offer() -> None:
            for count in itertools.count():
                while not saver.has_space(32 * nbytes):  # an engine also checks before it copies
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


def waited() -> float:
    """Return the seconds that the engine's thread has waited for a core."""
    for thread in threading.enumerate():
        if thread.name == "headstart-engine":
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(told.split()[1]) / 1e9
    return 0.0


def time_decoding(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds per token of four requests, alone and during writes, in turns."""
    params = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    written = 0.0
    with closing(LLM(folder, num_threads=options.threads, max_model_len=512)) as llm:
        size = block_bytes(llm)

        def decode(at: int) -> tuple[float, float]:
            """Return the seconds per token, with and without the wait for a core."""
            prompts = [{"prompt_token_ids": [1000 + 7 * n + at] * 20} for n in range(4)]
            begun, waiting = time.perf_counter(), waited()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            running = seconds - (waited() - waiting)
            return seconds / options.answer, running / options.answer

        decode(0)
        for number in range(options.rounds):
            found["alone"].append(decode(2 * number + 1))
            with writing(kept, size) as saver:
                begun = time.perf_counter()
                found["beside"].append(decode(2 * number + 2))
                written += saver.num_saved * size / (time.perf_counter() - begun)
    pairs = list(zip(found["beside"], found["alone"], strict=True))
    return {
        "decode_alone_s": statistics.median(wall for wall, _ in found["alone"]),
        "decode_beside_s": statistics.median(wall for wall, _ in found["beside"]),
        "written_mb_s": written / options.rounds / 1e6,
        "beside": statistics.median(a / b for (a, _), (b, _) in pairs),
        "beside_running": statistics.median(a / b for (_, a), (_, b) in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="a virtual environment with llama.cpp")
    options = parser.parse_args()
    folder = model_folder(options.model)
    with tempfile.TemporaryDirectory(dir=FOLDER) as kept:
        figures = time_first_tokens(folder, Path(kept) / "first", options)
        figures |= time_decoding(folder, Path(kept) / "decode", options)
    figures |= compare(figures)
    show(figures, options)
    within = all(figures[name] <= LIMITS[name] for name in ("disk", "beside"))
    within = within and all(figures[name] >= LIMITS[name] for name in ("cold_read", "cold_load"))
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps(rounded | {"within_limits": within}))


def show(figures: dict[str, float], options: argparse.Namespace) -> None:
    """Print the table, and the ratios in words."""
    table = Table(
        "", "seconds", "of the CPU", title=f"{options.tokens:,} tokens of {options.model}"
    )
    for name in ROWS:
        if f"{name}_s" in figures:
            cpu = figures.get(f"{name}_cpu_s")
            told = "" if cpu is None else f"{cpu:.3f}"
            table.add_row(name.replace("_", " "), f"{figures[f'{name}_s']:.3f}", told)
    console = Console()
    console.print(table)
    console.print(
        f"{figures['megabytes']:.0f} MB; disk x {figures['disk']:.2f} of memory (limit "
        f"{LIMITS['disk']}; in CPU seconds {figures['disk_cpu']:.2f}; of a hit in memory that ends "
        f"at the same block border {figures['disk_to_border']:.2f})"
    )
    console.print(
        f"With a cold page cache, of the disk's own speed: {figures['cold_read']:.0%} for reading "
        f"and checking, {figures['cold_load']:.0%} for a whole load (limit of both "
        f"{LIMITS['cold_load']:.0%}), {figures['cold_disk']:.0%} for the additional time to first "
        "token, which includes computing the tokens after the border"
    )
    console.print(
        f"Decoding during writes of {figures['written_mb_s']:.0f} MB/s x {figures['beside']:.3f} "
        f"(limit {LIMITS['beside']}; without waiting for a core {figures['beside_running']:.3f})"
    )


if __name__ == "__main__":
    main()
