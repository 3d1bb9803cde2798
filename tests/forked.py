"""Forked processes with finished imports, which run `headstart` or a test's program.

Importing torch, transformers and the package takes more than 5 s. A server does it once, and each
process is a fork of it, with its streams, signals and exit status.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from headstart.cli.main import main

__all__ = ["FORKS", "run_headstart", "run_program", "start_headstart"]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "headstart.cli.chat",
        "headstart.cli.chat",
        "headstart.frontend.llm",
        "headstart.engine.engine",
        "headstart.models.demo",
        "headstart.server.launch",
        "transformers.models.llama.modeling_llama",
        __name__,
    ]
)


def start_headstart(
    arguments: Sequence[str], streams: tuple[Path, Path, Path], **environment: str
) -> BaseProcess:
    """Run `headstart` with these arguments and variables of the environment.

    streams: the files for standard input, output and errors. A terminal becomes the controlling
    terminal, which sends Ctrl-C. Opening a named pipe waits for its other end.
    """
    everything = {**os.environ, **environment}
    process = FORKS.Process(target=_run, args=(arguments, streams, everything), daemon=True)
    process.start()
    return process


def run_headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `headstart` with these arguments and no input, until it ends."""
    return _until_it_ends(arguments, partial(start_headstart, arguments))


def run_program(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -W ignore -c program arguments` with this process's search path."""
    words = [program, *map(str, arguments)]

    def start(streams: tuple[Path, Path, Path]) -> BaseProcess:
        process = FORKS.Process(target=_run_program, args=(words, streams), daemon=True)
        process.start()
        return process

    return _until_it_ends(words, start)


def _until_it_ends(
    arguments: Sequence[str], start: Callable[[tuple[Path, Path, Path]], BaseProcess]
) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        streams = Path(os.devnull), Path(folder) / "output", Path(folder) / "errors"
        process = start(streams)
        process.join()
        outputs = [stream.read_text() if stream.exists() else "" for stream in streams[1:]]
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, *outputs)


def _run_program(words: list[str], streams: tuple[Path, Path, Path]) -> None:
    _take(streams)
    warnings.simplefilter("ignore")
    program, *arguments = words
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def _run(
    arguments: Sequence[str], streams: tuple[Path, Path, Path], environment: dict[str, str]
) -> None:
    _take(streams)
    os.environ.clear()
    os.environ.update(environment)
    main(arguments, prog_name="headstart")


def _take(streams: tuple[Path, Path, Path]) -> None:
    """Make these the standard streams of this process, in a new session.

    Ctrl-C then reaches it even if the tests run in the background of a shell, which ignores it.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, path in enumerate(streams):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT if standard else os.O_RDONLY)
        os.dup2(opened, standard)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), ("r", "w", "w"))
