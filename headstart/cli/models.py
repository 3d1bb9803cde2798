"""`headstart models`, which manages the models in the hub's cache and quantizes models."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click
import huggingface_hub as hub  # a lazy module: its names are imported when they are used
from rich.cells import cell_len

from headstart.cli.opening import NOTES, exiting_on_interrupt, folder_of
from headstart.cli.terminal import (
    columns_of,
    decode_argument,
    duration,
    handling,
    note,
    progress_bar,
    show_bytes,
    waiting,
)
from headstart.errors import ModelError, ModelNotFoundError
from headstart.imports import load_module
from headstart.models.files import (
    BUILT_IN,
    check_files,
    download_gguf,
    download_model,
    find_folder,
    label_files,
    parse_name,
)


class _Row(NamedTuple):
    """A model in the list. repo: its repository in the hub's cache. files: the GGUF files."""

    name: str
    size: int
    remark: str
    repo: Any = None
    files: Sequence[Any] = ()


@click.group(
    invoke_without_command=True, short_help="List, recommend, pull, remove and quantize models."
)
@click.pass_context
def models(context: click.Context) -> None:
    """List, recommend, pull, remove and quantize models."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list", short_help="List the models that are on this machine.")
def list_models() -> None:
    """List the models that are on this machine, as `headstart models` does."""
    rows = list(_rows())
    width = max(cell_len(row.name) for row in rows)
    for row in rows:
        click.echo(f"{row.name:<{width}}  {show_bytes(row.size):>9}  {row.remark}".rstrip())


@models.command(short_help="Download a model from the hub.")
@click.argument("name")
def pull(name: str) -> None:
    """Download a model from the Hugging Face hub; complete files are not downloaded again.

    NAME is OWNER/NAME. For a GGUF file, a quantization may follow: OWNER/NAME:Q4_K_M. The default
    is Q4_K_M. If the repository has only one GGUF file, the default is that file.
    """
    name = decode_argument(name)
    if name in NOTES:
        note(f"{name} needs no download")
        return
    named = parse_name(name)
    with exiting_on_interrupt():
        folder = download_model(name) if named is None else download_gguf(named)
    if named is None:
        check_files(folder)
    size = _size_of(folder) if named is None else folder.stat().st_size
    note(f"{name}: {show_bytes(size)} in {folder}")


# Small models that chat: name, size in MB on the hub, and license.
_RECOMMENDED = (
    ("Qwen/Qwen3-0.6B-GGUF:Q8_0", 640, "Apache 2.0"),
    ("bartowski/google_gemma-3-1b-it-GGUF:Q4_0", 722, "Gemma"),
    ("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 810, "Llama 3.2"),
    ("bartowski/HuggingFaceTB_SmolLM3-3B-GGUF:Q4_K_M", 1920, "Apache 2.0"),
    ("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", 2020, "Llama 3.2"),
    ("bartowski/Qwen_Qwen3-1.7B-GGUF:Q8_0", 2170, "Apache 2.0"),
    ("bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M", 2500, "Apache 2.0"),
)
_MORE_RAM = 1000  # MB for torch, the tokenizer, and buffers of a step


@models.command(short_help="List small models that chat.")
def recommend() -> None:
    """List small models that chat, each with the command that downloads and runs it.

    The RAM is an estimate, without the memory of cached prompts.
    """
    click.echo(f"{'download':>8}  {'RAM':>7}  {'license':<10}  command")
    for name, size, license in _RECOMMENDED:
        download, memory = (show_bytes(10**6 * mb) for mb in (size, size + _MORE_RAM))
        click.echo(f"{download:>8}  {memory:>7}  {license:<10}  headstart chat --model {name}")


@models.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove a downloaded model."""
    name = decode_argument(name)
    rows = list(_rows())[1:]
    matches = [row for row in rows if name in (row.name, row.repo.repo_id)]
    if not matches:
        names = ", ".join(row.name for row in rows)
        allowed = f"allowed: {names}" if names else "no model is downloaded"
        raise ModelNotFoundError(f"{name!r} is not downloaded; {allowed}")
    repo = matches[0].repo
    if len(matches) == sum(row.repo == repo for row in rows):
        # `delete_revisions` finds commits in all repositories that it is given, and a copy under
        # another name has the same commits. So give it only this repository.
        cached = replace(hub.scan_cache_dir(hub.constants.HF_HUB_CACHE), repos=frozenset([repo]))
        cached.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    else:
        for file in (file for row in matches for file in row.files):
            file.file_path.unlink()
            file.blob_path.unlink(missing_ok=True)
    note(f"{name} is removed: {show_bytes(sum(row.size for row in matches))}")


def _rows() -> Iterator[_Row]:
    """Yield a row for the package's model, and for each downloaded model and GGUF file."""
    yield _Row(BUILT_IN, _size_of(find_folder(BUILT_IN)), "comes with the package")
    try:
        repos = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE).repos
    except hub.errors.CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        files = {file.file_path: file for revision in repo.revisions for file in revision.files}
        labels = label_files(map(str, files))
        for label in sorted(set(labels.values())):
            labeled = [files[Path(path)] for path, other in labels.items() if other == label]
            size = sum({file.blob_path: file.size_on_disk for file in labeled}.values())
            yield _Row(f"{repo.repo_id}:{label}", size, "", repo, labeled)
        if labels:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        remark = "" if newest is not None else "no file is complete yet"
        try:
            if newest is not None:
                check_files(newest.snapshot_path)
        except ModelError:
            remark = "incomplete, or in another format"
        yield _Row(repo.repo_id, repo.size_on_disk, remark, repo)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@models.command(short_help="Write a model in 4 bits, calibrated on text.")
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["int4"]),
    default="int4",
    show_default=True,
    help="The kind of weights to write.",
)
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Text that resembles the model's later input; default: the topics of Python's help().",
)
def quantize(model: str, folder: Path, weights: str, text: Path | None) -> None:
    """Write MODEL's weights in 4 bits into a new FOLDER, with little loss of quality.

    A calibration text decides how each weight is rounded (GPTQ, AWQ). This takes minutes. The
    result is a checkpoint in the compressed-tensors format, which vLLM and transformers read.
    """
    target = Path(decode_argument(str(folder)))
    file = None if text is None else Path(decode_argument(str(text))).expanduser()
    with waiting("importing torch"):
        gptq = load_module("headstart.models.gptq")
    gptq.check_target(target)  # before anything is downloaded
    source = decode_argument(model)
    if Path(source).suffix != ".gguf":  # `folder_of` would convert a GGUF file, which takes minutes
        source = str(folder_of(source))
    with waiting("reading the model's tokenizer and the text"):
        plan = gptq.plan_quantization(source, target, file)
    layers, is_log = plan.layers, columns_of(sys.stderr) is None
    with _raising_on_signals(), progress_bar("quantized layers") as advance:

        def progress(done: int) -> None:
            advance(done, layers)
            if is_log and done * 10 // layers > (done - 1) * 10 // layers:
                note(f"quantized {done} of {layers} layers")

        progress(0)
        written = gptq.quantize(plan, progress)
    sizes = f"{show_bytes(written.after)} of weights, {show_bytes(written.before)} before"
    note(
        f"{plan.target}: {sizes}, in {duration(written.seconds)}, calibrated on "
        f"{plan.tokens.numel():,} tokens of {plan.text}"
    )
    note(f'headstart run --model {target} "..."')


@contextmanager
def _raising_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the new folder is removed.

    A signal that is already ignored, as under `nohup`, remains ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the clean-up
        sys.exit(128 + number)

    numbers = {getattr(signal, name, signal.SIGTERM) for name in ("SIGTERM", "SIGHUP")}
    with handling(end, *(n for n in numbers if signal.getsignal(n) is signal.SIG_DFL)):
        yield
