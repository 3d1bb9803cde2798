"""Allocations that fail: `python -m tests.cache.interruption.no_memory SEED TRIALS`.

In each trial one allocation of an operation finds no memory. A trial runs in a process of its own,
since compiled code may end its process where it has no memory for an integer.
"""

import json
import os
import random
import sys
import traceback
from _testcapi import remove_mem_hooks, set_nomemory
from collections import Counter

from tests.cache.interruption.breaking import BrokenOff, Call, break_off, count_operations
from tests.cache.interruption.scenario import CONFIGS

ENDS = {0: "broken_off", 1: "enough", 2: "wrong", -6: "aborted"}


class Shortage:
    """No memory for one allocation of a call, counted from 0."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __call__(self, call: Call) -> object:
        set_nomemory(self._at, self._at + 1)
        try:
            result = call()
        except MemoryError:
            remove_mem_hooks()
            raise BrokenOff from None
        finally:
            remove_mem_hooks()
        return result


def run(config: int, operation: int, allocation: int) -> str:
    """How a trial ended."""
    process = os.fork()
    if not process:
        status = 2
        try:
            status = 0 if break_off(CONFIGS[config], operation, Shortage(allocation)) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    ending = ENDS.get(code, f"status {code}")
    if ending not in ("broken_off", "enough"):
        print(f"{ending}: {CONFIGS[config]}, {operation=}, {allocation=}", file=sys.stderr)
    return ending


def main(seed: int, trials: int) -> None:
    rng = random.Random(seed)
    operations = [count_operations(options) for options in CONFIGS]
    ended: Counter[str] = Counter()
    for trial in range(trials):
        config = trial % len(CONFIGS)
        at = rng.randrange(operations[config])
        ended[run(config, at, min(rng.randrange(80), rng.randrange(80)))] += 1
    print(json.dumps(ended))
    if ended.keys() - {"broken_off", "enough"}:
        sys.exit("some trials ended in another way: see above")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
