"""`headstart run --file` twice computes the file once, unless `--cache-dir off` is set."""

import re
import stat
from pathlib import Path

import pytest

from tests.cli.test_main import SMALL, cached_tokens, call


def usual(folder: Path) -> dict[str, str | None]:
    """Return an environment with the default folder for prefixes."""
    return {"HEADSTART_CACHE_DIR": None, "XDG_CACHE_HOME": str(folder)}


def test_a_file_is_computed_once(demo_model: Path, tmp_path: Path) -> None:
    prefixes, book = tmp_path / "headstart" / "prefixes", tmp_path / "book.txt"
    book.write_text("A prefix that was computed once stays computed. " * 8)

    def ask(question: str, *options: str) -> str:
        arguments = ["--file", str(book), question, *options]
        return call("run", *SMALL, *arguments, env=usual(tmp_path)).stderr

    first = ask("What is it?")
    assert (
        f"prefixes are stored in {prefixes}: 0 B of 10.7 GB; --cache-dir off stores none" in first
    )
    assert cached_tokens(first) == [0] and " from disk" not in first
    assert stat.S_IMODE(prefixes.stat().st_mode) == 0o700
    second = ask("Who is it for?")
    [loaded] = re.findall(r"cached (\d+) \(\d+%\), (\d+) from disk", second)
    assert loaded[0] == loaded[1] and int(loaded[0]) > 350
    assert f"prefixes are stored in {prefixes}: 0 B" not in second
    third = ask("Who is it for?", "--cache-dir", "off")
    assert cached_tokens(third) == [0] and "prefixes are stored" not in third


@pytest.mark.parametrize("command", ["run", "chat"])
def test_the_folder_of_prefixes_is_reported_on_a_successful_start(
    command: str, demo_model: Path, tmp_path: Path
) -> None:
    """Regression: the folder was reported before an error, although no prefixes were stored."""
    prompt = ["Who is it?"] if command == "run" else []
    for length, succeeds in (("999999", False), ("64", True)):
        flags = ["--max-model-len", length]
        done = call(command, *SMALL, *flags, *prompt, stdin="/quit\n", env=usual(tmp_path))
        assert ("max_model_len is 999999" in done.stderr) != succeeds
        assert ("prefixes are stored in" in done.stderr) == succeeds
