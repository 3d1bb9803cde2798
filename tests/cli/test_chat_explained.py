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
    turn = output(1300, cached, reason)
    sentence = explain_turn(turn)
    assert sentence.startswith(f"{cached:,} of the last prompt's 1,300 tokens were cached; ")
    assert sentence.endswith(str(turn.why_missed))
    after = explain_turn(turn, "/undo")
    assert after == "before /undo, " + sentence.replace("last prompt", "prompt")


def test_an_adapter_is_named() -> None:
    sentence = explain_turn(output(9, 0, MissReason.ADAPTER, "fr"))
    assert sentence.startswith(
        "0 of the last prompt's 9 tokens were cached; "
    ) and sentence.endswith("fr")
    sentence = explain_turn(output(9, 8, MissReason.ADAPTER))
    assert sentence.endswith("cached; from token 8 on: cached without an adapter")


def test_loaded_tokens_are_explained() -> None:
    assert explain_turn(output(41, 32, MissReason.UNSEEN, disk=16)).startswith(
        "32 of the last prompt's 41 tokens were cached (16 of them from disk); from token 32 on: "
    )
    sentence = explain_turn(output(4100, 3200, MissReason.UNSEEN, disk=1600, remote=1200))
    assert "cached (1,600 of them from disk, 1,200 of them from remote); " in sentence


def test_in_a_chat(demo_model: object) -> None:
    """After a command that changes the conversation, it explains the turn before the command."""
    lines = [
        *("Hello there, who are you? I am here.", "/explain", "And what is it?", "/explain"),
        *("/undo", "/explain", "/system Be brief.", "/explain", "Hello", "/explain"),
        *("/reset", "/explain"),
    ]
    output_lines = call(
        "chat", *SMALL, "--max-tokens", "4", stdin="\n".join(lines)
    ).stderr.splitlines()
    sentences = [line for line in output_lines if "prompt's" in line]
    assert (
        sentences[0].startswith("0 of the last prompt's ") and "from token 0 on: " in sentences[0]
    )
    cached = int(sentences[1].split()[0])
    assert cached > 0 and f"from token {cached} on: " in sentences[1]
    assert sentences[2] == "before /undo, " + sentences[1].replace("last prompt", "prompt")
    assert sentences[3] == sentences[2].replace("/undo", "/system")
    assert re.match(r"\d+ of the last prompt's ", sentences[4])
    assert len(sentences) == 5 and output_lines[-1] == "headstart: there is no question yet"


def test_checkpoints_of_recurrent_layers(tmp_path: Path) -> None:
    """The second turn resumes at the end of the first, and `/pool` counts the checkpoints."""
    folder = save_chatting("lfm2", tmp_path)
    lines = ["the other day they went there together", "/pool", "and then?", "/explain"]
    options = ["--model", str(folder), "--max-tokens", "4", "--num-states", "32"]
    output = call("chat", *options, stdin="\n".join(lines)).stderr
    [count] = re.findall(r"(\d+) checkpoints? in 32 slots", " ".join(output.split()))
    assert 1 <= int(count) <= 3
    [cached] = re.findall(r"(\d+) of the last prompt's", output)
    assert int(cached) > 16
