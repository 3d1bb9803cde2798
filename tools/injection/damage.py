"""Faults of files: flipped bits, and cut, removed, swapped or outdated files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from injection.world import Templates

__all__ = ["DAMAGES", "Damage", "some_file"]

Damage = Callable[[Random, Path, Templates], None]


def some_file(random: Random, folder: Path, pattern: str = "*") -> Path:
    """Return a random file, if possible one that is not empty."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return random.choice([path for path in files if path.stat().st_size] or files)


def flip(pattern: str) -> Damage:
    """Return a fault that flips bits, or overwrites a range or a page of a file."""

    def inject(random: Random, folder: Path, templates: Templates) -> None:
        path = some_file(random, folder, pattern)
        data = bytearray(path.read_bytes())
        if not data:
            return
        kind = random.randrange(4)
        if kind <= 1:
            for _ in range(1 if kind == 0 else random.randint(2, 200)):
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        else:
            start = random.randrange(len(data))
            if kind == 3:
                start -= start % 4096
            length = min(len(data) - start, random.choice((8, 100, 512, 4096)))
            data[start : start + length] = random.choice((bytes(length), random.randbytes(length)))
        _overwrite(path, data)

    return inject


def _overwrite(path: Path, data: bytes | bytearray) -> None:
    """Change a file's bytes in place, like a failing disk."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def cut(random: Random, folder: Path, templates: Templates) -> None:
    """Truncate a file, or make it longer."""
    path = some_file(random, folder)
    size = path.stat().st_size
    os.truncate(path, random.choice((0, random.randint(0, size), size - 1, size + 5000)))


def remove(random: Random, folder: Path, templates: Templates) -> None:
    """Remove some of the files."""
    files = sorted(folder.iterdir())
    for path in random.sample(files, random.randint(1, len(files))):
        path.unlink()


def swap(random: Random, folder: Path, templates: Templates) -> None:
    """Swap the names of two files."""
    a, b = random.sample(sorted(folder.iterdir()), 2)
    a.rename(folder / "between")
    b.rename(a)
    (folder / "between").rename(b)


def replace(random: Random, folder: Path, templates: Templates) -> None:
    """Replace files by files of another store or older files, with a new inode or in place."""
    source = random.choice((templates.old, templates.foreign, templates.journal))
    files = sorted(source.iterdir())
    for path in random.sample(files, random.randint(1, len(files))):
        target = folder / path.name
        if target.exists() and random.random() < 0.5:
            _overwrite(target, path.read_bytes())
        else:
            target.unlink(missing_ok=True)
            shutil.copy(path, target)


def mix(random: Random, folder: Path, templates: Templates) -> None:
    """Replace the end of a file by the end of an older file or of another store's file."""
    path = some_file(random, folder)
    source = random.choice((templates.old, templates.foreign)) / path.name
    if source.exists() and path.stat().st_size:
        data, other = path.read_bytes(), source.read_bytes()
        middle = random.randrange(len(data)) // 512 * 512
        _overwrite(path, data[:middle] + other[middle:])


def take_folder(random: Random, folder: Path, templates: Templates) -> None:
    """Remove the folder."""
    shutil.rmtree(folder)


DAMAGES: dict[str, Damage] = {
    "bytes of the index": flip("index.sqlite"),
    "bytes of the journal": flip("index.sqlite-journal"),
    "bytes of the blocks": flip("*.kv"),
    "bytes of descriptions": flip("*.json"),
    "files cut": cut,
    "files removed": remove,
    "files swapped": swap,
    "files replaced by others": replace,
    "files half older": mix,
    "folder removed": take_folder,
}
