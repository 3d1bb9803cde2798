"""Trace files in three formats, and errors of other files."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from headstart.errors import ConfigError
from headstart.replay import Trace, read_trace

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 5, 6]},
    {"timestamp": 500, "input_length": 512, "output_length": 1, "hash_ids": [0]},
]
OWN = [
    {"time": 1.5, "tokens": [1, 2, 3], "output": 4, "session": "a"},
    {"tokens": [7]},
]


def write(folder: Path, lines: list[dict[str, Any]], name: str = "trace.jsonl") -> Path:
    text = "\n".join(json.dumps(line) for line in lines)
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncakes_lines(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE, name))
    assert (trace.grain, trace.num_units, trace.num_tokens) == (512, 7, 1542)
    first, second = trace.requests  # by time
    assert (first.time, first.units(), first.num_output) == (0.5, [0], 1)
    assert (second.time, second.units(), second.num_tokens) == (2.0, [0, 5], 1030)
    assert first.session != second.session


def test_our_lines(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, OWN))
    assert (trace.grain, trace.num_units) == (1, 8)
    first, second = trace.requests
    assert (first.time, first.units(), first.num_output) == (0.0, [7], 1)
    assert (second.units(), second.num_output, second.session) == ([1, 2, 3], 4, "a")


def save_sessions(path: Path) -> None:
    """Write a tree: nodes 0-1-2, 3 below 0, 4 below 3, and 5 as a separate root."""
    numpy.savez(
        path,
        B=numpy.int32(64),
        pdelta=numpy.array([0, 0, 0, 2, 0, 5]),
        t=numpy.array([0.0, 1.0, 2.0, 3.0]),
        L=numpy.array([200, 193, 70, 5]),
        out=numpy.array([1, 2, 3, 4]),
        sess=numpy.array([1, 1, 2, 3]),
        nblk=numpy.array([3, 3, 1, 0]),
        leaf=numpy.array([2, 4, 5, -1]),
    )


def test_sessions(tmp_path: Path) -> None:
    save_sessions(tmp_path / "s.npz")
    trace = read_trace(tmp_path / "s.npz")
    assert (trace.grain, trace.num_units) == (64, 6)
    assert [r.units() for r in trace.requests] == [[0, 1, 2], [0, 3, 4], [5], []]
    assert [r.session for r in trace.requests] == ["1", "1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "x"}, "allowed: an object with hash_ids or tokens"),
        ({**MOONCAKE[0], "hash_ids": "x"}, "hash_ids is 'x'; allowed: a list of whole numbers"),
        ({**MOONCAKE[0], "hash_ids": [0]}, "1 hash_ids for 1030 tokens"),
        ({**MOONCAKE[0], "input_length": 0}, "input_length is 0; allowed: at least 1"),
        ({**MOONCAKE[0], "timestamp": None}, "timestamp is None"),
        ({"tokens": [-1]}, "tokens is \\[-1\\]"),
        ({"tokens": [2**31]}, "whole numbers from 0 to 2\\*\\*30 - 1"),
        ({"tokens": [True]}, "tokens is \\[True\\]"),
        ({"tokens": []}, "tokens is \\[\\]; allowed: at least one"),
        ({"tokens": [1], "output": -1}, "output is -1; allowed: at least 0"),
        ({"tokens": [1], "time": math.inf}, "time is inf; allowed: at least 0"),
        ({"tokens": [1], "time": math.nan}, "time is nan; allowed: at least 0"),
    ],
)
def test_an_invalid_line_is_reported(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path, [line]))


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", b"{"),
        ("b.jsonl.gz", b"no gzip"),
        ("c.npz", b"no zip"),
        ("d.jsonl", b"\xff\xfe"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} cannot be read as a trace"):
            read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")
    numpy.savez(tmp_path / "e.npz", B=numpy.int32(64))
    with pytest.raises(ConfigError, match="has no t, L, out"):
        read_trace(tmp_path / "e.npz")


def test_an_invalid_json_line_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"tokens": [1]}\n\n{"tokens": [1')
    with pytest.raises(
        ConfigError, match=r"cut.jsonl cannot be read as a trace: .*: line 3 column 14"
    ):
        read_trace(tmp_path / "cut.jsonl")


def test_copies_share_neither_prefixes_nor_sessions(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE)).copied(3)
    assert len(trace.requests) == 6
    assert {unit for r in trace.requests for unit in r.units()} == {0, 5, 7, 12, 14, 19}
    assert len({request.session for request in trace.requests}) == 6
    times = [request.time for request in trace.requests]
    assert times == sorted(times) == [0.5, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_speed_starts_sessions_sooner_and_keeps_their_pauses(tmp_path: Path) -> None:
    lines = [
        {"time": time, "tokens": [1], "session": session}
        for time, session in ((0, "a"), (10, "b"), (12, "a"), (14, "b"))
    ]
    trace = read_trace(write(tmp_path, lines)).speed_up(2)
    assert [(r.time, r.session) for r in trace.requests] == [
        (0, "a"),
        (5, "b"),
        (9, "b"),
        (12, "a"),
    ]


def test_invalid_copies_and_speeds_are_refused() -> None:
    trace = Trace("t", 1, 2**20, [])
    with pytest.raises(ConfigError, match="copies is 0; allowed: at least 1"):
        trace.copied(0)
    with pytest.raises(ConfigError, match="copies is 5000; allowed: up to 1023 of a trace"):
        trace.copied(5000)
    with pytest.raises(ConfigError, match="speed is 0; allowed: above 0"):
        trace.speed_up(0)
