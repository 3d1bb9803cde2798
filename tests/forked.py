"""Processes that have made their imports already, and `headstart` as one of them.

Importing torch, transformers and the package takes 5 s and more. A server does it once, and each
process is its fork: with streams, signals and an exit status like any other.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from headstart.cli.main import main

__all__ = ["FORKS", "start_headstart"]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "headstart.cli.chat.session",
        "headstart.cli.chat.talk",
        "headstart.engine.llm",
        "headstart.engine.startup.loading",
        "headstart.models.demo.llama",
        "headstart.server.launch",
        "transformers.models.llama.modeling_llama",
        __name__,
    ]
)


def start_headstart(
    arguments: Sequence[str], streams: tuple[Path, Path, Path], **environment: str
) -> BaseProcess:
    """Run `headstart` with these arguments and variables of the environment.

    streams: the files that stand for standard input, output and errors. A terminal becomes the
    process's own: Ctrl-C arrives there. A named pipe is opened once somebody opens its other end.
    """
    everything = {**os.environ, **environment}
    process = FORKS.Process(target=_run, args=(arguments, streams, everything), daemon=True)
    process.start()
    return process


def _run(
    arguments: Sequence[str], streams: tuple[Path, Path, Path], environment: dict[str, str]
) -> None:
    os.setsid()
    for standard, path in enumerate(streams):
        opened = os.open(path, os.O_WRONLY if standard else os.O_RDONLY)
        os.dup2(opened, standard)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), ("r", "w", "w"))
    os.environ.clear()
    os.environ.update(environment)
    main(arguments, prog_name="headstart")
