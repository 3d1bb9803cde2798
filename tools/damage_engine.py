"""Damage prefixes on disk, of prompts with adapters and images, and check a new engine's answers.

    python tools/damage_engine.py MODEL [--adapter FOLDER ...] [--images] [--faults 500] [--seed 0]

For each fault, a copy of a folder that an engine filled is damaged as in `inject_faults.py`. For
half of the faults the clock jumps by years. A new engine with this folder must not fail. It must
generate the same tokens as an engine without a store, whichever adapter has the name now. After a
repair, `verify` must find no damage. A fault takes half a second with the smallest model. Ends in
one JSON line; exit status 1 if an answer differs or another check fails.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from injection.damage import DAMAGES
from injection.world import Templates
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from headstart import LLM, SamplingParams
from headstart.engine.adapter_names import LoRARequest
from headstart.tiers.contents import verify

_PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
_TEXTS = ("What is {} here?", "Another text: {} and {}", "What is {} and {} here?")


class World:
    """A model, its prompts, and the adapters that may have the same name."""

    def __init__(self, options: argparse.Namespace) -> None:
        random = Random(options.seed)
        self.model = options.model
        self.adapters: list[str | None] = [None, *options.adapter]
        begin = [random.randrange(3, 140) for _ in range(80)]
        self.prompts = [begin + [random.randrange(3, 140) for _ in range(n)] for n in (5, 20, 40)]
        self.images = [
            Image.frombytes("RGB", (56, 56), random.randbytes(3 * 56 * 56))
            for _ in range(2 if options.images else 0)
        ]

    def ask(self, folder: Path | None, adapter: str | None) -> tuple[list[list[int]], int]:
        """Return a new engine's answers without and with an adapter, and its loaded tokens."""
        llm = LLM(
            self.model,
            dtype="float32",
            block_size=4,
            num_blocks=128,
            num_threads=1,
            deterministic=True,
            debug=True,
            enable_lora=len(self.adapters) > 1,
            cache_dir=None if folder is None else str(folder),
        )
        with closing(llm):
            prompts = self._prompts(llm)
            requests = [None] if adapter is None else [None, LoRARequest("one", 1, adapter)]
            outputs = [
                output
                for request in requests
                for output in llm.generate(prompts, _PARAMS, use_tqdm=False, lora_request=request)
            ]
        loaded = sum(output.num_loaded_tokens for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs], loaded

    def _prompts(self, llm: LLM) -> Sequence[Any]:
        if not self.images:
            return [{"prompt_token_ids": tokens} for tokens in self.prompts]
        assert llm.frontend.images is not None, "the model has no vision"
        place = llm.frontend.images.placeholder
        return [
            {
                "prompt": text.format(*[place] * 2),
                "multi_modal_data": {"image": self.images[: text.count("{}")]},
            }
            for text in _TEXTS
        ]


@contextmanager
def jumping(random: Random) -> Iterator[None]:
    """Make the clock jump by years, in half of the cases."""
    now, jumps = time.time(), random.random() < 0.5
    with patch("time.time", (lambda: now + random.uniform(-3e8, 3e8)) if jumps else time.time):
        yield


def make_templates(world: World, base: Path) -> Templates:
    """Fill folders with engines: with all prompts, without adapters, and with one adapter only."""
    whole, old, foreign = base / "whole", base / "old", base / "foreign"
    for folder, adapters in (
        (whole, world.adapters),
        (old, world.adapters[:1]),
        (foreign, world.adapters[-1:]),
    ):
        for adapter in adapters:
            world.ask(folder, adapter)
    return Templates(whole, old, foreign, journal=whole)


def run(world: World, options: argparse.Namespace) -> Counter[str]:
    """Inject the faults; return the counts of their outcomes."""
    counts = Counter[str](wrong=0, failed=0)
    alone = {adapter: world.ask(None, adapter)[0] for adapter in world.adapters}
    assert len(set(map(str, alone.values()))) == len(alone), "adapters that change nothing"
    kinds = sorted(kind for kind in DAMAGES if "journal" not in kind)
    with (
        tempfile.TemporaryDirectory(prefix="headstart-damaged-") as name,
        Progress(console=Console(stderr=True), auto_refresh=False) as progress,
    ):
        base = Path(name)
        templates = make_templates(world, base)
        for number in progress.track(range(options.faults), description="faults"):
            random = Random(f"{options.seed} {number}")
            kind, adapter = random.choice(kinds), random.choice(world.adapters)
            folder = base / "folder"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(templates.whole, folder)
            DAMAGES[kind](random, folder, templates)
            counts["faults"] += 1
            try:
                with jumping(random):
                    answers, loaded = world.ask(folder, adapter)
                verify(folder, repair=True)
                is_whole = verify(folder).is_whole
            except Exception:
                progress.console.print(number, kind, traceback.format_exc(), markup=False)
                counts["failed"] += 1
                continue
            counts["loaded tokens"] += loaded
            counts["wrong"] += answers != alone[adapter]
            counts["failed"] += not is_whole
    return counts


def main(arguments: list[str]) -> int:
    """Run the tool; return exit status 0 if every answer was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable()
    counts = run(World(options), options)
    print(json.dumps(counts))
    return int(bool(counts["wrong"] or counts["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
