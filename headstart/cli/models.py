"""`headstart models`: what was downloaded from the Hugging Face hub, in the hub's own cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import huggingface_hub as hub  # its names are imported when they are used, which takes 0.3 s
from rich.cells import cell_len

from headstart.cli.opening import ending_at_once
from headstart.cli.options import NOTES
from headstart.cli.progress import show_bytes
from headstart.cli.quantize import quantize
from headstart.cli.streams import as_typed, note
from headstart.errors import ModelError, ModelNotFoundError
from headstart.models.files import BUILT_IN, check_files, download_model, find_folder

__all__ = ["models"]


class _Row(NamedTuple):
    name: str
    size: int
    remark: str


@click.group(invoke_without_command=True, short_help="List, pull, remove and quantise models.")
@click.pass_context
def models(context: click.Context) -> None:
    """List the models that are on this machine; pull, remove and quantise them."""
    if context.invoked_subcommand is None:
        _print_rows(_rows())


@models.command(short_help="Download a model from the hub.")
@click.argument("name")
def pull(name: str) -> None:
    """Download a model from the Hugging Face hub; what is whole already is kept."""
    name = as_typed(name)
    if name in NOTES:
        note(f"{name} needs no download")
        return
    with ending_at_once():
        folder = download_model(name)
    check_files(folder)
    note(f"{name}: {show_bytes(_weigh(folder))} in {folder}")


models.add_command(quantize)


@models.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove a model that was downloaded."""
    name = as_typed(name)
    repo = next((repo for repo in _downloaded() if repo.repo_id == name), None)
    if repo is None:
        names = ", ".join(repo.repo_id for repo in _downloaded())
        known = f"allowed: {names}" if names else "no model was"
        raise ModelNotFoundError(f"{name!r} was not downloaded; {known}")
    # Of this model alone: a copy of it under another name has the same commits.
    cached = replace(hub.scan_cache_dir(hub.constants.HF_HUB_CACHE), repos=frozenset([repo]))
    cached.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    note(f"{name} is removed: {show_bytes(repo.size_on_disk)}")


def _rows() -> Iterator[_Row]:
    yield _Row(BUILT_IN, _weigh(find_folder(BUILT_IN)), "comes with the package")
    for repo in _downloaded():
        yield _Row(repo.repo_id, repo.size_on_disk, _remark(repo))


def _remark(repo: hub.CachedRepoInfo) -> str:
    """Why a downloaded model does not load as it is; empty where nothing is known against it."""
    newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
    try:
        if newest is None:
            return "nothing of it is there yet"
        check_files(newest.snapshot_path)
    except ModelError:
        return "not whole, or of another format"
    return ""


def _downloaded() -> list[hub.CachedRepoInfo]:
    """The models of the hub's cache, by name."""
    try:
        repos = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE).repos
    except hub.errors.CacheNotFound:
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda repo: repo.repo_id)


def _weigh(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _print_rows(rows: Iterable[_Row]) -> None:
    found = list(rows)
    width = max(cell_len(row.name) for row in found)
    for name, size, remark in found:
        click.echo(f"{name:<{width}}  {show_bytes(size):>9}  {remark}".rstrip())
