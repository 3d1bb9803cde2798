"""The first token of a long prompt three ways, side by side: from memory, from disk, computed.

    python bench/tiers.py [--tokens 3000] [--rounds 5] [--threads 1] [--model qwen2.5-0.5b]

Each round asks an engine with an empty pool about a document whose K/V lie on disk, a question of
40 tokens, and then another question, for which they are in memory. The files are in the system's
page cache, as after a restart of the process; once more they are dropped from it first
(`posix_fadvise`), so that they come from the disk itself, beside a plain read of as many bytes.
Then requests decode beside a store that always has more to write, and without it. Weights are
random: only times count.

Where other programs share the cores, wall times say little: beside them stand the CPU's seconds
(`*_cpu_s`, of all threads of the process), and decoding without the time that the engine's thread
waited for a core (`beside_running`).

What limits it: the tokens after the last whole block, which are computed again; then the bytes of
the K/V, copied twice (from the file, into the pool), with a CRC over them. Ends in one JSON line.
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
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from shapes import FOLDER, SHAPES, model_folder

from headstart import LLM, SamplingParams
from headstart.cache import BlockHash
from headstart.tiers import DiskStore, ModelRecord, Saver, StoredBlock

LIMITS = {"disk": 1.3, "beside": 1.05, "cold_disk": 0.8}
QUESTION = 40
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Asked(NamedTuple):
    """Seconds to the first token, seconds of the CPU, and tokens cached, and loaded."""

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

    found: dict[str, list[Asked]] = {"computed": [], "memory": [], "disk": [], "cold_disk": []}
    plain: list[float] = []
    engine = {"num_threads": options.threads, "max_model_len": options.tokens + 2 * QUESTION}
    with closing(LLM(folder, cache_dir=str(kept), **engine)) as llm:
        found["computed"].append(ask(llm, prompt()))
        assert found["computed"][0].cached == 0, "the folder is not new"
    for _ in range(options.rounds):
        with closing(LLM(folder, cache_dir=str(kept), **engine)) as llm:
            llm.generate({"prompt_token_ids": [5] * 40}, FIRST, use_tqdm=False)  # warm up
            found["disk"].append(ask(llm, prompt()))
            loaded = found["disk"][-1].loaded
            assert loaded >= options.tokens - 32, f"{loaded} tokens were loaded"
            found["memory"].append(ask(llm, prompt()))
            llm.reset_prefix_cache()
            assert llm.engine.tiers is not None and llm.engine.tiers.flush(60)
            drop_from_page_cache(kept)
            found["cold_disk"].append(ask(llm, prompt()))
            drop_from_page_cache(kept)
            nbytes = loaded // 16 * block_bytes(llm)
            plain.append(read_plainly(kept, nbytes))
    medians = {}
    for name, asked in found.items():
        medians[f"{name}_s"] = statistics.median(one.seconds for one in asked)
        medians[f"{name}_cpu_s"] = statistics.median(one.cpu for one in asked)
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


def waited() -> float:
    """Seconds that the engine's thread was ready to run, and had no core."""
    for thread in threading.enumerate():
        if thread.name == "headstart-engine":
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(told.split()[1]) / 1e9
    return 0.0


def time_decoding(folder: Path, kept: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds a token of four requests: alone, and beside a store that is written. In turns."""
    params = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    written = 0.0
    with closing(LLM(folder, num_threads=options.threads, max_model_len=512)) as llm:
        size = block_bytes(llm)

        def decode(at: int) -> tuple[float, float]:
            """Seconds a token, with the wait for a core and without."""
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
    options = parser.parse_args()
    folder = model_folder(options.model)
    with tempfile.TemporaryDirectory(dir=FOLDER) as kept:
        figures = time_first_tokens(folder, Path(kept) / "first", options)
        figures |= time_decoding(folder, Path(kept) / "decode", options)
    figures["disk"] = figures["disk_s"] / figures["memory_s"]
    figures["disk_cpu"] = figures["disk_cpu_s"] / figures["memory_cpu_s"]
    loading = max(figures["cold_disk_s"] - figures["memory_s"], 1e-9)
    figures["cold_disk"] = figures["plain_read_s"] / loading
    table = Table(
        "", "seconds", "of the CPU", title=f"{options.tokens:,} tokens of {options.model}"
    )
    for name in ("computed", "memory", "disk", "cold_disk", "plain_read"):
        cpu = figures.get(f"{name}_cpu_s")
        told = "" if cpu is None else f"{cpu:.3f}"
        table.add_row(name.replace("_", " "), f"{figures[f'{name}_s']:.3f}", told)
    console = Console()
    console.print(table)
    console.print(
        f"{figures['megabytes']:.0f} MB; disk x {figures['disk']:.2f} of memory (limit "
        f"{LIMITS['disk']}; of the CPU's seconds {figures['disk_cpu']:.2f}); from a cold page "
        f"cache {figures['cold_disk']:.0%} of the disk's speed (limit {LIMITS['cold_disk']:.0%}); "
        f"decoding beside {figures['written_mb_s']:.0f} MB/s of writing x "
        f"{figures['beside']:.3f} (limit {LIMITS['beside']}; without waiting for a core "
        f"{figures['beside_running']:.3f})"
    )
    within = figures["disk"] <= LIMITS["disk"] and figures["beside"] <= LIMITS["beside"]
    within = within and figures["cold_disk"] >= LIMITS["cold_disk"]
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps(rounded | {"within_limits": within}))


if __name__ == "__main__":
    main()
