"""Messages while a model loads."""

import mmap
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cli import messages, models, opening, server
from headstart.cli.messages import Questions
from headstart.cli.opening import quality_note
from headstart.cli.terminal import (
    CachedShare,
    describe_loading,
    describe_reading,
)
from headstart.engine.config import make_config
from headstart.errors import RequestError
from headstart.frontend.streams import PromptProgress
from tests.cli.test_main import call

PAGES = 64


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a file that is on disk and not in the page cache."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(bytes(PAGES * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if CachedShare([path]).read() > 0:
        pytest.skip("files of this folder cannot leave the system's cache")
    return path


def test_the_share_follows_the_bytes_read(weights: Path) -> None:
    share = CachedShare([weights])
    assert share.read() == 0
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        os.pread(file.fileno(), PAGES // 4 * mmap.PAGESIZE, 0)
    assert share.read() == 1 / 4
    weights.read_bytes()
    assert share.read() == 1


def test_the_line_shows_progress_and_remaining_time(weights: Path) -> None:
    describe = describe_loading("a/model", [weights])
    assert describe(1.0) == "loading a/model, 262.1 KB of weights: 1.00 s"
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), PAGES // 4 * mmap.PAGESIZE, 0)
    # Reading began after 1 s; the estimate ignores the earlier imports.
    assert describe(3.0) == (
        "loading a/model: read 65.5 KB of 262.1 KB of weights; about 6 s to go"
    )
    weights.read_bytes()
    assert describe(4.0) == "loading a/model, 262.1 KB of weights: 4.00 s"
    assert describe_loading("a/model", [weights])(1.0).endswith("262.1 KB of weights: 1.00 s")


def test_a_header_does_not_count_for_the_rate(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rate of one page led to "about 2 min to go" during imports."""
    shares = iter([0.94, 0.944, 0.944, 0.97, 1.0])
    monkeypatch.setattr(CachedShare, "read", lambda self: next(shares))
    describe = describe_loading("a/model", [weights])
    for seconds in (1.0, 10.0):
        assert describe(seconds) == f"loading a/model, 262.1 KB of weights: {seconds:.2f} s"
    assert describe(11.0).endswith("read 254.3 KB of 262.1 KB of weights; about 1 s to go")
    assert describe(12.0) == "loading a/model, 262.1 KB of weights: 12.00 s"


def test_missing_files_are_left_to_the_loader() -> None:
    assert describe_loading("a/model", [])(2.0) == "loading a/model: 2.00 s"


@pytest.mark.parametrize(
    ("engine", "lost"),
    [
        ({"weights": "int8", "kv_cache_dtype": "auto"}, None),
        ({"weights": "int4"}, "With weights int4 most of its answers are wrong."),
        ({"weights": "int5", "kv_cache_dtype": "int8"}, "kv_cache_dtype int8 and weights int5"),
    ],
)
def test_a_note_warns_of_few_bits_with_the_embedded_model(
    engine: dict[str, str], lost: str | None
) -> None:
    """Regression: there was no message about the useless answers."""
    note = quality_note("headstart-tiny", engine)
    assert ("answers are wrong" in note) == (lost is not None)
    assert (lost or "looks things up in a document") in note
    assert quality_note("some/model", engine) == ""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of progress lines, as they are after twelve seconds."""
    lines: list[str] = []

    def waiting(doing: str | Callable[[float], str]) -> AbstractContextManager[None]:
        lines.append(f"{doing}: 12.00 s" if isinstance(doing, str) else doing(12.0))
        return nullcontext()

    for module in (opening, models, messages, server):
        monkeypatch.setattr(module, "waiting", waiting)
    return lines


def test_reading_a_gguf_file_is_shown_and_can_be_interrupted(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: nothing was shown for 20 s, and Ctrl-C left an unfinished folder in the cache.

    Ctrl-C ended the process at once, as during a download, without a cleanup.
    """
    handlers = []

    def find_folder(model: str) -> Path:
        handlers.append(signal.getsignal(signal.SIGINT))
        return Path(model)

    monkeypatch.setattr(opening, "find_folder", find_folder)
    opening.folder_of("some.gguf")
    assert shown == ["reading configuration and tokenizer of some.gguf: 12.00 s"]
    assert handlers == [signal.getsignal(signal.SIGINT)]
    opening.folder_of("an/owner")
    assert len(shown) == 1 and handlers[1] != handlers[0]


def test_checks_before_a_model_is_loaded_are_shown(
    shown: list[str], demo_model: Path, tmp_path: Path
) -> None:
    """Regression: nothing was shown for seconds, while the libraries were imported."""
    questions = Questions(("y",), ("x" * 60,))
    questions.check_model(demo_model, make_config({"max_model_len": 62}))
    assert not shown  # such a short text fits with any tokens
    with pytest.raises(RequestError, match="has 61 tokens"):
        questions.check_model(demo_model, make_config({"max_model_len": 61}))
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "no such"}')
    assert call("run", "--json", str(schema), "Who?").exit_code == 2
    counting, compiling = shown
    assert counting == "counting the tokens of the prompt: 12.00 s"
    assert compiling == f"compiling the schema in {schema}: 12.00 s"


def test_steps_before_a_model_is_quantized_are_shown(shown: list[str], tmp_path: Path) -> None:
    """Regression: nothing was shown for seconds."""
    done = call("models", "quantize", "headstart-tiny", str(tmp_path / "small"))
    assert done.exit_code == 2 and "multiples of 32" in done.stderr
    assert shown == [
        "importing torch: 12.00 s",
        "reading the model's tokenizer and the text: 12.00 s",
    ]


def test_the_import_of_the_server_is_shown(shown: list[str], tmp_path: Path) -> None:
    """Regression: nothing was shown for more than two seconds."""
    done = call("serve", "--public-prefix", str(tmp_path / "nothing"))
    assert done.exit_code == 2 and "nothing" in done.stderr
    assert shown == ["importing the server: 12.00 s"]


def test_the_remaining_time_of_a_prompt_decreases_within_a_step() -> None:
    """Regression: it grew from 21 to 34 s while the next 2,048 tokens were computed."""
    reads = iter([0, 2_048, 2_048, 2_048, 4_096])
    stream: Any = SimpleNamespace(progress=lambda: PromptProgress(6_144, next(reads), 0))
    describe = describe_reading(stream)
    lines = [describe(seconds) for seconds in (0.5, 10.0, 12.0, 17.0, 20.0)]
    assert [line.rpartition("about ")[2] for line in lines[1:]] == [
        "20 s to go",
        "18 s to go",
        "13 s to go",
        "10 s to go",
    ]
