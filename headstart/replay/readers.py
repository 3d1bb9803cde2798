"""Readers of trace files.

    Mooncake's JSON lines   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}
                            one id for each 512 tokens of the prompt; equal ids, equal prefixes
    headstart's JSON lines  {"time": s, "tokens": [...], "output": 16, "session": "a"}
                            the prompt's token ids; `output` and `session` may be left out
    npz of sessions         a prefix trie of blocks of `B` tokens: `t`, `L`, `out`, `sess`,
                            `nblk`, `leaf` for each request, and `pdelta` for each node, whose
                            parent is node - 1 - pdelta, or -1

Files that end in .gz are unpacked.
"""

import gzip
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headstart.errors import ConfigError
from headstart.imports import load_module
from headstart.replay.trace import Trace, TraceRequest
from headstart.validation import describe

MOONCAKE_BLOCK = 512


def read_trace(path: Path) -> Trace:
    """The trace in this file. Raises ConfigError if it is none of the formats."""
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
    """numpy reads them, which `headstart --help` does without."""
    found: Trace = load_module("headstart.replay.sessions").read_sessions(path)
    return found


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
    """The same ids as ranges of consecutive ones: a prompt's own blocks are numbered in a row."""
    found: list[range] = []
    for unit in ids:
        if found and found[-1].stop == unit:
            found[-1] = range(found[-1].start, unit + 1)
        else:
            found.append(range(unit, unit + 1))
    return tuple(found)
