"""`headstart chat --resume`: the summary of the resumed conversation."""

import json
import re
from pathlib import Path

from tests.cli.test_main import SMALL, cached_tokens, call


def prompts(stderr: str) -> list[int]:
    return [int(number) for number in re.findall(r"prompt (\d+) tokens", stderr)]


def test_a_resumed_chat_shows_its_length(demo_model: Path, tmp_path: Path) -> None:
    saved, cache = tmp_path / "chat.json", ("--cache-dir", str(tmp_path / "kept"))
    begun = call("chat", *SMALL, *cache, stdin=f"Hello there\n/save {saved}\n")
    resumed = call(
        "chat", *SMALL, *cache, "--resume", str(saved), stdin=f"And again\n/load {saved}"
    )
    length, loaded = re.findall(r"1 turn, (\d+) tokens; the line below the next", resumed.stderr)
    assert f"{saved}: 1 turn, " in resumed.stderr
    assert "loaded: 1 turn, " in resumed.stderr
    [first], [second] = prompts(begun.stderr), prompts(resumed.stderr)
    assert first < int(length) < second
    assert length == loaded
    assert 0 < cached_tokens(resumed.stderr)[0] <= int(length)


def test_a_resumed_chat_that_does_not_fit_is_reported(demo_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
    saved.write_text(json.dumps({"messages": turns * 2}))
    few = (*SMALL, "--max-model-len", "200", "--resume", str(saved))
    result = call("chat", *few, stdin="")
    assert result.exit_code == 0
    assert re.search(r"2 turns, of which not all fit: the prompt has \d+ tokens", result.stderr)
    saved.write_text(json.dumps([]))
    assert f"{saved}: 0 turns; " in call("chat", *few, stdin="").stderr


def test_a_resumed_chat_shows_its_last_turn(demo_model: Path, tmp_path: Path) -> None:
    """Regression: only the count of turns was shown, so conversations looked alike."""
    saved, image = tmp_path / "chat.json", {"type": "image_url", "image_url": {"url": "data:,"}}
    for question in ("A table.\n\nWho is it?", [image, {"type": "text", "text": "Who is it?"}, 3]):
        turn = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "It is\n\x1b[2J" + "Ann " * 100},
        ]
        saved.write_text(json.dumps(turn))
        output = call("chat", *SMALL, "--resume", str(saved), stdin=f"/load {saved}").stderr
        lines = output.splitlines()
        places = [i for i, line in enumerate(lines) if line == "> Who is it?"]
        assert len(places) == 2
        for i in places:
            assert lines[i + 1].startswith("It is \\x1b[2JAnn Ann ") and len(lines[i + 1]) == 80
