"""An exception at any line of the manager: `fail_step` then restores all that is certain."""

import pickle
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headstart.cache.eviction
from tests.cache.interruption.scenario import CONFIGS, Scenario, goes_on
from tests.interruptions import Interruption, Line, points

OWNERS = str(Path(headstart.cache.eviction.__file__).parent)


class Recording:
    """The lines of a scenario, and all that there was before each part, to begin there again."""

    def __init__(self, options: dict[str, Any]) -> None:
        scenario = Scenario(options)
        self.lines: list[Line] = []
        self._has_salts = "salts" in options
        self._starts: list[int] = []
        self._states: list[bytes] = []
        for part in Scenario.PARTS:
            self._starts.append(len(self.lines))
            self._states.append(pickle.dumps(scenario))
            self.lines += count_lines(partial(part, scenario))

    def points(self, stride: int | None = None) -> list[int]:
        """As `points`; with salts, of lines that say nothing of owners only each third."""
        chosen = points(self.lines, stride)
        if self._has_salts:
            owners = [at for at in chosen if self.lines[at][0].startswith(OWNERS)]
            chosen = sorted({*owners, *chosen[::3]})
        return chosen

    def interrupted(self, at: int) -> Scenario:
        """The scenario after an exception at the line with this number."""
        part = bisect_right(self._starts, at) - 1
        scenario: Scenario = pickle.loads(self._states[part])
        error = KeyboardInterrupt() if at % 2 else MemoryError()
        within = Interruption(at - self._starts[part], error, headstart.cache)
        with pytest.raises(type(error)), within:
            Scenario.PARTS[part](scenario)
        scenario.engine.scribble()
        return scenario


def count_lines(action: Callable[[], object]) -> list[Line]:
    # Only the cache's own lines: what another test left to the garbage collector may run here.
    with Interruption(-1, None, headstart.cache) as counted:
        action()
    return counted.lines


@pytest.mark.parametrize("options", CONFIGS)
def test_an_exception_at_any_line_loses_nothing_and_finds_nothing_wrong(
    options: dict[str, Any],
) -> None:
    recording = Recording(options)
    for at in recording.points(stride=75):
        scenario = recording.interrupted(at)
        scenario.engine.manager.fail_step()
        scenario.verify()
        assert scenario.engine.manager.fail_step() == []
        goes_on(scenario)


@pytest.mark.parametrize("options", CONFIGS)
def test_a_recovery_that_is_interrupted_is_run_again(options: dict[str, Any]) -> None:
    recording = Recording(options)
    for first in recording.points()[::60]:
        repair = count_lines(recording.interrupted(first).engine.manager.fail_step)
        for second in points(repair)[first % 9 :: 9]:
            scenario = recording.interrupted(first)
            with (
                pytest.raises(KeyboardInterrupt),
                Interruption(second, KeyboardInterrupt(), headstart.cache),
            ):
                scenario.engine.manager.fail_step()
            scenario.engine.manager.fail_step()
            scenario.verify()
