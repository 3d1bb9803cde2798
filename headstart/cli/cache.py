"""Prefixes on disk: the command `headstart cache`, and the folder that `run` and `chat` use."""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import click

from headstart.cache import BlockHash
from headstart.cli.terminal import (
    columns_of,
    count,
    decode_argument,
    note,
    progress_bar,
    show_bytes,
)
from headstart.engine.config import EngineConfig, make_config
from headstart.errors import CacheError, ConfigError
from headstart.tiers.contents import (
    ModelState,
    StoredPrefix,
    export_blocks,
    import_blocks,
    read_model,
    read_models,
    read_prefixes,
)
from headstart.tiers.contents import verify as verify_folder
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import (
    IndexedBlock,
    default_folder,
    described_models,
    make_folder,
    reopen,
    slot_path,
)
from headstart.tiers.store import ModelRecord

_MIN_DIGITS = 4  # minimum number of digits that identify a prefix
_NAME = re.compile(rf"[0-9a-f]{{{_MIN_DIGITS},64}}")
_DIGITS = 12  # digits of a name that are shown
_MAX_SHOWN = 8  # maximum number of names in an error message
_WIDTH = 100  # columns if the output is not a terminal
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

_folder = partial(
    click.option,
    "--cache-dir",
    "folder",
    envvar="HEADSTART_CACHE_DIR",
    show_envvar=True,
    help="The folder; default: headstart in your cache folder.",
)


class PrefixFolder(NamedTuple):
    """The engine's options, and the folder for prefixes or the reason why there is none."""

    options: dict[str, Any]
    folder: Path | None
    failure: str = ""

    def note(self) -> None:
        """Show the folder of prefixes and its size, or why prefixes are not stored."""
        if self.failure:
            note(f"no prefixes are stored: {self.failure}")
        if self.folder is not None:
            size = show_bytes(size_of(self.folder))
            limit = show_bytes(self.options.get("cache_dir_bytes", EngineConfig.cache_dir_bytes))
            folder_text = shorten_home(self.folder)
            if os.access(self.folder, os.W_OK):
                note(
                    f"prefixes are stored in {folder_text}: {size} of {limit}; --cache-dir off "
                    "stores none"
                )
            else:
                note(f"prefixes are read from {folder_text}, which is read-only: {size}")


def make_prefix_folder(engine: Mapping[str, Any]) -> PrefixFolder:
    """Choose and create the folder for prefixes. If it cannot be used, prefixes are not stored.

    Raises ConfigError if the user named the folder and it cannot be used.
    """
    options = dict(engine)
    if "cache_dir" not in options:
        try:
            make_folder(default_folder())
        except (ConfigError, RuntimeError) as error:  # the user may have no home folder
            return PrefixFolder(options, None, str(error))
        options["cache_dir"] = str(default_folder())
    config = make_config(options)
    folder = config.disk_folder
    if folder is None or not config.enable_prefix_caching:
        return PrefixFolder(options, None)
    make_folder(folder)
    return PrefixFolder(options, folder)


def size_of(folder: Path) -> int:
    """Return the size of all blocks in a folder. Other processes may change it meanwhile."""
    nbytes = 0
    for file in folder.glob("*.kv"):
        with suppress(FileNotFoundError):
            nbytes += file.stat().st_size
    return nbytes


def shorten_home(path: Path) -> str:
    """Return the path with ~ for the user's home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


@click.group(short_help="List, check, drop and move the prefixes stored on disk.")
def cache() -> None:
    """List, check, drop and move the prefixes that are stored on disk."""


@cache.command(name="ls", short_help="List models, or a model's prefixes.")
@click.argument("model", required=False)
@click.option(
    "--lines",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Maximum number of prefixes to list.",
)
@_folder()
def list_prefixes(model: str | None, lines: int, folder: str | None) -> None:
    """List the models, or the prefixes of MODEL with a line for each branch.

    MODEL is a name that ls shows, or the first digits of a fingerprint. The part of the name in
    brackets may be left out.
    """
    sections = []
    with _opened(folder) as path:
        if model is None:
            sections.append(_show_models(read_models(path)))
        states = [] if model is None else _find_models(path, model)
        for state in states:
            record = state.model.record
            if len(states) > 1:
                sections.append(f"{record.title}  {record.fingerprint[:_DIGITS]}")
            sections.append(_show_prefixes(_prefixes_of(path, state), record, lines))
    click.echo("\n".join(sections))


@cache.command(short_help="Show how much is stored, and how much it saved.")
@_folder()
def stat(folder: str | None) -> None:
    """Show how much is stored, and how much computation it saved."""
    with _opened(folder) as path:
        states = read_models(path)
    nbytes, blocks = sum(state.nbytes for state in states), sum(s.num_blocks for s in states)
    tokens = sum(state.num_blocks * state.model.record.block_size for state in states)
    click.echo(f"folder   {shorten_home(path)}")
    click.echo(f"stored   {show_bytes(nbytes)}, {tokens:,} tokens in {count(blocks, 'block')}")
    click.echo(f"models   {len(states)}")
    click.echo(f"loaded   {count(sum(state.hits for state in states), 'block')}")
    click.echo(f"saved    {sum(state.saved_seconds for state in states):,.1f} s of computing")


@cache.command(short_help="Drop some prefixes, those of a model, or all.")
@click.argument("names", nargs=-1)
@click.option("--model", help="Drop all prefixes of the models that ls shows for this name.")
@click.option("--all", "everything", is_flag=True, help="Drop all prefixes of all models.")
@_folder()
def drop(names: Sequence[str], model: str | None, everything: bool, folder: str | None) -> None:
    """Drop the prefixes with these NAMES, as ls shows them, and all their continuations."""
    if sum((bool(names), model is not None, everything)) != 1:
        raise click.UsageError("pass names, or --model, or --all")
    with _opened(folder, writes=True) as path:
        states = _find_models(path, model) if model is not None else read_models(path)
        num_dropped = 0
        for state, prefixes in _select(path, states, names):
            dropped = _block_names(prefixes)
            with closing(_open_store(path, state.model.record)) as store:
                num_dropped += store.remove(dropped)
            if set(dropped) & set(_block_names(_prefixes_of(path, state))):
                raise CacheError(
                    f"some blocks could not be dropped from {path}; if its disk is full, remove "
                    "the folder"
                )
    click.echo(f"{count(num_dropped, 'block')} dropped")


@cache.command(short_help="Check that every block is intact.")
@click.option("--repair", is_flag=True, help="Drop blocks that are damaged or lost.")
@_folder()
def verify(repair: bool, folder: str | None) -> None:
    """Read every block, and report damaged blocks; exit status 1 if the index lists any."""
    with _opened(folder, writes=repair) as path, progress_bar("blocks") as advance:
        report = verify_folder(path, repair=repair, progress=advance)
    for model, counts in report.models:
        if text := ", ".join(f"{n:,} {label}" for label, n in counts._asdict().items() if n):
            click.echo(f"{model.title}  {text}")
    if not report.index_is_intact:
        click.echo("the index is damaged" + (" and was rebuilt" if repair else ""))
    if report.is_whole:
        total = report.total
        if total.overwritten:
            click.echo(
                "overwritten: a process ended while it saved these blocks; they are not used"
            )
        elif any(total):
            click.echo("all blocks in the index are intact")
        else:
            click.echo("no blocks are stored")
        return
    if not repair:
        click.echo("headstart cache verify --repair drops the damaged blocks", err=True)
    click.get_current_context().exit(1)


@cache.command(short_help="Write a prefix to a file.")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_folder()
def export(name: str, file: Path, folder: str | None) -> None:
    """Write the prefix NAME, as ls shows it, to a new FILE, with all blocks before and after it."""
    with _opened(folder) as path:
        selected = _select(path, read_models(path), [name])
        state, prefix = next((state, prefix) for state, prefixes in selected for prefix in prefixes)
        record = state.model.record
        blocks = [*_blocks_before(path, state, prefix), *prefix.all_blocks()]
        with closing(_open_store(path, record)) as store:
            num_tokens = export_blocks(store, blocks, file) * record.block_size
    click.echo(f"{num_tokens:,} tokens of {record.title} are in {file}")


@cache.command(name="import", short_help="Store the prefixes of an exported file.")
@click.argument("file", type=click.Path(path_type=Path))
@_folder()
def import_file(file: Path, folder: str | None) -> None:
    """Store the prefixes of a FILE that export wrote; the model must have run here before."""
    with _opened(folder, new=True, writes=True) as path:
        record = read_model(file)
        models = list(described_models(path))
        if slot_path(path, record) not in [slot_path(path, model) for model in models]:
            titles = ", ".join(sorted({model.title for model in models})) or "none"
            raise CacheError(
                f"{file} has blocks of {record.title!r}, and this model has not run here with the "
                f"same weights, dtype and block size; allowed: {titles}"
            )
        with closing(_open_store(path, record)) as store:
            num_tokens = import_blocks(store, file, time.time()) * record.block_size
    click.echo(f"{num_tokens:,} new tokens of {record.title} are stored")


@contextmanager
def _opened(folder: str | None, *, new: bool = False, writes: bool = False) -> Iterator[Path]:
    """Yield the path of the folder. Raise CacheError if it or its index cannot be read.

    Print results outside of this context: inside, an output error would be reported as an error of
    the folder. new: create the folder if it does not exist. writes: raise CacheError if the folder
    is read-only.
    """
    path = default_folder()
    if folder not in (None, "", "off"):
        path = Path(decode_argument(folder)).expanduser()
        if not (new or path.exists()):
            raise CacheError(f"--cache-dir is {path}; allowed: an existing folder")
    if not make_folder(path) and writes:
        raise CacheError(f"{path} cannot be written")
    try:
        yield path
    except (sqlite3.Error, OSError) as error:
        raise CacheError(f"{path} cannot be read: {error}; try headstart cache verify") from error


def _open_store(path: Path, record: ModelRecord) -> DiskStore:
    """Open the store of a model, with space for more blocks."""
    return DiskStore(path, record, max(EngineConfig.cache_dir_bytes, 2 * size_of(path)))


def _find_models(path: Path, name: str) -> list[ModelState]:
    """Return the models with this name or fingerprint. Raises CacheError if there are none.

    A name without its part in brackets matches all models that differ only in this part. Models
    with the same fingerprint may differ in their block size.
    """
    states, name = read_models(path), decode_argument(name)
    titles = [state.model.record.title for state in states]
    begins = (f"{name} (", f"{name}, ")  # a comma and a pipeline stage may follow
    if any(is_named := [f"{title}, ".startswith(begins) for title in titles]):
        return list(compress(states, is_named))
    fingerprints = sorted({state.model.record.fingerprint for state in states})
    is_long = len(name) >= _MIN_DIGITS
    if matches := [text for text in fingerprints if is_long and text.startswith(name)]:
        _check_unique(name, matches)
        return [state for state in states if state.model.record.fingerprint == matches[0]]
    models = ", ".join(dict.fromkeys(titles)) or "none"
    raise CacheError(f"no prefixes of a model {name!r} are stored; allowed: {models}")


def _check_unique(name: str, names: Sequence[str]) -> None:
    """Raise CacheError if several names begin with `name`."""
    if len(names) > 1:
        examples = ", ".join(text[: max(_DIGITS, len(name) + 4)] for text in names[:_MAX_SHOWN])
        raise CacheError(
            f"{len(names)} names begin with {name!r}; allowed: more digits, as in {examples}"
        )


def _prefixes_of(path: Path, state: ModelState) -> list[StoredPrefix]:
    with closing(reopen(path, None)) as index:
        return read_prefixes(index, state.model.id)


def _block_names(prefixes: Sequence[StoredPrefix]) -> list[BlockHash]:
    return [block.name for prefix in prefixes for block in prefix.all_blocks()]


def _select(
    path: Path, states: Sequence[ModelState], names: Sequence[str]
) -> list[tuple[ModelState, list[StoredPrefix]]]:
    """Return each model with the prefixes whose name begins with one of `names`.

    Continuations of a selected prefix are left out. Without names, return all prefixes. Raises
    CacheError if a name matches no prefix or several prefixes.
    """
    names = tuple(decode_argument(name).lower() for name in names)
    trees = [(state, _prefixes_of(path, state)) for state in states]
    hashes = [prefix.name.hex() for _, roots in trees for _, prefix in _in_order(roots)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise CacheError(
                f"{name!r} is not a prefix's name; allowed: at least {_MIN_DIGITS} hexadecimal "
                "digits of a name that headstart cache ls MODEL lists"
            )
        matches = [text for text in hashes if text.startswith(name)]
        if not matches:
            raise CacheError(f"no prefix {name!r} is stored; headstart cache ls MODEL lists all")
        _check_unique(name, matches)
    return [(state, _first_named(roots, names) if names else roots) for state, roots in trees]


def _first_named(prefixes: Sequence[StoredPrefix], names: tuple[str, ...]) -> list[StoredPrefix]:
    named: list[StoredPrefix] = []
    for prefix in prefixes:
        is_named = prefix.name.hex().startswith(names)
        named += [prefix] if is_named else _first_named(prefix.children, names)
    return named


def _blocks_before(path: Path, state: ModelState, prefix: StoredPrefix) -> list[IndexedBlock]:
    """Return the blocks before a prefix, from the root on."""
    with closing(reopen(path, None)) as index:
        blocks = {block.name: block for block in index.list_blocks(state.model.id)}
    blocks_before = [prefix.segment[0]]
    while (block := blocks.get(blocks_before[-1].parent)) is not None:
        blocks_before.append(block)
    return blocks_before[:0:-1]


def _show_models(states: Sequence[ModelState]) -> str:
    if not states:
        return "no prefixes are stored"
    rows = [
        (
            state.model.record.title,
            state.model.record.fingerprint[:_DIGITS],
            show_bytes(state.nbytes),
            f"{state.num_blocks * state.model.record.block_size:,}",
            _show_age(state.used),
            f"{state.hits * state.model.record.block_size:,} tokens",
            f"{state.saved_seconds:.1f} s",
        )
        for state in states
    ]
    heading = ("model", "fingerprint", "size", "tokens", "last used", "loaded", "saved")
    return "\n".join(_align([heading, *rows], left=2))


def _show_prefixes(prefixes: Sequence[StoredPrefix], model: ModelRecord, max_lines: int) -> str:
    """Return a line for each path between two forks, and a line with the beginning of its text."""
    rows = [("prefix", "tokens", "size", "last used", "loaded", "saved")]
    quotes = [""]
    ordered = list(_in_order(prefixes))
    for depth, prefix in ordered[:max_lines]:
        blocks, size = prefix.segment, model.block_size
        rows.append(
            (
                "  " * depth + prefix.name.hex()[:_DIGITS],
                f"{blocks[0].depth * size:,} to {(blocks[-1].depth + 1) * size:,}",
                show_bytes(len(blocks) * model.block_bytes),
                _show_age(max(block.used for block in blocks)),
                f"{sum(block.hits for block in blocks) * size:,} tokens",
                f"{sum(block.hits * block.seconds for block in blocks):.1f} s",
            )
        )
        width = max((columns_of(sys.stdout) or _WIDTH) - 2 * depth - 2, 8)
        text = prefix.text
        shortened = text if len(text) <= width else f"{text[: width - 3].rstrip()}..."
        quotes.append(f'{"  " * depth}"{shortened}"' if text else "")
    if len(ordered) > max_lines:
        rows.append((f"... {len(ordered) - max_lines:,} more", "", "", "", "", ""))
        quotes.append("")
    lines = zip(_align(rows, left=1), quotes, strict=True)
    return "\n".join(line for pair in lines for line in pair if line)


def _in_order(prefixes: Sequence[StoredPrefix]) -> Iterator[tuple[int, StoredPrefix]]:
    """Yield each prefix before its continuations, with the number of forks before it."""
    pending = [(0, prefix) for prefix in reversed(prefixes)]
    while pending:
        depth, prefix = pending.pop()
        yield depth, prefix
        pending += [(depth + 1, child) for child in reversed(prefix.children)]


def _show_age(used: float) -> str:
    """Return the time since `used` in whole days, hours, minutes or seconds."""
    seconds = max(0, int(time.time() - used))
    unit, size = next((age for age in _AGES if seconds >= age[1]), _AGES[-1])
    return f"{seconds // size} {unit}"


def _align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the rows with the first `left` columns aligned left, the others right.

    If the rows are wider than the terminal, put the other columns on separate, indented lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = columns_of(sys.stdout)
    is_wide = columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        parts = [cells[:left], ["", *cells[left:]]] if is_wide else [cells]
        lines.append("\n".join(line for part in parts if (line := "  ".join(part).rstrip())))
    return lines
