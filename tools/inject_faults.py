"""Damage cache folders in all known ways, and check that the disk store handles the damage.

    python tools/inject_faults.py [--faults 10000] [--seed 0] [--kind "files cut"] [--folder PATH]

After each fault, the store must raise no exception, return no wrong bytes, store new blocks within
two attempts, stay within its budget, and leave no open or superfluous files. After a repair,
`verify` must find no damage. Each fault runs in a separate process, so that a crash or a hang
affects only one fault. With `--folder` on a small file system (`mount -t tmpfs -o size=700k`) the
disk becomes full. A core runs 200 faults per second, or 30 if processes are killed. Ends in one
JSON line; exit status 1 if a check failed.
"""

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import NamedTuple

from injection.damage import DAMAGES
from injection.limits import LIMITS
from injection.processes import PROCESSES
from injection.world import (
    MODELS,
    PROMPTS,
    Outcome,
    Templates,
    WrongAnswerError,
    examine,
    exercise,
    make_templates,
    open_store,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

_SHARES = {**dict.fromkeys(DAMAGES, 7), **dict.fromkeys(LIMITS, 3)} | {
    "process killed": 10,
    "process stopped": 1,
    "processes at once": 2,
    "index held": 2,
}
_HANGS = 60  # seconds after which a fault is a hang


class Fault(NamedTuple):
    """One fault, which its kind and number determine."""

    kind: str
    number: int


def damaged(fault: Fault, random: Random, folder: Path, templates: Templates) -> Outcome:
    """Damage a folder that a store may have open."""
    if "journal" in fault.kind or random.random() < 0.5:  # opening would replay the journal
        DAMAGES[fault.kind](random, folder, templates)
        return examine(folder)
    with closing(open_store(folder)) as store:
        exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        DAMAGES[fault.kind](random, folder, templates)
        return examine(folder, store)


def happen(fault: Fault, folder: Path, templates: Templates) -> Outcome:
    """Inject a fault into a copy of a template; return its outcome."""
    random = Random(f"{fault.kind} {fault.number}")
    is_journal = "journal" in fault.kind or random.random() < 0.1
    shutil.copytree(templates.journal if is_journal else templates.whole, folder)
    files_open = len(os.listdir("/proc/self/fd"))
    try:
        if fault.kind in DAMAGES:
            outcome = damaged(fault, random, folder, templates)
        else:
            outcome = (PROCESSES | LIMITS)[fault.kind](random, folder)
    except WrongAnswerError as error:
        return Outcome(wrong=1, problem=str(error))
    except Exception:
        return Outcome(problem=traceback.format_exc())
    gc.collect()
    if len(os.listdir("/proc/self/fd")) > files_open:
        outcome.problem = outcome.problem or "files stay open"
    return outcome


def inject(fault: Fault, base: Path, templates: Templates) -> Outcome:
    """Inject a fault in a separate process."""
    shutil.rmtree(base / "fault", ignore_errors=True)
    folder = base / "fault" / "folder"  # faults may leave files next to it
    folder.parent.mkdir(mode=0o711)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_HANGS)
        try:
            outcome = happen(fault, folder, templates)
            os.write(writing, json.dumps(asdict(outcome)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not answer:
        return Outcome(problem=f"the process ended with status {status}")
    return Outcome(**json.loads(answer))


def choose(count: int, seed: int, kinds: list[str]) -> list[Fault]:
    """Return `count` faults, of each kind according to its share."""
    shares = {kind: share for kind, share in _SHARES.items() if not kinds or kind in kinds}
    total, numbers = sum(shares.values()), Counter[str]()
    for index in range(count):
        kind = max(shares, key=lambda kind: shares[kind] * (index + 1) / total - numbers[kind])
        numbers[kind] += 1
    return [
        Fault(kind, seed * 1_000_000 + index) for kind in shares for index in range(numbers[kind])
    ]


def run(faults: list[Fault], base: Path) -> dict[str, Counter[str]]:
    """Inject all faults; return the counts of outcomes by kind."""
    console = Console(stderr=True)
    results: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="headstart-faults-") as name:
        templates = make_templates(Path(name))
        gc.freeze()  # makes the search for open files fast in each process
        Path(name).chmod(0o711)  # allows a process without permissions to reach its folder
        fault_folder = base / Path(name).name
        fault_folder.mkdir(mode=0o711, exist_ok=True)
        with Progress(console=console, auto_refresh=False) as progress:
            for fault in progress.track(faults, description="faults"):
                outcome = inject(fault, fault_folder, templates)
                counts = results.setdefault(fault.kind, Counter())
                counts["faults"] += 1
                counts["lost"] += outcome.lost
                counts["wrong"] += outcome.wrong
                counts["problems"] += bool(outcome.problem)
                if outcome.problem:
                    progress.console.print(f"{fault}: {outcome.problem}", markup=False)
        shutil.rmtree(fault_folder, ignore_errors=True)
    return results


def show(results: dict[str, Counter[str]]) -> None:
    """Print the table, and the JSON line."""
    table = Table("kind of fault", "faults", "blocks lost", "wrong answers", "other problems")
    columns = ("faults", "lost", "wrong", "problems")
    for kind, counts in results.items():
        table.add_row(kind, *(f"{counts[column]:,}" for column in columns))
    total = Counter[str]()
    for counts in results.values():
        total.update(counts)
    table.add_section()
    table.add_row("all", *(f"{total[column]:,}" for column in columns))
    Console().print(table)
    print(json.dumps({column: total[column] for column in columns}))


def main(arguments: list[str]) -> int:
    """Run the tool; return exit status 0 if no fault cost more than blocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", default=[], choices=list(_SHARES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    logging.disable()
    results = run(choose(options.faults, options.seed, options.kind), options.folder)
    show(results)
    return int(any(counts["wrong"] or counts["problems"] for counts in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
