"""A trace: requests with the time they came and the identity of their prompts.

Traces name prompts by blocks, not by tokens, and a simulation needs no more. So one *unit* stands
for `grain` tokens: the cache manager gets a token id for each unit, and `block_size / grain`
units make a block. Equal unit ids at the head of two prompts are equal tokens. What a prompt has
beyond its last full unit, and every reply, is like nothing else in the trace: such units get ids
of their own, and fill memory without being hit.

Files of traces, which may end in .gz:

    Mooncake's JSON lines   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}
                            one id for each 512 tokens of the prompt; equal ids, equal prefixes
    headstart's JSON lines  {"time": s, "tokens": [...], "output": 16, "session": "a"}
                            the prompt's token ids; `output` and `session` may be left out
    npz of sessions         a prefix trie of blocks of `B` tokens: `t`, `L`, `out`, `sess`,
                            `nblk`, `leaf` for each request, and `pdelta` for each node, whose
                            parent is node - 1 - pdelta, or -1
"""

import gzip
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from headstart.cache.identity import MAX_TOKEN_ID
from headstart.errors import ConfigError
from headstart.imports import load_module
from headstart.validation import describe

MOONCAKE_BLOCK = 512
_SESSION_ARRAYS = ("B", "t", "L", "out", "sess", "nblk", "leaf", "pdelta")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    time: seconds since the trace began. parts: the ids of the prompt's full units, in pieces
    that are ranges where ids are consecutive. num_tokens, num_output: of the prompt and the
    reply. session: equal for the requests of one conversation. first_unit: added to each id.
    """

    time: float
    parts: Sequence[Sequence[int]] = field(repr=False)
    num_tokens: int
    num_output: int
    session: str
    first_unit: int = 0

    def units(self) -> list[int]:
        """Return the ids of the prompt's full units."""
        if not self.first_unit:
            return list(chain.from_iterable(self.parts))
        return [self.first_unit + unit for part in self.parts for unit in part]


@dataclass(frozen=True)
class Trace:
    """Requests in the order they came; `num_units` is above all their unit ids."""

    name: str
    grain: int
    num_units: int
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].time - self.requests[0].time if self.requests else 0.0

    def head(self, count: int) -> "Trace":
        """Return the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def copied(self, copies: int, gap: float = 1.0) -> "Trace":
        """Multiply the users by copies that share no prefix, each `gap` seconds later.

        Raises ConfigError for more units than there are token ids.
        """
        if copies < 1:
            raise ConfigError(f"copies is {copies}; allowed: at least 1")
        if copies * self.num_units > MAX_TOKEN_ID // 2:
            raise ConfigError(
                f"copies is {copies}; allowed: up to {MAX_TOKEN_ID // 2 // self.num_units} of "
                f"a trace with {self.num_units:,} units"
            )
        requests = [
            replace(
                request,
                time=request.time + copy * gap,
                session=f"{request.session}/{copy}",
                first_unit=copy * self.num_units,
            )
            for copy in range(copies)
            for request in self.requests
        ]
        requests.sort(key=lambda request: request.time)
        return replace(self, num_units=copies * self.num_units, requests=requests)

    def faster(self, speed: float) -> "Trace":
        """Let sessions begin `speed` times as often, at the same pace inside.

        Raises ConfigError for a speed that is not above 0.
        """
        if not speed > 0:
            raise ConfigError(f"speed is {speed}; allowed: above 0")
        starts: dict[str, float] = {}
        requests = []
        for request in self.requests:
            start = starts.setdefault(request.session, request.time)
            requests.append(replace(request, time=start / speed + request.time - start))
        requests.sort(key=lambda request: request.time)
        return replace(self, requests=requests)


def private_units() -> Iterator[int]:
    """Yield unit ids that no trace uses."""
    return iter(range(MAX_TOKEN_ID, MAX_TOKEN_ID // 2, -1))


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError if the file has none of the formats."""
    try:
        if path.suffix == ".npz":
            return _read_sessions(path)
        lines = list(_read_lines(path))
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    if not lines:
        raise ConfigError(f"{path} has no requests; allowed: at least one line of JSON")
    return _from_blocks(path, lines) if "hash_ids" in lines[0] else _from_tokens(path, lines)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:  # which says "line 1" of every line
                raise ConfigError(
                    f"{path} cannot be read as a trace: {error.msg}: line {number} column "
                    f"{error.colno}"
                ) from error
            if not isinstance(found, dict) or not {"hash_ids", "tokens"} & found.keys():
                raise ConfigError(
                    f"{path}, line {number}: {describe(found)}; allowed: an object with "
                    "hash_ids or tokens"
                )
            yield found


def _from_blocks(path: Path, lines: Sequence[dict[str, Any]]) -> Trace:
    requests, highest = [], 0
    for number, line in enumerate(lines, 1):
        ids = _whole_numbers(path, number, line, "hash_ids")
        length = _number(path, number, line, "input_length", 1)
        full = length // MOONCAKE_BLOCK
        if len(ids) < full:
            raise ConfigError(
                f"{path}, request {number}: {len(ids)} hash_ids for {length} tokens; "
                f"allowed: one for each {MOONCAKE_BLOCK}"
            )
        highest = max(highest, *ids, 0)
        # Every prompt of the published trace begins with one block: the second tells chats apart.
        session = str(ids[1] if len(ids) > 1 else f"alone {number}")
        requests.append(
            TraceRequest(
                time=_number(path, number, line, "timestamp", 0) / 1000,
                parts=_runs(ids[:full]),
                num_tokens=length,
                num_output=_number(path, number, line, "output_length", 0),
                session=session,
            )
        )
    return _trace(path, MOONCAKE_BLOCK, highest + 1, requests)


def _from_tokens(path: Path, lines: Sequence[dict[str, Any]]) -> Trace:
    requests, highest = [], 0
    for number, line in enumerate(lines, 1):
        tokens = _whole_numbers(path, number, line, "tokens")
        if not tokens:
            raise ConfigError(f"{path}, request {number}: tokens is []; allowed: at least one")
        highest = max(highest, *tokens)
        requests.append(
            TraceRequest(
                time=_number(path, number, {"time": 0, **line}, "time", 0),
                parts=(tokens,),
                num_tokens=len(tokens),
                num_output=int(_number(path, number, {"output": 1, **line}, "output", 0)),
                session=str(line.get("session", f"alone {number}")),
            )
        )
    return _trace(path, 1, highest + 1, requests)


def _read_sessions(path: Path) -> Trace:
    """Read an npz of sessions. Raises ConfigError, and what numpy raises for other files."""
    numpy = load_module("numpy")  # which `headstart --help` does without
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
    return _trace(path, int(arrays["B"]), len(up), requests)


def _path(first: list[int], up: list[int], leaf: int, num_blocks: int) -> tuple[range, ...]:
    """Return the nodes from the root to a leaf, as ranges."""
    parts: list[range] = []
    at = leaf
    while at >= 0 and num_blocks:
        parts.append(range(first[at], at + 1))
        at = up[first[at]]
    return tuple(reversed(parts))


def _trace(path: Path, grain: int, num_units: int, requests: list[TraceRequest]) -> Trace:
    requests.sort(key=lambda request: request.time)
    return Trace(path.name, grain, num_units, requests)


def _whole_numbers(path: Path, number: int, line: dict[str, Any], key: str) -> list[int]:
    values = line.get(key)
    fits = isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**30 for value in values
    )
    if not isinstance(values, list) or not fits:
        raise ConfigError(
            f"{path}, request {number}: {key} is {describe(values)}; allowed: a list of whole "
            "numbers from 0 to 2**30 - 1"
        )
    return values


def _number(path: Path, number: int, line: dict[str, Any], key: str, least: int) -> Any:
    value = line.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not least <= value < math.inf:
        raise ConfigError(
            f"{path}, request {number}: {key} is {describe(value)}; allowed: at least {least}"
        )
    return value


def _runs(ids: Sequence[int]) -> tuple[range, ...]:
    """Return the ids as ranges: the blocks of one prompt only are numbered consecutively."""
    found: list[range] = []
    for unit in ids:
        if found and found[-1].stop == unit:
            found[-1] = range(found[-1].start, unit + 1)
        else:
            found.append(range(unit, unit + 1))
    return tuple(found)
