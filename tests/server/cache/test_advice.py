"""Advice names the remedy for each cause."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from headstart.cache import MissExplanation, MissReason, Namespace
from headstart.server.cache.advice import Adviser
from headstart.server.cache.traffic import Traffic

MISSED = MissExplanation(MissReason.TOKEN, 0)


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def advise(*prompts: str, salts: Sequence[str | None] = ()) -> dict[str, object]:
    traffic = Traffic()
    for i, prompt in enumerate(prompts):
        namespace = Namespace(None, salts[i] if salts else None)
        tokens = list(map(ord, prompt))
        closest = traffic.closest(namespace, np.array(tokens, np.int32))
        hit = closest.num_common if closest is not None else 0  # nothing is evicted
        traffic.add(f"{i}", namespace, tokens, hit, MISSED)
    return Adviser(decode, 16).advise([traffic.recent])


def tool(name: str) -> str:
    return f'{{"type": "function", "function": {{"name": "{name}", "parameters": {{}}}}}}\n'


def passages(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh ", k=900)) for _ in range(count)]


A, B, C = passages(1, 3)
REST = "Answer the question with what was found above, in one sentence. " * 3


@pytest.mark.parametrize(
    ("first", "second", "looks_like", "remedy"),
    [
        (tool("a") + tool("b") + REST, tool("b") + tool("a") + REST, "tools", "sending the"),
        (f"{A}\n{B}\n{REST}", f"{B}\n{A}\n{REST}", "passages", "sorting the passages or moving"),
        (f"[1] {A}\n[2] {B}{REST}", f"[1] {B}\n[2] {A}{REST}", "passages", "sorting the passages"),
        (f"It is 10:15. {REST}", f"It is 10:16. {REST}", "a date or time", "moving the"),
        (f"Hello {A}{REST}", f"Hi you {A}{REST}", "another text", "moving the"),
        (f"{A}{REST}", f"{C}{REST}", "another text", "moving the"),
        (f"{A}{B}{REST}", f"{C}{A}{B}{REST}", "another text", "moving the"),
        (f"{C}{A}{B}{REST}", f"{A}{B}{REST}", "another text", "moving the"),
    ],
)
def test_each_cause_has_its_remedy(first: str, second: str, looks_like: str, remedy: str) -> None:
    head = "System: you answer questions.\n"
    [fork] = advise(head + first, head + second)["forks"]  # type: ignore[misc]
    assert looks_like in fork["looks_like"]
    assert f": {remedy}" in fork["advice"] and "would have saved" in fork["advice"]
    assert ("edited a turn" in fork["advice"]) == (looks_like == "another text")


def test_equal_prompts_under_several_salts_lead_to_one_advice() -> None:
    assert advise(REST, REST, A)["salts"] == []
    [salts] = advise(REST, REST, REST, A, salts=["x", "y", "z", "x"])["salts"]  # type: ignore[misc]
    saved = 2 * (len(REST) - 1)
    assert (salts["prompts"], salts["salts"], salts["tokens_computed_again"]) == (2, 3, saved)
    assert salts["advice"] == (
        "2 prompts equal an earlier prompt under another salt (up to 3 salts per prompt), and "
        f"salts share no K/V: one salt would have saved {saved} tokens"
    )
