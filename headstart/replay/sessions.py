"""Sessions as a prefix trie of blocks, in an npz of numpy's: see `headstart.replay.readers`."""

from pathlib import Path

import numpy

from headstart.errors import ConfigError
from headstart.replay.trace import Trace, TraceRequest

__all__ = ["read_sessions"]

_SESSION_ARRAYS = ("B", "t", "L", "out", "sess", "nblk", "leaf", "pdelta")


def read_sessions(path: Path) -> Trace:
    """The trace in this file. Raises ConfigError, and what numpy raises for a file that is none."""
    with numpy.load(path) as file:
        missing = [name for name in _SESSION_ARRAYS if name not in file.files]
        if missing:
            raise ConfigError(
                f"{path} has no {', '.join(missing)}; allowed: the arrays "
                f"{', '.join(_SESSION_ARRAYS)}"
            )
        arrays = {name: file[name] for name in _SESSION_ARRAYS}
    pdelta = arrays["pdelta"].astype(numpy.int64)
    parents = numpy.arange(len(pdelta)) - 1 - pdelta
    # The first node of each row of nodes that are parents of one another.
    first = numpy.where(parents == numpy.arange(len(pdelta)) - 1, 0, numpy.arange(len(pdelta)))
    first = numpy.maximum.accumulate(first).tolist()
    up = parents.tolist()
    columns = [arrays[name].tolist() for name in ("t", "L", "out", "sess", "leaf", "nblk")]
    requests = [
        TraceRequest(time, _path(first, up, leaf, blocks), length, out, str(session))
        for time, length, out, session, leaf, blocks in zip(*columns, strict=True)
    ]
    requests.sort(key=lambda request: request.time)
    return Trace(path.name, int(arrays["B"]), len(up), requests)


def _path(first: list[int], up: list[int], leaf: int, num_blocks: int) -> tuple[range, ...]:
    """The nodes from the root to a leaf, as ranges."""
    parts: list[range] = []
    at = leaf
    while at >= 0 and num_blocks:
        parts.append(range(first[at], at + 1))
        at = up[first[at]]
    return tuple(reversed(parts))
