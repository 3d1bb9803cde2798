"""Operations that break off at moments of chance, in compiled code, too."""

import json
import subprocess
import sys

import pytest

from tests.house.source import ROOT


def run(program: str, trials: int) -> dict[str, int]:
    """How many trials ended in which way."""
    command = [sys.executable, "-m", f"tests.cache.interruption.{program}", "0", str(trials)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended: dict[str, int] = json.loads(done.stdout)
    assert sum(ended.values()) == trials, done.stderr
    assert ended.keys() <= {"broken_off", "too_late", "enough"}, done.stderr
    return ended


def test_a_signal_loses_nothing_and_finds_nothing_wrong() -> None:
    """Some signal comes in time on any machine, sooner or later."""
    assert any(run("signals", 400)["broken_off"] for _ in range(5))


def test_no_memory_loses_nothing_and_finds_nothing_wrong() -> None:
    """Compiled, 3 operations of 100 ended their process: long integers were mypyc's own."""
    pytest.importorskip("_testcapi")
    assert run("no_memory", 100)["broken_off"]
