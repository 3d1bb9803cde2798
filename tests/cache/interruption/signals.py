"""A signal at moments of chance: `python -m tests.cache.interruption.signals SEED TRIALS`.

A timer sends the signal while an operation of the manager runs. Python handles it at the next
bytecode, so within compiled code it waits until that calls something interpreted, or returns.
"""

import json
import random
import signal
import sys
from collections import Counter
from types import FrameType

from tests.cache.interruption.breaking import BrokenOff, Call, break_off, count_operations
from tests.cache.interruption.scenario import CONFIGS


class Timer:
    """Sends a signal during a call; its handler raises if the call still runs."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._runs = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._runs:
            self._runs = False
            raise BrokenOff

    def __call__(self, call: Call) -> object:
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-6, 3e-5))
        self._runs = True
        try:
            return call()
        finally:
            self._runs = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def main(seed: int, trials: int) -> None:
    rng = random.Random(seed)
    timer = Timer(rng)
    ended: Counter[bool] = Counter()
    operations = [count_operations(options) for options in CONFIGS]
    for trial in range(trials):
        config = trial % len(CONFIGS)
        ended[break_off(CONFIGS[config], rng.randrange(operations[config]), timer)] += 1
    print(json.dumps({"broken_off": ended[True], "too_late": ended[False]}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
