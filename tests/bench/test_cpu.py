"""The minimal cost of a load is that of an engine that computes no prefix twice."""

from collections.abc import Iterator
from typing import Any

import pytest
from cpu import PASSES
from peer import DRIVERS, Ids, shared_head

HEAD = list(range(100, 120))

LOADS: dict[str, dict[str, Any]] = {
    "questions": {"load": "document", "document": HEAD, "questions": [[1, 2], [3, 4]], "count": 5},
    "turns": {
        "load": "chat",
        "said": [[[100 * turn + user, 7, 8] for user in range(4)] for turn in range(3)],
        "count": 6,
    },
    "cached": {
        "load": "together",
        "first": HEAD,
        "prompts": [[*HEAD, own, 1, 2] for own in range(5)],
        "count": 4,
    },
    "not yet cached": {
        "load": "together",
        "first": [],
        "prompts": [[*HEAD, own, 1, 2] for own in range(5)],
        "count": 4,
    },
}


class Counter:
    """An engine that caches all tokens, and counts the rows that it must compute."""

    def __init__(self) -> None:
        self.seen: list[Ids] = []
        self.rows: list[int] = []

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        return iter(self.answer([prompt], count)[0])

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        answers = []
        rows = 0
        for prompt in prompts:
            num_cached = max((len(shared_head([prompt, other])) for other in self.seen), default=0)
            answers.append([1000 + len(self.seen)] * count)
            self.seen.append(prompt + answers[-1])
            rows += len(prompt) - num_cached + count - 1
        self.rows.append(rows)
        return answers


@pytest.mark.parametrize("name", ["turns", "not yet cached", "cached"])
def test_passes_compute_only_new_tokens(name: str) -> None:
    load = LOADS[name]
    engine = Counter()
    DRIVERS[load["load"]](engine, **{key: load[key] for key in load if key != "load"})
    [passes] = PASSES[load["load"]](load).values()
    timed = engine.rows[1:] if load.get("first") else engine.rows
    assert sum(count * pass_.rows for count, pass_ in passes) == sum(timed)


def test_questions_compute_only_new_tokens() -> None:
    load = LOADS["questions"]
    engine = Counter()
    DRIVERS["document"](engine, HEAD, load["questions"], load["count"])
    passes = PASSES["document"](load)
    rows = {key: count * pass_.rows for key, [(count, pass_)] in passes.items()}
    later = (load["count"] - 1) * rows["per token"]
    assert [rows["cold"] + later, rows["warm"] + later] == engine.rows
