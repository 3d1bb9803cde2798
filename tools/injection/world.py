"""Folders to damage, and the checks of a store after any damage."""

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from headstart.tiers.contents import verify
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX, DiskIndex
from headstart.tiers.store import ModelRecord
from injection.blocks import MODEL, block, name, payload

__all__ = ["BUDGET", "MODELS", "PROMPTS", "Outcome", "Templates", "WrongAnswerError", "examine",
           "exercise", "make_templates", "open_store"]  # fmt: skip

OTHER = ModelRecord("other weights", "another model", 16, 700)
MODELS = (MODEL, OTHER)
PROMPTS = {MODEL: (range(100, 120), range(200, 220)), OTHER: (range(500, 520),)}
BUDGET = 60 * 2560
_NEW = {MODEL: range(9000, 9004), OTHER: range(9500, 9504)}
_FILES = 12  # most files in a folder, even after interruptions


class WrongAnswerError(Exception):
    """A store returned wrong bytes of a block."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a fault. lost: number of lost blocks. problem: the failed check, or ""."""

    lost: int = 0
    wrong: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Templates:
    """Folders to copy. whole: all prompts; old: half of them; foreign: another store's;
    journal: whole, with a transaction that was interrupted."""

    whole: Path
    old: Path
    foreign: Path
    journal: Path


def open_store(folder: Path, model: ModelRecord = MODEL, budget: int = BUDGET) -> DiskStore:
    """Open a store of the folder."""
    return DiskStore(folder, model, budget)


def make_templates(folder: Path) -> Templates:
    """Fill the folders whose copies are damaged."""
    templates = Templates(*(folder / name for name in ("whole", "old", "foreign", "journal")))
    _save(templates.whole, {model: [prompts[0][:10]] for model, prompts in PROMPTS.items()})
    shutil.copytree(templates.whole, templates.old)
    _save(templates.whole, PROMPTS)
    _save(templates.foreign, {MODEL: [range(300, 330)], OTHER: [range(700, 712)]})
    shutil.copytree(templates.whole, templates.journal)
    _interrupt(templates.journal)
    return templates


def _save(folder: Path, prompts: Mapping[ModelRecord, Iterable[range]]) -> None:
    for model, ranges in prompts.items():
        with closing(open_store(folder, model)) as store:
            for prompt in ranges:
                store.save([block(number, model=model) for number in prompt])
            exercise(store, model, ranges)


def _interrupt(folder: Path) -> None:
    """Leave the journal of an interrupted transaction."""
    child = os.fork()
    if child == 0:
        index = DiskIndex(folder / INDEX)
        with index.transaction():
            for number in range(100, 110):
                index.remove(name(number))
            os._exit(0)
    os.waitpid(child, 0)
    assert (folder / f"{INDEX}-journal").stat().st_size


def exercise(store: DiskStore, model: ModelRecord, prompts: Iterable[Iterable[int]]) -> int:
    """Load the prompts' blocks and return the number found. Raises WrongAnswerError."""
    count = 0
    for prompt in prompts:
        for number, loaded in zip(prompt, store.load([name(n) for n in prompt]), strict=False):
            if bytes(loaded.payload) != payload(number, model.block_bytes):
                raise WrongAnswerError(f"block {number} is another's")
            count += 1
    return count


def examine(folder: Path, running: DiskStore | None = None) -> Outcome:
    """Use the folder after a fault. running: a store that was open before it."""
    first = running if running is not None else open_store(folder)
    exercise(first, MODEL, PROMPTS[MODEL])
    for model in MODELS:
        with closing(first if model is MODEL else open_store(folder, model)) as store:
            exercise(store, model, PROMPTS[model])
            if not _saves_and_loads(store, model, _NEW[model]):
                return Outcome(problem=f"new blocks of {model.title} are not stored")
    outcome = Outcome()
    for model in MODELS:
        with closing(open_store(folder, model)) as store:
            numbers = [number for prompt in PROMPTS[model] for number in prompt]
            outcome.lost += len(numbers) - exercise(store, model, [[n] for n in numbers])
            if exercise(store, model, [_NEW[model]]) == len(_NEW[model]) or model is MODEL:
                continue
            # If SQLite did not notice damage, saved blocks may be lost; saving again must work.
            if not _saves_and_loads(store, model, _NEW[model]):
                outcome.problem = "the last stored blocks cannot be stored again"
        with closing(open_store(folder, model)) as store:
            if exercise(store, model, [_NEW[model]]) < len(_NEW[model]):
                outcome.problem = "another process does not find the last stored blocks"
    outcome.problem = outcome.problem or _look_at(folder)
    return outcome


def _saves_and_loads(store: DiskStore, model: ModelRecord, numbers: range) -> bool:
    for _ in range(2):
        store.save([block(number, time.time(), model) for number in numbers])
        if exercise(store, model, [numbers]) == len(numbers):
            return True
    return False


def _look_at(folder: Path) -> str:
    """Return the problem of a folder that was used after a fault, or ""."""
    size = sum(path.stat().st_size for path in folder.glob("*.kv"))
    if size > BUDGET:
        return f"the files have {size - BUDGET:,} bytes more than they may"
    if len(names := sorted(path.name for path in folder.iterdir())) > _FILES:
        return f"files are left behind: {names}"
    verify(folder, repair=True)
    report = verify(folder)
    return "" if report.is_whole else f"damaged after a repair: {report.total}"
