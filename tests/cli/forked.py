"""`headstart` in a terminal, in a process of its own that has made its imports already.

Importing torch, transformers and the package takes 5 s and more. A server does it once, and each
process is its fork: with a terminal, signals and an exit status like any other.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from headstart.cli.main import main

__all__ = ["start_in_terminal"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "headstart.cli.chat.session",
        "headstart.cli.chat.talk",
        "headstart.engine.llm",
        "headstart.engine.startup.loading",
        "transformers.models.llama.modeling_llama",
        __name__,
    ]
)


def start_in_terminal(device: str, arguments: Sequence[str], data_home: str) -> BaseProcess:
    """Run `headstart` with these arguments on a terminal, given by its device file."""
    environment = os.environ | {"XDG_DATA_HOME": data_home, "TERM": "xterm-256color"}
    process = _FORKS.Process(target=_run, args=(device, arguments, environment), daemon=True)
    process.start()
    return process


def _run(device: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.setsid()
    terminal = os.open(device, os.O_RDWR)  # the session's own from now on: Ctrl-C arrives here
    for standard in (0, 1, 2):
        os.dup2(terminal, standard)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), ("r", "w", "w"))
    os.environ.clear()
    os.environ.update(environment)
    main(arguments, prog_name="headstart")
