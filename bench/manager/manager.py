"""Cost of the cache manager in microseconds, without model and tensors.

    python bench/manager/manager.py [--blocks 100000] [--turns 20] [--beside build/peers/vllm]
        [--compiled build/compiled]

A request of 8,192 tokens, half of them cached, is handled in a full pool of blocks of 16 tokens, so
that every new block evicts a cached one: identity, lookup, allocation, free. Then 256 requests
decode a token per step: `append` and `append_slots`. Figures are medians over the turns, in one
thread. Limiting resource: the interpreter, which per block makes an object, unlinks another one
and stores a few attributes.

`--beside` names a virtual environment with vLLM (`peers.py` explains how to make it). vLLM's
manager then gets the same load, in alternating turns. The limits are a fifth of its time per
request and a tenth per decode step. `--compiled` names a folder with this manager compiled (by
`make compiled`), which also takes turns. Ends in one JSON line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from load import TOKENS, Figures, Peer, Subject, answer, measure_memory
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import headstart.cache.manager
from headstart.cache import CacheConfig, KVCacheManager, TokenSequence

LIMITS = {"request_us": 1 / 5, "decode_us": 1 / 10, "pool_init_s": 1.0}  # of vLLM's figures
MAX_BYTES = 302  # per cached block


class Headstart(Subject):
    """Headstart's manager."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = KVCacheManager(CacheConfig(num_blocks=num_blocks))
        super().__init__(num_blocks)

    def run(self, name: str, tokens: list[int]) -> TokenSequence:
        sequence = TokenSequence(name, tokens)
        found = self.manager.get_computed_blocks(sequence)
        new = len(tokens) - found.num_tokens
        assert self.manager.allocate_slots(sequence, new, found) is not None
        self.manager.commit_step()
        return sequence

    def free(self, sequence: TokenSequence) -> None:
        self.manager.free(sequence)

    def parts(self, name: str, tokens: list[int]) -> Iterator[None]:
        sequence = TokenSequence(name, tokens)
        sequence.cut(self.manager.block_size)
        yield
        found = self.manager.get_computed_blocks(sequence)
        yield
        self.manager.allocate_slots(sequence, len(tokens) - found.num_tokens, found)
        self.manager.commit_step()
        yield
        self.manager.free(sequence)
        yield
        assert found.num_tokens == TOKENS // 2

    def decode(self, sequences: list[TokenSequence], tokens: list[int]) -> None:
        for sequence, generated in zip(sequences, tokens, strict=True):
            sequence.append(generated)
            self.manager.append_slots(sequence)
        self.manager.commit_step()

    def check(self) -> None:
        self.manager.check()
        free = len(self.manager.picture()) - len(self.manager.held_blocks())
        assert free == self.manager.num_free_blocks


def memory() -> Figures:
    """Measure the memory of headstart's manager."""
    return measure_memory(lambda n: KVCacheManager(CacheConfig(num_blocks=n)), Headstart)


def measure_in_turns(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return each manager's figures: one entry per turn, then the figures of the end."""
    blocks = ["--blocks", str(options.blocks)]
    own = [sys.executable, __file__, "--answer", *blocks]
    with ExitStack() as running, Progress(console=Console(stderr=True)) as progress:
        peers = {"headstart": running.enter_context(Peer(own))}
        if options.compiled is not None:
            package = options.compiled.resolve()
            peers["compiled"] = running.enter_context(Peer([*own, "--is-compiled"], package))
        if options.beside is not None:
            theirs = Path(__file__).with_name("vllm_manager.py")
            command = [str(options.beside / "bin" / "python"), str(theirs), *blocks]
            peers["vllm"] = running.enter_context(Peer(command))
        found: dict[str, list[Figures]] = {name: [] for name in peers}
        for _ in progress.track(range(options.turns), description="turns"):
            for name, peer in peers.items():
                found[name].append(peer.turn())
        for name, peer in peers.items():
            found[name].append(peer.end())
    return found


def medians(found: list[Figures]) -> Figures:
    """Return the median of each figure over the entries that have it."""
    names = dict.fromkeys(name for figures in found for name in figures)
    return {name: statistics.median(f[name] for f in found if name in f) for name in names}


def shares(ours: list[Figures], theirs: list[Figures]) -> Figures:
    """Return the medians of the ratios in each turn."""
    pairs = zip(ours, theirs, strict=True)
    return medians([{name: a[name] / b[name] for name in a} for a, b in pairs])


def show(columns: dict[str, Figures]) -> None:
    """Print the table."""
    table = Table("", *columns, "limit")
    for name in columns["headstart"]:
        limit = f"{LIMITS[name]:g} of vLLM's" if name in LIMITS else ""
        if name == "bytes_per_block":
            limit = f"{MAX_BYTES}"
        cells = [f"{column[name]:.4g}" for column in columns.values()]
        table.add_row(name, *cells, limit)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--beside", type=Path, help="a virtual environment that has vLLM")
    parser.add_argument("--compiled", type=Path, help="a folder with headstart compiled")
    parser.add_argument("--answer", action="store_true", help="run a turn for each line of input")
    parser.add_argument("--is-compiled", action="store_true", help="refuse an interpreted cache")
    options = parser.parse_args()
    if options.is_compiled and Path(headstart.cache.manager.__file__).suffix == ".py":
        parser.error(f"{headstart.cache.manager.__file__} is not compiled")
    if options.answer:
        answer(Headstart(options.blocks), memory)
        return
    found = measure_in_turns(options)
    columns: dict[str, Figures] = {}
    told: Figures = {}
    for name in [one for one in found if one != "vllm"]:
        columns[name] = medians(found[name])
        prefix = "" if name == "headstart" else f"{name}_"
        told |= {f"{prefix}{one}": figure for one, figure in columns[name].items()}
        if "vllm" in found:
            columns[f"{name}, of vLLM's"] = of = shares(found[name], found["vllm"])
            told |= {f"{prefix}{one}_of_vllm": share for one, share in of.items()}
    show(columns)
    print(json.dumps({name: round(figure, 3) for name, figure in told.items()}))


if __name__ == "__main__":
    main()
