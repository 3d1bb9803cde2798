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
    """A file that is on the disk and not in the system's cache, where there is such a thing."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(bytes(PAGES * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if CachedShare([path]).read() > 0:
        pytest.skip("files of this folder cannot leave the system's cache")
    return path


def test_the_share_follows_what_is_read(weights: Path) -> None:
    share = CachedShare([weights])
    assert share.read() == 0
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        os.pread(file.fileno(), PAGES // 4 * mmap.PAGESIZE, 0)
    assert share.read() == 1 / 4
    weights.read_bytes()
    assert share.read() == 1


def test_the_line_says_how_far_and_how_long_still(weights: Path) -> None:
    describe = describe_loading("a/model", [weights])
    assert describe(1.0) == "loading a/model, 262.1 KB of weights: 1.00 s"
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), PAGES // 4 * mmap.PAGESIZE, 0)
    # Reading began after 1 s: what was imported before says nothing of the rest.
    assert describe(3.0) == (
        "loading a/model: read 65.5 KB of 262.1 KB of weights; about 6 s to go"
    )
    weights.read_bytes()
    assert describe(4.0) == "loading a/model, 262.1 KB of weights: 4.00 s"
    assert describe_loading("a/model", [weights])(1.0).endswith("262.1 KB of weights: 1.00 s")


def test_a_header_says_nothing_of_how_fast_the_rest_is_read(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed "about 2 min to go" while modules were imported: the rate was that of one page."""
    shares = iter([0.94, 0.944, 0.944, 0.97, 1.0])
    monkeypatch.setattr(CachedShare, "read", lambda self: next(shares))
    describe = describe_loading("a/model", [weights])
    for seconds in (1.0, 10.0):
        assert describe(seconds) == f"loading a/model, 262.1 KB of weights: {seconds:.2f} s"
    assert describe(11.0).endswith("read 254.3 KB of 262.1 KB of weights; about 1 s to go")
    assert describe(12.0) == "loading a/model, 262.1 KB of weights: 12.00 s"


def test_files_that_are_wrong_are_left_to_the_loader() -> None:
    assert describe_loading("a/model", [])(2.0) == "loading a/model: 2.00 s"


@pytest.mark.parametrize(
    ("engine", "lost"),
    [
        ({"weights": "int8", "kv_cache_dtype": "auto"}, None),
        ({"weights": "int4"}, "With weights int4 most of its answers are wrong."),
        ({"weights": "int5", "kv_cache_dtype": "int8"}, "kv_cache_dtype int8 and weights int5"),
    ],
)
def test_what_few_bits_do_to_the_embedded_model_is_told(
    engine: dict[str, str], lost: str | None
) -> None:
    """There was no message about the useless answers."""
    told = quality_note("headstart-tiny", engine)
    assert ("answers are wrong" in told) == (lost is not None)
    assert (lost or "looks things up in a document") in told
    assert quality_note("some/model", engine) == ""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The line of each wait, as it is after twelve seconds."""
    lines: list[str] = []

    def waiting(doing: str | Callable[[float], str]) -> AbstractContextManager[None]:
        lines.append(f"{doing}: 12.00 s" if isinstance(doing, str) else doing(12.0))
        return nullcontext()

    for module in (opening, models, messages, server):
        monkeypatch.setattr(module, "waiting", waiting)
    return lines


def test_the_first_start_of_a_gguf_file_is_shown_and_ends_as_all_else(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was shown for 20 s, and Ctrl-C left an unfinished folder in the user's cache.

    It ended the process at once, as in a download, so that nothing was removed.
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


def test_what_is_checked_before_a_model_is_loaded_is_shown(
    shown: list[str], demo_model: Path, tmp_path: Path
) -> None:
    """Nothing was, for the seconds that what reads a tokenizer or a schema takes to import."""
    questions = Questions(("y",), ("x" * 60,))
    questions.check_model(demo_model, make_config({"max_model_len": 62}))
    assert not shown  # so short a text fits, whatever its tokens are
    with pytest.raises(RequestError, match="has 61 tokens"):
        questions.check_model(demo_model, make_config({"max_model_len": 61}))
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "no such"}')
    assert call("run", "--json", str(schema), "Who?").exit_code == 2
    counting, compiling = shown
    assert counting == "counting the tokens of the prompt: 12.00 s"
    assert compiling == f"compiling the schema in {schema}: 12.00 s"


def test_what_is_read_before_a_model_is_quantized_is_shown(
    shown: list[str], tmp_path: Path
) -> None:
    """Nothing was, for seconds."""
    done = call("models", "quantize", "headstart-tiny", str(tmp_path / "small"))
    assert done.exit_code == 2 and "multiples of 32" in done.stderr
    assert shown == [
        "importing torch: 12.00 s",
        "reading the model's tokenizer and the text: 12.00 s",
    ]


def test_that_a_server_is_imported_is_shown(shown: list[str], tmp_path: Path) -> None:
    """Nothing was, for two seconds and more."""
    done = call("serve", "--public-prefix", str(tmp_path / "nothing"))
    assert done.exit_code == 2 and "nothing" in done.stderr
    assert shown == ["importing the server: 12.00 s"]


def test_the_time_that_a_prompt_still_takes_falls_within_a_step() -> None:
    """It grew from 21 to 34 s while the next 2,048 tokens were computed."""
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
