"""`headstart cache`: what of prompts is kept on disk, by model and by prefix."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import compress
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from headstart.cache import BlockHash
from headstart.cli.cache.keeping import shorten_home, size_of
from headstart.cli.cache.listing import NAME_DIGITS, in_order, show_models, show_prefixes
from headstart.cli.help import OrderedGroup
from headstart.cli.progress import show_bytes
from headstart.cli.reply_metrics import count
from headstart.cli.streams import as_typed, columns_of
from headstart.engine.config import EngineConfig
from headstart.errors import CacheError
from headstart.tiers import DiskStore, default_folder, make_folder
from headstart.tiers.contents import KeptPrefix, ModelState, read_models, read_prefixes
from headstart.tiers.folder import described_models, reopen, slot_path
from headstart.tiers.index import KeptBlock
from headstart.tiers.transfer import export_blocks, import_blocks, read_model
from headstart.tiers.verify import verify as verify_folder

__all__ = ["cache"]

_SHORTEST = 4  # digits of a prefix's name
_NAME = re.compile(rf"[0-9A-Fa-f]{{{_SHORTEST},64}}")
_MOST_SHOWN = 8  # names in an error

_folder = partial(
    click.option,
    "--cache-dir",
    "folder",
    envvar="HEADSTART_CACHE_DIR",
    show_envvar=True,
    help="The folder; default: headstart in your cache folder.",
)


@click.group(cls=OrderedGroup, short_help="List, check, drop and move what is kept on disk.")
def cache() -> None:
    """Prefixes that outlive the process: list, check and drop them, or take them elsewhere."""


@cache.command(name="ls", short_help="List models, or a model's prefixes.")
@click.argument("model", required=False)
@click.option("--lines", type=click.IntRange(1), default=30, show_default=True, help="At the most.")
@_folder()
def list_kept(model: str | None, lines: int, folder: str | None) -> None:
    """List the models, or the prefixes of one MODEL, from fork to fork.

    MODEL is what ls shows: a name, which stands for all its kinds, or digits of a fingerprint.
    """
    columns, shown = columns_of(sys.stdout), []
    with _opened(folder) as path:
        if model is None:
            shown.append(show_models(read_models(path), columns))
        states = [] if model is None else _find_models(path, model)
        for state in states:
            record = state.model.record
            if len(states) > 1:
                shown.append(f"{record.title}  {record.fingerprint[:NAME_DIGITS]}")
            shown.append(show_prefixes(_all_of(path, state), record, lines, columns))
    click.echo("\n".join(shown))


@cache.command(short_help="Say how much is kept, and saved.")
@_folder()
def stat(folder: str | None) -> None:
    """How much is kept, and what that has saved."""
    with _opened(folder) as path:
        states = read_models(path)
    nbytes, blocks = sum(one.nbytes for one in states), sum(one.num_blocks for one in states)
    tokens = sum(one.num_blocks * one.model.record.block_size for one in states)
    click.echo(f"folder   {shorten_home(path)}")
    click.echo(f"kept     {show_bytes(nbytes)}, {tokens:,} tokens in {blocks:,} blocks")
    click.echo(f"models   {len(states)}")
    click.echo(f"loaded   {sum(one.hits for one in states):,} blocks")
    click.echo(f"saved    {sum(one.saved_seconds for one in states):,.1f} s of computing")


@cache.command(short_help="Drop prefixes, a model's, or all.")
@click.argument("names", nargs=-1)
@click.option("--model", help="Drop all prefixes of the models that ls shows for this name.")
@click.option("--all", "everything", is_flag=True, help="Drop all prefixes of all models.")
@_folder()
def drop(names: Sequence[str], model: str | None, everything: bool, folder: str | None) -> None:
    """Drop prefixes by NAMES, as ls shows them, with all that goes on from there."""
    if sum((bool(names), model is not None, everything)) != 1:
        raise click.UsageError("give names, or --model, or --all")
    with _opened(folder, writes=True) as path:
        states = _find_models(path, model) if model is not None else read_models(path)
        wanted = [as_typed(name) for name in names]
        _require_kept(path, states, wanted)
        dropped = 0
        for state in states:
            record = state.model.record
            with closing(DiskStore(path, record, _most(path))) as store:
                found = _all_of(path, state)
                found = _chosen(found, wanted) if names else found
                dropped += store.remove(gone := _names_of(found))
            if set(gone) & set(_names_of(_all_of(path, state))):
                raise CacheError(
                    f"not all was dropped: {path} cannot be changed now; if its disk is full, "
                    "remove the folder"
                )
    click.echo(f"{count(dropped, 'block')} dropped")


@cache.command(short_help="Check that every block is whole.")
@click.option("--repair", is_flag=True, help="Forget what is damaged or lost.")
@_folder()
def verify(repair: bool, folder: str | None) -> None:
    """Read every block, and say what is whole; exit status 1 if not all that is listed is."""
    with _opened(folder, writes=repair) as path, _progress("blocks") as advance:
        report = verify_folder(path, repair=repair, progress=advance)
    for model, counts in report.models:
        if told := ", ".join(f"{n:,} {what}" for what, n in counts._asdict().items() if n):
            click.echo(f"{model.title}  {told}")
    if not report.index_is_sound:
        click.echo("the index is damaged" + (" and was made anew" if repair else ""))
    if report.is_whole:
        total = report.total
        if total.overwritten:
            click.echo("overwritten: a process ended while it saved; these blocks are misses")
        elif any(total):
            click.echo("every block that is listed is whole")
        else:
            click.echo("no blocks are kept")
        return
    if not repair:
        click.echo("headstart cache verify --repair forgets what is not whole", err=True)
    click.get_current_context().exit(1)


@cache.command(short_help="Write a prefix to a file.")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_folder()
def export(name: str, file: Path, folder: str | None) -> None:
    """Write the prefix NAME, as ls shows it, with all before and after it, to a new FILE."""
    with _opened(folder) as path:
        states = read_models(path)
        _require_kept(path, states, [wanted := as_typed(name)])
        state, [prefix, *_] = next(
            (state, found) for state in states if (found := _chosen(_all_of(path, state), [wanted]))
        )
        blocks = [*_before(path, state, prefix), *prefix.all_blocks()]
        with closing(DiskStore(path, state.model.record, _most(path))) as store:
            num_tokens = export_blocks(store, blocks, file) * state.model.record.block_size
    click.echo(f"{num_tokens:,} tokens of {state.model.record.title} are in {file}")


@cache.command(name="import", short_help="Keep what export wrote.")
@click.argument("file", type=click.Path(path_type=Path))
@_folder()
def import_file(file: Path, folder: str | None) -> None:
    """Keep the prefixes of a FILE that export wrote; the model must have run here before."""
    with _opened(folder, new=True, writes=True) as path:
        record = read_model(file)
        known = list(described_models(path))
        if slot_path(path, record) not in [slot_path(path, one) for one in known]:
            titles = ", ".join(sorted({one.title for one in known})) or "none"
            raise CacheError(
                f"{file} is of a model {record.title!r} that has not run here with these weights, "
                f"dtype and block size; models that have: {titles}"
            )
        with closing(DiskStore(path, record, _most(path))) as store:
            num_tokens = import_blocks(store, file, time.time()) * record.block_size
    click.echo(f"{num_tokens:,} tokens of {record.title} are new here")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, in terminals alone."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _opened(folder: str | None, *, new: bool = False, writes: bool = False) -> Iterator[Path]:
    """The folder; what is wrong with its index is one clear error.

    Print results outside of it: an output that fails would be told as a damaged folder.
    new: one that was named is made if it is not there. writes: one that cannot be written is an
    error.
    """
    path = default_folder()
    if folder not in (None, "", "off"):
        path = Path(as_typed(folder)).expanduser()
        if not (new or path.exists()):
            raise CacheError(f"--cache-dir is {path}, and there is no such folder")
    if not make_folder(path) and writes:
        raise CacheError(f"{path} cannot be written")
    try:
        yield path
    except (sqlite3.Error, OSError) as error:
        raise CacheError(f"{path} cannot be read: {error}; headstart cache verify") from error


def _most(path: Path) -> int:
    """A budget that nothing that is there exceeds."""
    return max(EngineConfig.cache_dir_bytes, 2 * size_of(path))


def _find_models(path: Path, name: str) -> list[ModelState]:
    """The models of this name, in all their kinds unless it ends in one; or of this fingerprint.

    One fingerprint may have several models, which differ in their block size. A few of its digits
    are enough. Raises CacheError.
    """
    states = read_models(path)
    wanted = as_typed(name)
    names = (f"{wanted} (", f"{wanted}, ")  # a stage of a pipeline stands behind a comma
    titles = [one.model.record.title for one in states]
    if any(named := [title == wanted or title.startswith(names) for title in titles]):
        return list(compress(states, named))
    prints = sorted({one.model.record.fingerprint for one in states})
    if found := [one for one in prints if len(wanted) >= _SHORTEST and one.startswith(wanted)]:
        _require_one(wanted, found)
        return [one for one in states if one.model.record.fingerprint == found[0]]
    known = ", ".join(dict.fromkeys(titles)) or "none"
    raise CacheError(f"no prefixes of a model {wanted!r} are kept; models that have: {known}")


def _require_one(name: str, found: Sequence[str]) -> None:
    """Raise CacheError if a name is the beginning of several."""
    if len(found) > 1:
        shown = ", ".join(one[: max(NAME_DIGITS, len(name) + 4)] for one in found[:_MOST_SHOWN])
        raise CacheError(f"{name!r} is the beginning of {len(found)} names; give more of: {shown}")


def _all_of(path: Path, state: ModelState) -> list[KeptPrefix]:
    with closing(reopen(path, None).connection) as index:
        return read_prefixes(index, state.model.id)


def _names_of(prefixes: Sequence[KeptPrefix]) -> list[BlockHash]:
    """The names of all their blocks."""
    return [block.name for one in prefixes for block in one.all_blocks()]


def _chosen(prefixes: Sequence[KeptPrefix], names: Sequence[str]) -> list[KeptPrefix]:
    """The prefixes whose names begin so, without those behind one that does."""
    found: list[KeptPrefix] = []
    todo = [*prefixes]
    while todo:
        prefix = todo.pop()
        if any(_is_named(prefix, name) for name in names):
            found.append(prefix)
        else:
            todo += prefix.then
    return found


def _is_named(prefix: KeptPrefix, name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and prefix.name.hex().startswith(name.lower())


def _require_kept(path: Path, states: Sequence[ModelState], names: Sequence[str]) -> None:
    """Raise CacheError for a name that no prefix has, or several."""
    roots = [prefix for state in states for prefix in _all_of(path, state)]
    everything = [prefix for _, prefix in in_order(roots)]
    for name in names:
        if found := [prefix.name.hex() for prefix in everything if _is_named(prefix, name)]:
            _require_one(name, found)
            continue
        shown = [prefix.name.hex()[:NAME_DIGITS] for prefix in everything[:_MOST_SHOWN]]
        more = f", and {len(everything) - len(shown):,} more" if everything[_MOST_SHOWN:] else ""
        titles = ", ".join(dict.fromkeys(one.model.record.title for one in states))
        kept = f"{', '.join(shown)}{more}, of {titles}" if shown else "none"
        wrong = f"no prefix {name!r} is kept"
        if not _NAME.fullmatch(name):
            wrong = f"{name!r} is no name; allowed: {_SHORTEST} hexadecimal digits of one or more"
        raise CacheError(f"{wrong}; kept: {kept}; headstart cache ls MODEL prints their names")


def _before(path: Path, state: ModelState, prefix: KeptPrefix) -> list[KeptBlock]:
    """The blocks before a prefix, from the root on."""
    with closing(reopen(path, None).connection) as index:
        blocks = {block.name: block for block in index.list_blocks(state.model.id)}
    found = []
    at = blocks.get(prefix.stretch[0].parent)
    while at is not None:
        found.append(at)
        at = blocks.get(at.parent)
    return found[::-1]
