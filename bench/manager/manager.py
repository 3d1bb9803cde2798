"""What the cache manager costs, in microseconds, with no model and no tensor.

    python bench/manager/manager.py [--blocks 100000] [--turns 20] [--beside build/peers/vllm]

A request of 8,192 tokens, half of which is cached, meets a full pool of blocks of 16, so that
every new block evicts a cached one: naming, lookup, allocation, free. And 256 requests decode a
token a step: `append` and `append_slots`. Medians over the turns, one thread. What limits it is
the interpreter: a block costs an object made, one unlinked, and a handful of attribute stores.

`--beside` names a virtual environment that has vLLM (`peers.py` says how to make one). Its own
manager then meets the same load, turn by turn, and the limits are shares of its figures: a fifth
a request, a tenth a decode step. Ends in one JSON line.
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

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence

LIMITS = {"request_us": 1 / 5, "decode_us": 1 / 10, "pool_init_s": 1.0}  # of vLLM's in one run
MAX_BYTES = 302  # a cached block


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
    """Of this manager."""
    return measure_memory(lambda n: KVCacheManager(CacheConfig(num_blocks=n)), Headstart)


def measure_in_turns(options: argparse.Namespace) -> tuple[list[Figures], list[Figures]]:
    """This manager's figures, turn by turn and those of the end, and vLLM's if it is asked."""
    commands = [[sys.executable, __file__, "--answer"]]
    if options.beside is not None:
        theirs = Path(__file__).with_name("vllm_manager.py")
        commands.append([str(options.beside / "bin" / "python"), str(theirs)])
    found: list[list[Figures]] = [[], []]
    with ExitStack() as running, Progress(console=Console(stderr=True)) as progress:
        peers = [
            running.enter_context(Peer([*command, "--blocks", str(options.blocks)]))
            for command in commands
        ]
        for _ in progress.track(range(options.turns), description="turns"):
            for peer, figures in zip(peers, found, strict=False):
                figures.append(peer.turn())
        for peer, figures in zip(peers, found, strict=False):
            figures.append(peer.end())
    return found[0], found[1]


def medians(found: list[Figures]) -> Figures:
    """Of every figure, over those who have it."""
    names = dict.fromkeys(name for figures in found for name in figures)
    return {name: statistics.median(f[name] for f in found if name in f) for name in names}


def show(figures: Figures, shares: Figures) -> None:
    """The table a person reads."""
    table = Table("", "measured", "of vLLM's", "limit")
    for name, figure in figures.items():
        share = f"{shares[name]:.3f}" if name in shares else ""
        limit = f"{LIMITS[name]:g} of vLLM's" if name in LIMITS else ""
        if name == "bytes_per_block":
            limit = f"{MAX_BYTES}"
        table.add_row(name, f"{figure:.4g}", share, limit)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--beside", type=Path, help="a virtual environment that has vLLM")
    parser.add_argument("--answer", action="store_true", help="take a turn for each line of input")
    options = parser.parse_args()
    if options.answer:
        answer(Headstart(options.blocks), memory)
        return
    ours, theirs = measure_in_turns(options)
    figures = medians(ours)
    shares = medians(
        [{name: a[name] / b[name] for name in a} for a, b in zip(ours, theirs, strict=False)]
    )
    show(figures, shares)
    told = {f"{name}_of_vllm": round(share, 3) for name, share in shares.items()}
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()} | told))


if __name__ == "__main__":
    main()
