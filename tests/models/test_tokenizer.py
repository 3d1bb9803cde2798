"""Tokenizers by folder are loaded as saved, or refused with the name of the wrong file."""

import json
import logging
import warnings
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from headstart.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from headstart.models.tokenizer import load_tokenizer
from tests.tiny_models import tiny_config
from tests.tiny_tokenizers import TINY_TOKENIZERS

TEXT = "the other 日本語 👍🏽 day"


def save(folder: Path, name: str = "byte_level") -> Path:
    """Write a model's folder as far as its tokenizer is concerned."""
    tiny_config("llama").save_pretrained(folder)
    TINY_TOKENIZERS[name]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@pytest.mark.parametrize("as_path", [True, False])
def test_a_tokenizer_is_loaded_as_saved(tmp_path: Path, name: str, as_path: bool) -> None:
    saved = TINY_TOKENIZERS[name]()
    save(tmp_path, name)
    tokenizer = load_tokenizer(tmp_path if as_path else str(tmp_path))
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == saved.encode(TEXT)
    assert tokenizer.chat_template == saved.chat_template
    assert tokenizer.all_special_ids == saved.all_special_ids


def test_settings_are_optional(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_a_model_may_lack_a_tokenizer(tmp_path: Path, kind: str) -> None:
    """For some architectures transformers would create a tokenizer with one token."""
    tiny_config(kind).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None


class Records(logging.Handler):
    """A handler that collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_loading_logs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would log for settings that name another kind of tokenizer."""
    save(tmp_path)
    settings = {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    logged = Records()
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(logged)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_tokenizer(tmp_path)
    finally:
        logger.removeHandler(logged)
    assert (caught, logged.texts) == ([], [])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"version": "1.0",', "[]", "\x00"])
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    save(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(DamagedModelError, match=file.replace(".", r"\.")):
        load_tokenizer(tmp_path)


def test_a_tokenizer_json_with_other_content_is_damaged(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedModelError, match="cannot be loaded: KeyError"):
        load_tokenizer(tmp_path)


def test_settings_without_a_vocabulary_are_damage(tmp_path: Path) -> None:
    """An incomplete download; without the settings it would be a model without a tokenizer."""
    save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DamagedModelError, match="no vocabulary"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": ["mine.Mine", None]}, ["mine.Mine", "mine.Mine"]]
)
def test_code_from_a_folder_is_not_run(tmp_path: Path, auto_map: object) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')\n")
    settings = {"tokenizer_class": "Mine", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="needs custom code"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "no-such-owner/no-such-model"])
def test_a_missing_model(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=model):
        load_tokenizer(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_tokenizer(tmp_path / "tokenizer.json")
