"""The demo model is complete, created once, loadable, and its size is as documented."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from headstart.errors import ModelError
from headstart.models.demo import demo_model_path
from tests.forked import FORKS


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the real demo model; other tests use one with small layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_DEMO_DIR", str(tmp_path_factory.mktemp("headstart-cache")))
        yield demo_model_path()


def test_it_is_the_same_model_every_time(demo_model: Path, tmp_path: Path) -> None:
    maker = FORKS.Process(target=_make_demo_model_in, args=(tmp_path,))
    maker.start()
    maker.join()
    [again] = tmp_path.iterdir()
    assert again.name == demo_model.name
    first, second = (load_file(p / "model.safetensors") for p in (demo_model, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_is_created_once_and_leaves_no_other_files(demo_model: Path) -> None:
    written = (demo_model / "model.safetensors").stat().st_mtime_ns
    assert demo_model_path().parent == demo_model.parent
    assert (demo_model / "model.safetensors").stat().st_mtime_ns == written
    assert not [path for path in demo_model.parent.iterdir() if path.name.startswith(".")]


def test_the_long_prompt_fits(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["max_position_embeddings"] >= 16384
    weights = load_file(demo_model / "model.safetensors").values()
    assert 20e6 < sum(weight.numel() for weight in weights) < 30e6


def test_a_token_is_a_byte(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = "naïve 你好 😀\n\n | 1  | John's\t\x00\x7f"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_a_chat_is_spelt_with_special_tokens(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids == [
        257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"
    ]  # fmt: skip
    assert tokenizer.eos_token_id == 258


def test_two_processes_at_once_make_one_model(tmp_path: Path) -> None:
    racers = [FORKS.Process(target=_make_demo_model_in, args=(tmp_path,)) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    [folder] = tmp_path.iterdir()
    assert folder.name == demo_model_path().name
    assert load_file(folder / "model.safetensors")


def _make_demo_model_in(folder: Path) -> None:
    os.environ["HEADSTART_DEMO_DIR"] = str(folder)
    demo_model_path()


def test_a_cache_folder_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_DEMO_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*file: .*HEADSTART_DEMO_DIR"):
        demo_model_path()
