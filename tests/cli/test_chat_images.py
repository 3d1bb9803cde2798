"""Images in `headstart chat` in a pseudo-terminal, in `run`, and in their demo."""

import io
import json
import sys
from pathlib import Path

import pytest

from examples.demos.images import make_picture
from tests.cli.test_chat_terminal import READY, Terminal, no_child_is_left, number
from tests.cli.test_main import cached_tokens, call
from tests.small_demos import save_unloadable

__all__ = ["no_child_is_left"]

TOKENS = 196
"""Tokens of each image."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("two pictures")
    paths = [folder / "hills.png", folder / "more hills.jpg"]
    for seed, path in enumerate(paths):
        make_picture(seed).save(path)
    return paths


def test_images_are_sent_with_the_next_message_and_are_hit(
    demo_vision: Path, pictures: list[Path], tmp_path: Path
) -> None:
    hills, more = pictures
    model = ["--model", str(demo_vision), "--max-tokens", "4"]
    terminal = Terminal(tmp_path, *model)
    terminal.send(f"/image {hills}\r")
    num_tokens = number(
        terminal.wait(r"hills.png: about ([\d,]+)\s+tokens, sent with your next")[1]
    )
    assert TOKENS < num_tokens < TOKENS + 40
    terminal.wait(READY)
    first, cached = terminal.ask("What is it?")
    assert cached == 0 and TOKENS < first < TOKENS + 60
    # The next turn hits the image and all earlier turns; a second image is read.
    terminal.send(f"/image {more}\r")
    terminal.wait("more hills.jpg: about ")
    terminal.wait(READY)
    second, cached = terminal.ask("And this one?")
    assert first <= cached < second and second - cached > TOKENS
    # Neither a text file nor a missing file is an image; the chat continues without it.
    (tmp_path / "text.png").write_text("no image")
    for wrong, error in (("text.png", "text.png: .*unknown format"), ("none.png", "cannot read")):
        terminal.send(f"/image {tmp_path / wrong}\r")
        terminal.wait(error)
        terminal.wait(READY)
    third, cached = terminal.ask("Thanks.")
    assert cached >= second and third - cached < 60
    saved = tmp_path / "chat.json"
    terminal.send(f"/save {saved}\r")
    terminal.wait(r"3 turns in\s")
    terminal.wait(READY)
    terminal.end()
    kinds = [
        [part["type"] for part in message["content"]]
        for message in json.loads(saved.read_text(encoding="utf-8"))["messages"]
        if isinstance(message["content"], list)
    ]
    assert kinds == [["image_url", "text"]] * 2
    # A saved chat brings its images back.
    terminal = Terminal(
        tmp_path, "--model", str(demo_vision), "--max-tokens", "4", "--resume", str(saved)
    )
    again, cached = terminal.ask("And now?")
    assert cached == 0 and again > third
    terminal.end()


def test_an_image_for_a_text_model_is_refused(pictures: list[Path], tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.send(f"/image {pictures[0]}\r")
    terminal.wait("headstart-tiny takes only text")
    terminal.wait(READY)
    assert terminal.ask("Hello")[0] < 40
    terminal.end()


def test_run_refuses_images_for_a_text_model_before_loading(
    pictures: list[Path], tmp_path: Path
) -> None:
    model = save_unloadable(tmp_path / "model")
    result = call("run", "--model", str(model), "--image", str(pictures[0]), "What?")
    assert result.exit_code == 2
    assert "--image needs a model with vision" in result.stderr


def test_run_answers_questions_about_images(demo_vision: Path, pictures: list[Path]) -> None:
    images = [word for path in pictures for word in ("--image", str(path))]
    result = call(
        "run", "--model", str(demo_vision), "--max-tokens", "4", *images, "What?", "And what?"
    )
    assert result.exit_code == 0
    prompts = [line.split()[1] for line in result.stderr.splitlines() if "[prompt" in line]
    assert all(2 * TOKENS < number(prompt) < 2 * TOKENS + 60 for prompt in prompts)
    assert cached_tokens(result.stderr)[0] == 0 and cached_tokens(result.stderr)[1] > 2 * TOKENS


def test_a_file_that_is_not_an_image_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    make_picture(0).save(buffer, "PNG")
    for name, content in (("text.png", b"no image"), ("cut.png", buffer.getvalue()[:2000])):
        path = tmp_path / name
        path.write_bytes(content)
        result = call("run", "--model", "/no/such/model", "--image", str(path), "What?")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"headstart: {path}: ")
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = call("run", "--image", str(path), "What?")
    assert result.stderr.endswith('pip install ".[vision]" in the folder of the clone\n')
