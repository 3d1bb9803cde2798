"""`headstart models quantize`: a checkpoint of floats is written again, in 4 bits."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from headstart.cli.opening import folder_of
from headstart.cli.progress import describe_check, quantizing_line, show_bytes, waiting
from headstart.cli.reply_metrics import duration
from headstart.cli.streams import as_typed, columns_of, hiding_typed, note
from headstart.imports import load_module

__all__ = ["quantize"]

_TOLD = 10  # parts of the work, each told in a line of its own where stderr is no terminal


@click.command(short_help="Write a model in 4 bits, calibrated on a text.")
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["int4"]),
    default="int4",
    show_default=True,
    help="The kind of weights that are written.",
)
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Text like what the model will read; default: the topics of Python's help().",
)
def quantize(model: str, folder: Path, weights: str, text: Path | None) -> None:
    """Write MODEL's weights in 4 bits into the new FOLDER, so that they lose little.

    What its layers are given for a text decides how each weight is rounded (GPTQ, AWQ). The folder
    is a checkpoint of compressed-tensors, a format that vLLM and transformers read. It takes
    minutes, once.
    """
    target = Path(as_typed(str(folder)))
    file = None if text is None else Path(as_typed(str(text))).expanduser()
    with hiding_typed(), waiting(describe_check("importing torch")):
        # Which the other commands for models do without.
        work = load_module("headstart.models.gptq")
    work.check_target(target)  # before anything is downloaded
    source = as_typed(model)
    if Path(source).suffix != ".gguf":  # which is refused: to find its folder takes minutes
        source = str(folder_of(source))
    with hiding_typed(), waiting(describe_check("reading the model's tokenizer and the text")):
        plan = work.plan_quantizing(source, target, file)
    with _ending_as_by_ctrl_c(), _telling(plan.layers) as progress:
        written = work.quantize(plan, progress)
    sizes = f"{show_bytes(written.after)} of weights, {show_bytes(written.before)} before"
    note(
        f"{plan.target}: {sizes}, in {duration(written.seconds)}, calibrated on "
        f"{plan.tokens.numel():,} tokens of {plan.text}"
    )
    note(f'headstart run --model {target} "..."')


@contextmanager
def _telling(layers: int) -> Iterator[Callable[[int], None]]:
    """Yield a callback for the number of layers that are done, and show it to the user.

    In a terminal on one line that changes; elsewhere, as in a log, on a line for each tenth.
    """
    done, at, start, is_log = 0, 0.0, time.perf_counter(), columns_of(sys.stderr) is None

    def progress(now: int) -> None:
        nonlocal done, at
        before, done, at = done, now, time.perf_counter() - start
        if is_log and now < layers and before * _TOLD // layers < now * _TOLD // layers:
            note(quantizing_line(now, layers, at, at))

    if is_log:
        note(quantizing_line(0, layers, 0, 0))
    with waiting(lambda elapsed: quantizing_line(done, layers, elapsed, at)):
        yield progress


@contextmanager
def _ending_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end the work by an exception: nothing is left of the folder.

    A signal that is ignored, as `nohup` has it, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would end the cleaning up
        sys.exit(128 + number)

    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    on_main = threading.current_thread() is threading.main_thread()
    mine = [one for one in known if on_main and signal.getsignal(one) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
