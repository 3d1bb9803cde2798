"""`headstart models`: what was downloaded from the Hugging Face hub, in the hub's own cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import huggingface_hub as hub  # its names are imported when they are used, which takes 0.3 s
from rich.cells import cell_len

from headstart.cli.opening import ending_at_once
from headstart.cli.options import NOTES
from headstart.cli.progress import show_bytes
from headstart.cli.quantize import quantize
from headstart.cli.streams import as_typed, note
from headstart.errors import ModelError, ModelNotFoundError
from headstart.models.files import (
    BUILT_IN,
    check_files,
    download_gguf,
    download_model,
    find_folder,
)
from headstart.models.gguf.hub import label_files, parse_name

__all__ = ["models"]


class _Row(NamedTuple):
    """A model in the list; repo and files: in the hub's cache, files of GGUF alone."""

    name: str
    size: int
    remark: str
    repo: Any = None
    files: Sequence[Any] = ()


@click.group(
    invoke_without_command=True, short_help="List, recommend, pull, remove and quantise models."
)
@click.pass_context
def models(context: click.Context) -> None:
    """List the models that are on this machine; pull, remove and quantise them."""
    if context.invoked_subcommand is None:
        _print_rows(_rows())


@models.command("list", short_help="List the models that are on this machine.")
def list_models() -> None:
    """List the models that are on this machine, as `headstart models` does."""
    _print_rows(_rows())


@models.command(short_help="Download a model from the hub.")
@click.argument("name")
def pull(name: str) -> None:
    """Download a model from the Hugging Face hub; what is whole already is kept.

    NAME is OWNER/NAME, or OWNER/NAME:Q4_K_M for a GGUF file in this quantization. Of a
    repository of GGUF files without one it is the file in Q4_K_M, or the only file.
    """
    name = as_typed(name)
    if name in NOTES:
        note(f"{name} needs no download")
        return
    if (named := parse_name(name)) is not None:
        with ending_at_once():
            file = download_gguf(named)
        note(f"{name}: {show_bytes(file.stat().st_size)} in {file}")
        return
    with ending_at_once():
        folder = download_model(name)
    check_files(folder)
    note(f"{name}: {show_bytes(_weigh(folder))} in {folder}")


class _Recommended(NamedTuple):
    """A small model that chats: its size in bytes on the hub, and its licence."""

    name: str
    size: int
    licence: str


_MEGABYTE = 10**6
_BESIDE = 1000 * _MEGABYTE  # of RAM: torch, the tokenizer, buffers of a step
_RECOMMENDED = (
    _Recommended("Qwen/Qwen3-0.6B-GGUF:Q8_0", 640 * _MEGABYTE, "Apache 2.0"),
    _Recommended("bartowski/google_gemma-3-1b-it-GGUF:Q4_0", 722 * _MEGABYTE, "Gemma"),
    _Recommended("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 810 * _MEGABYTE, "Llama 3.2"),
    _Recommended("bartowski/HuggingFaceTB_SmolLM3-3B-GGUF:Q4_K_M", 1920 * _MEGABYTE, "Apache 2.0"),
    _Recommended("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", 2020 * _MEGABYTE, "Llama 3.2"),
    _Recommended("bartowski/Qwen_Qwen3-1.7B-GGUF:Q8_0", 2170 * _MEGABYTE, "Apache 2.0"),
    _Recommended("bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M", 2500 * _MEGABYTE, "Apache 2.0"),
)


@models.command(short_help="List small models that chat.")
def recommend() -> None:
    """List small models that chat, with the command that downloads and runs each.

    RAM is an estimate, without cached prompts.
    """
    click.echo(f"{'download':>8}  {'RAM':>7}  {'licence':<10}  command")
    for name, size, licence in _RECOMMENDED:
        sizes = f"{show_bytes(size):>8}  {show_bytes(size + _BESIDE):>7}"
        click.echo(f"{sizes}  {licence:<10}  headstart chat --model {name}")


models.add_command(quantize)


@models.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove a model that was downloaded."""
    name = as_typed(name)
    rows = list(_rows())[1:]
    chosen = [row for row in rows if name in (row.name, row.repo.repo_id)]
    if not chosen:
        names = ", ".join(row.name for row in rows)
        known = f"allowed: {names}" if names else "no model was"
        raise ModelNotFoundError(f"{name!r} was not downloaded; {known}")
    repo = chosen[0].repo
    if len(chosen) == sum(row.repo == repo for row in rows):
        # Of this model alone: a copy of it under another name has the same commits.
        cached = replace(hub.scan_cache_dir(hub.constants.HF_HUB_CACHE), repos=frozenset([repo]))
        cached.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    else:
        for file in (file for row in chosen for file in row.files):
            file.file_path.unlink()
            file.blob_path.unlink(missing_ok=True)
    note(f"{name} is removed: {show_bytes(sum(row.size for row in chosen))}")


def _rows() -> Iterator[_Row]:
    """Yield the model of the package first, then what was downloaded: GGUF files one by one."""
    yield _Row(BUILT_IN, _weigh(find_folder(BUILT_IN)), "comes with the package")
    for repo in _downloaded():
        files = {file.file_path: file for one in repo.revisions for file in one.files}
        labels = label_files(map(str, files))
        for label in sorted(set(labels.values())):
            held = [files[Path(path)] for path, found in labels.items() if found == label]
            size = sum({file.blob_path: file.size_on_disk for file in held}.values())
            yield _Row(f"{repo.repo_id}:{label}", size, "", repo, held)
        if not labels:
            yield _Row(repo.repo_id, repo.size_on_disk, _remark(repo), repo)


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
    for row in found:
        click.echo(f"{row.name:<{width}}  {show_bytes(row.size):>9}  {row.remark}".rstrip())
