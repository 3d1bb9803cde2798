"""`/explain`: one sentence about the last turn, after any other command."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cache import MissExplanation, MissReason
from headstart.cli.chat import explain_turn
from tests.cli.test_main import SMALL, call
from tests.tiny_models import save_chatting


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
    given = output(1300, cached, reason)
    said = explain_turn(given)
    assert said.startswith(f"{cached:,} of the last prompt's 1,300 tokens were cached; ")
    assert said.endswith(str(given.why_missed))
    after = explain_turn(given, "/undo")
    assert after == "before /undo, " + said.replace("last prompt", "prompt")


def test_an_adapter_is_named() -> None:
    said = explain_turn(output(9, 0, MissReason.ADAPTER, "fr"))
    assert said.startswith("0 of the last prompt's 9 tokens were cached; ") and said.endswith("fr")
    said = explain_turn(output(9, 8, MissReason.ADAPTER))
    assert said.endswith("cached; from token 8 on: cached without an adapter")


def test_what_was_loaded() -> None:
    assert explain_turn(output(41, 32, MissReason.UNSEEN, disk=16)).startswith(
        "32 of the last prompt's 41 tokens were cached (16 of them from disk); from token 32 on: "
    )
    said = explain_turn(output(4100, 3200, MissReason.UNSEEN, disk=1600, remote=1200))
    assert "cached (1,600 of them from disk, 1,200 of them from remote); " in said


def test_in_a_chat(demo_model: object) -> None:
    """After a command that changes the conversation it is about the turn before that."""
    lines = [
        *("Hello there, who are you? I am here.", "/explain", "And what is it?", "/explain"),
        *("/undo", "/explain", "/system Be brief.", "/explain", "Hello", "/explain"),
        *("/reset", "/explain"),
    ]
    said = call("chat", *SMALL, "--max-tokens", "4", stdin="\n".join(lines)).stderr.splitlines()
    found = [line for line in said if "prompt's" in line]
    assert found[0].startswith("0 of the last prompt's ") and "from token 0 on: " in found[0]
    cached = int(found[1].split()[0])
    assert cached > 0 and f"from token {cached} on: " in found[1]
    assert found[2] == "before /undo, " + found[1].replace("last prompt", "prompt")
    assert found[3] == found[2].replace("/undo", "/system")
    assert re.match(r"\d+ of the last prompt's ", found[4])
    assert len(found) == 5 and said[-1] == "headstart: there is no question yet"


def test_checkpoints_of_recurrent_layers(tmp_path: Path) -> None:
    """The second turn resumes at the end of the first, and `/pool` counts the checkpoints."""
    folder = save_chatting("lfm2", tmp_path)
    lines = ["the other day they went there together", "/pool", "and then?", "/explain"]
    options = ["--model", str(folder), "--max-tokens", "4", "--num-states", "32"]
    said = call("chat", *options, stdin="\n".join(lines)).stderr
    [count] = re.findall(r"(\d+) checkpoints? in 32 slots", " ".join(said.split()))
    assert 1 <= int(count) <= 3
    [cached] = re.findall(r"(\d+) of the last prompt's", said)
    assert int(cached) > 16
