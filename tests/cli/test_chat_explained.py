"""`/explain`: one sentence about the last turn, whatever was done since."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cache import MissExplanation, MissReason
from headstart.cli.chat_commands import explain_turn
from tests.cli.test_main import SMALL, call


def output(
    total: int, cached: int, reason: MissReason, adapter: str | None = None, **loaded: int
) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[0] * total,
        num_cached_tokens=cached,
        loaded_tokens=loaded,
        why_missed=MissExplanation(reason, cached, adapter),
    )


@pytest.mark.parametrize("reason", MissReason)
@pytest.mark.parametrize("cached", [0, 1200])
def test_every_reason_is_one_sentence(reason: MissReason, cached: int) -> None:
    said = explain_turn(output(1300, cached, reason))
    begins = "the first 1,200 of the last prompt's 1,300 tokens were cached, and the rest "
    begins = begins if cached else "none of the last prompt's 1,300 tokens was cached: it "
    rest = said.removeprefix(begins)
    assert rest != said and re.match(r"(is|was|must|differs|begins) [a-z]", rest)
    assert explain_turn(output(1300, cached, reason), "/undo").startswith("before /undo, ")


def test_an_adapter_is_named() -> None:
    said = explain_turn(output(9, 0, MissReason.ADAPTER, "fr"))
    assert said == "none of the last prompt's 9 tokens was cached: it is cached for the adapter fr"
    said = explain_turn(output(9, 8, MissReason.ADAPTER))
    assert said.endswith("and the rest is cached without an adapter")


def test_what_was_loaded() -> None:
    assert explain_turn(output(41, 32, MissReason.UNSEEN, disk=16)) == (
        "the first 32 of the last prompt's 41 tokens were cached (16 of them from disk), and the "
        "rest is new"
    )
    said = explain_turn(output(4100, 3200, MissReason.UNSEEN, disk=1600, remote=1200))
    assert "cached (1,600 of them from disk, 1,200 of them from remote), and" in said


def test_one_token_that_was_cached() -> None:
    said = explain_turn(output(12, 1, MissReason.SHORT))
    assert said == (
        "the first of the last prompt's 12 tokens was cached, and the rest is shorter than a "
        "block (only full blocks are cached)"
    )


def test_in_a_chat(demo_model: object) -> None:
    """After a command that changes the conversation it is about the turn before that."""
    lines = [
        *("Hello there, who are you? I am here.", "/explain", "And what is it?", "/explain"),
        *("/undo", "/explain", "/system Be brief.", "/explain", "Hello", "/explain"),
        *("/reset", "/explain"),
    ]
    said = call("chat", *SMALL, "--max-tokens", "4", stdin="\n".join(lines)).stderr.splitlines()
    found = [line for line in said if "prompt's" in line]
    ends = [line.partition("tokens w")[2] for line in found]
    assert found[0].startswith("none of the last prompt's ") and ends[0] == "as cached: it is new"
    assert found[1].startswith("the first ")
    assert ends[1] == "ere cached, and the rest is new"
    assert found[2] == "before /undo, " + found[1].replace("last prompt", "prompt")
    assert found[3] == found[2].replace("/undo", "/system")
    assert re.match(r"the first (\d )?of the last .* the rest differs from every", found[4])
    assert len(found) == 5 and said[-1] == "headstart: nothing was asked yet"
