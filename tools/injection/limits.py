"""Faults of the machine: full disk, failing system calls, lost permissions, wrong clock, links."""

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from injection.blocks import block
from injection.damage import some_file
from injection.processes import work
from injection.world import MODELS, PROMPTS, Outcome, examine, exercise, open_store

__all__ = ["LIMITS"]

_NOBODY = 65534


def _use(random: Random, folder: Path) -> None:
    work(random, folder, random.randint(1, 6))


def file_size(random: Random, folder: Path) -> Outcome:
    """Limit the size of files."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with closing(open_store(folder)) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (random.randrange(160_000), most))
        _use(random, folder)
        store.save([block(number, time.time()) for number in range(9000, 9010)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return _unless_evicted(examine(folder, store))


def _unless_evicted(outcome: Outcome) -> Outcome:
    """Return the outcome without lost blocks, since a fault of this kind also evicts blocks."""
    outcome.lost = 0
    return outcome


def _failing(random: Random, real: Callable[..., Any], share: float) -> Callable[..., Any]:
    """Return a system call that fails in a share of the calls."""

    def call(*arguments: Any) -> Any:
        if random.random() < share:
            number = random.choice((errno.ENOSPC, errno.EIO, errno.EPERM, errno.EDQUOT))
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


def _cutting(random: Random, real: Callable[..., int], share: float) -> Callable[..., int]:
    """Return an `os.pwritev` that writes only a part in a share of the calls."""

    def call(fd: int, parts: Any, offset: int) -> int:
        if random.random() < share:
            data = b"".join(parts)
            return os.pwrite(fd, data[: random.randrange(len(data))], offset)
        return real(fd, parts, offset)

    return call


def failing_calls(random: Random, folder: Path) -> Outcome:
    """Let some or all reads and writes fail."""
    share = random.choice((0.05, 0.3, 1.0))
    names = random.sample(("pwritev", "preadv", "pwrite", "pread", "truncate", "fstat", "open"), 3)
    with closing(open_store(folder)) as store:
        patches = [patch.object(os, n, _failing(random, getattr(os, n), share)) for n in names]
        for each in patches:
            each.start()
        _use(random, folder)
        exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        for each in patches:
            each.stop()
        return _unless_evicted(examine(folder, store))


def short_writes(random: Random, folder: Path) -> Outcome:
    """Write only a part of a block."""
    with closing(open_store(folder)) as store:
        with patch.object(os, "pwritev", _cutting(random, os.pwritev, 0.5)):
            _use(random, folder)
            store.save([block(number, time.time()) for number in range(9000, 9010)])
        return _unless_evicted(examine(folder, store))


def no_permission(random: Random, folder: Path) -> Outcome:
    """Remove permissions of files or of the folder temporarily."""
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, _NOBODY, _NOBODY)
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    paths = [folder, *sorted(folder.iterdir())]
    chosen = random.sample(paths, random.randint(1, len(paths)))
    modes = {path: path.stat().st_mode for path in paths}
    with closing(open_store(folder)) as store:
        if random.random() < 0.5:
            exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        mode = random.choice((0o000, 0o400, 0o500))
        for path in sorted(chosen, reverse=True):
            with suppress(FileNotFoundError):  # a journal that was played back
                path.chmod(mode)
        exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        store.save([block(number, time.time()) for number in range(9000, 9010)])
        for path in paths:
            with suppress(FileNotFoundError):
                path.chmod(modes[path])
        return examine(folder, store)


def link_for_file(random: Random, folder: Path) -> Outcome:
    """Replace a file by a link to its moved copy, or temporarily by a link to something else."""
    path = some_file(random, folder)
    others = [other for other in sorted(folder.iterdir()) if other != path]
    moved = folder.with_name("moved")
    with closing(open_store(folder)) as store:
        if random.random() < 0.5:
            exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        with suppress(FileNotFoundError):  # a journal that was played back
            shutil.move(path, moved)
        target = random.choice((moved, random.choice(others), path, folder, folder / "nowhere"))
        path.symlink_to(target)
        exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        store.save([block(number, time.time()) for number in range(9000, 9010)])
        if target != moved and path.is_symlink():
            path.unlink()
        return _unless_evicted(examine(folder, store))


def link_for_folder(random: Random, folder: Path) -> Outcome:
    """Replace the folder by a link to its moved copy; a store may have it open."""
    with closing(open_store(folder)) as store:
        if random.random() < 0.5:
            exercise(store, MODELS[0], PROMPTS[MODELS[0]])
        moved = folder.with_name("moved")
        folder.rename(moved)
        folder.symlink_to(moved)
        return examine(folder, store)


def wrong_clock(random: Random, folder: Path) -> Outcome:
    """Let the clock jump by years, back and forth."""
    now = time.time()
    with patch("time.time", lambda: now + random.uniform(-3e8, 3e8)):
        for _ in range(10):
            work(random, folder, 5)
    return _unless_evicted(examine(folder))


LIMITS: dict[str, Callable[[Random, Path], Outcome]] = {
    "file size limited": file_size,
    "system calls failing": failing_calls,
    "writes cut short": short_writes,
    "permission lost": no_permission,
    "clock jumping": wrong_clock,
    "links for files": link_for_file,
    "a link for the folder": link_for_folder,
}
