"""A trace: requests with their arrival times and the ids of their prompts' blocks.

Most traces identify blocks of prompts, not tokens. A simulation needs only blocks. So one *unit*
stands for `grain` tokens: the cache manager gets a token id for each unit, and `block_size / grain`
units make a block. Prompts that begin with the same unit ids begin with the same tokens. The tokens
after a prompt's last full unit and the tokens of its reply have unit ids that no other request has.
So they fill memory but are never hit.

Files of traces, which may end in .gz:

    Mooncake's JSON lines   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}
                            one id for each 512 tokens of the prompt; equal ids mean equal prefixes
    headstart's JSON lines  {"time": s, "tokens": [...], "output": 16, "session": "a"}
                            the prompt's token ids; `output` and `session` may be left out
    npz of sessions         a prefix trie of blocks of `B` tokens. For each request: `t` (seconds),
                            `L` (prompt tokens), `out` (reply tokens), `sess` (session), `nblk`
                            (full blocks), `leaf` (node of the last full block). For each node:
                            `pdelta`; the parent is node - 1 - pdelta, or -1 for none

Synthetic workloads have 4 requests per second on average, and units of 16 tokens:

    shared-prompt   one system prompt of 4,096 tokens before every question
    documents       questions about 200 documents of 8,192 tokens, some far more popular
    chats           conversations whose prompts hold all earlier turns
    agents          chats that begin with a long tool description and have many short turns
"""

import gzip
import json
import math
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
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

    time: seconds since the trace began. parts: the ids of the prompt's full units, in several
    lists. num_tokens, num_output: tokens of the prompt and of the reply. session: equal for the
    requests of one conversation. first_unit: the offset that `units` adds to each id.
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
    """Requests in order of arrival; all their unit ids are below `num_units`."""

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
        """Return the trace of the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def copied(self, copies: int, gap: float = 1.0) -> "Trace":
        """Return `copies` copies of the trace, each `gap` seconds after the previous one.

        Copies share no prefix with each other. Raises ConfigError if they need too many unit ids.
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

    def speed_up(self, speed: float) -> "Trace":
        """Return the trace with sessions that begin `speed` times as often.

        Within a session, the times between requests do not change. Raises ConfigError for a speed
        that is not above 0.
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
    """Yield ids for units that occur once. No trace has these ids."""
    return iter(range(MAX_TOKEN_ID, MAX_TOKEN_ID // 2, -1))


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError for a file of another format."""
    try:
        if path.suffix == ".npz":
            return _read_sessions(path)
        lines = list(_read_lines(path))
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    if not lines:
        raise ConfigError(f"{path} has no requests; allowed: at least one line of JSON")
    is_mooncake = "hash_ids" in lines[0]
    key, grain = ("hash_ids", MOONCAKE_BLOCK) if is_mooncake else ("tokens", 1)
    read = _read_mooncake if is_mooncake else _read_tokens
    requests, num_units = [], 1
    for number, line in enumerate(lines, 1):
        location = f"{path}, request {number}"
        ids = line.get(key)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**30 for i in ids):
            raise ConfigError(
                f"{location}: {key} is {describe(ids)}; allowed: a list of whole numbers from 0 to "
                "2**30 - 1"
            )
        num_units = max(num_units, 1 + max(ids, default=0))
        requests.append(read(location, f"alone {number}", ids, line))
    return _make_trace(path, grain, num_units, requests)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except json.JSONDecodeError as error:  # the error counts lines within `line`
                raise ConfigError(
                    f"{path} cannot be read as a trace: {error.msg}: line {number} column "
                    f"{error.colno}"
                ) from error
            if not isinstance(content, dict) or not {"hash_ids", "tokens"} & content.keys():
                raise ConfigError(
                    f"{path}, line {number}: {describe(content)}; allowed: an object with "
                    "hash_ids or tokens"
                )
            yield content


def _read_mooncake(location: str, name: str, ids: list[int], line: dict[str, Any]) -> TraceRequest:
    length = _number(location, line, "input_length", 1)
    full = length // MOONCAKE_BLOCK
    if len(ids) < full:
        raise ConfigError(
            f"{location}: {len(ids)} hash_ids for {length} tokens; "
            f"allowed: one for each {MOONCAKE_BLOCK}"
        )
    return TraceRequest(
        time=_number(location, line, "timestamp", 0) / 1000,
        parts=(ids[:full],),
        num_tokens=length,
        num_output=_number(location, line, "output_length", 0),
        # All prompts of the published trace begin with the same block. The second block differs
        # between chats.
        session=str(ids[1]) if len(ids) > 1 else name,
    )


def _read_tokens(location: str, name: str, ids: list[int], line: dict[str, Any]) -> TraceRequest:
    if not ids:
        raise ConfigError(f"{location}: tokens is []; allowed: at least one")
    return TraceRequest(
        time=_number(location, {"time": 0, **line}, "time", 0),
        parts=(ids,),
        num_tokens=len(ids),
        num_output=int(_number(location, {"output": 1, **line}, "output", 0)),
        session=str(line.get("session", name)),
    )


def _number(location: str, line: dict[str, Any], key: str, minimum: int) -> Any:
    value: Any = line.get(key)
    if type(value) not in (int, float) or not minimum <= value < math.inf:
        raise ConfigError(f"{location}: {key} is {describe(value)}; allowed: at least {minimum}")
    return value


def _read_sessions(path: Path) -> Trace:
    """Read an npz of sessions. Raises ConfigError, or numpy's exceptions if it is no npz."""
    numpy = load_module("numpy")  # here, so that `headstart --help` does not import it
    with numpy.load(path) as file:
        if missing := [name for name in _SESSION_ARRAYS if name not in file.files]:
            raise ConfigError(
                f"{path} has no {', '.join(missing)}; allowed: the arrays "
                f"{', '.join(_SESSION_ARRAYS)}"
            )
        arrays = {name: file[name] for name in _SESSION_ARRAYS}
    pdelta = arrays["pdelta"].astype(numpy.int64)
    nodes = numpy.arange(len(pdelta))
    parents = nodes - 1 - pdelta
    # For each node, the first node of its run; in a run each node is the parent of the next.
    first = numpy.maximum.accumulate(numpy.where(parents == nodes - 1, 0, nodes)).tolist()
    up = parents.tolist()

    def path_of(leaf: int, num_blocks: int) -> tuple[range, ...]:
        parts: list[range] = []
        while leaf >= 0 and num_blocks:
            parts.append(range(first[leaf], leaf + 1))
            leaf = up[first[leaf]]
        return tuple(reversed(parts))

    columns = [arrays[name].tolist() for name in ("t", "L", "out", "sess", "leaf", "nblk")]
    requests = [
        TraceRequest(time, path_of(leaf, blocks), length, output_tokens, str(session))
        for time, length, output_tokens, session, leaf, blocks in zip(*columns, strict=True)
    ]
    return _make_trace(path, int(arrays["B"]), len(up), requests)


def _make_trace(path: Path, grain: int, num_units: int, requests: list[TraceRequest]) -> Trace:
    requests.sort(key=lambda request: request.time)
    return Trace(path.name, grain, num_units, requests)


GRAIN = 16
RATE = 4.0
_QUESTION = 12  # units at the end of a prompt that no other prompt has


class _Ids:
    """Consecutive unit ids."""

    count = 0

    def take(self, count: int) -> range:
        self.count += count
        return range(self.count - count, self.count)


def make_workload(name: str, num_requests: int, seed: int = 0) -> Trace:
    """Return a workload of this name; equal seeds give equal workloads. Raises ConfigError."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload is {name!r}; allowed: {', '.join(WORKLOADS)}")
    if num_requests < 1:
        raise ConfigError(f"requests is {num_requests}; allowed: at least 1")
    ids = _Ids()
    source = WORKLOADS[name](random.Random(seed), ids)
    # The source yields one session after another, but sessions overlap in time. So take more
    # requests than needed, sort them, and drop the last ones.
    requests = [next(source) for _ in range(2 * num_requests)]
    requests.sort(key=lambda request: request.time)
    return Trace(name, GRAIN, ids.count, requests[:num_requests])


def _request(rng: random.Random, time: float, session: int, *parts: range) -> TraceRequest:
    num_tokens = GRAIN * sum(map(len, parts))
    return TraceRequest(time, parts, num_tokens, rng.randint(32, 256), str(session))


def _shared_prompt(rng: random.Random, ids: _Ids) -> Iterator[TraceRequest]:
    system, now = ids.take(256), 0.0
    for number in count():
        now += rng.expovariate(RATE)
        yield _request(rng, now, number, system, ids.take(_QUESTION))


def _documents(rng: random.Random, ids: _Ids) -> Iterator[TraceRequest]:
    documents, now = [ids.take(512) for _ in range(200)], 0.0
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for number in count():
        now += rng.expovariate(RATE)
        [document] = rng.choices(documents, weights)
        yield _request(rng, now, number, document, ids.take(_QUESTION))


def _conversations(
    rng: random.Random, ids: _Ids, *, head: int, turns: int, pause: float
) -> Iterator[TraceRequest]:
    system, start = ids.take(head), 0.0
    for number in count():
        start += rng.expovariate(RATE / turns)
        now = start
        parts: tuple[range, ...] = (system,)
        for _ in range(rng.randint(1, 2 * turns - 1)):
            parts = (*parts, ids.take(rng.randint(4, 64)))
            yield _request(rng, now, number, *parts)
            now += 5 + rng.expovariate(1 / pause)


WORKLOADS: dict[str, Callable[[random.Random, _Ids], Iterator[TraceRequest]]] = {
    "shared-prompt": _shared_prompt,
    "documents": _documents,
    "chats": partial(_conversations, head=64, turns=6, pause=30.0),
    "agents": partial(_conversations, head=768, turns=25, pause=8.0),
}
