"""`headstart cache ls` shows stored texts, if `--cache-words` allows it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headstart import LLM, SamplingParams
from headstart.cli.main import main
from headstart.tiers.contents import read_models
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

PARAMS = SamplingParams(temperature=0, max_tokens=1)
BOOK = "there were answers to 你好世界, and another of them: user \x1b[31m hello where\n\n were we "
SHARED = "system hello there, für Müller the end of that and this "
QUESTIONS = ("another answer and the other day they went", "x = y + z; where were we rather later")


@pytest.fixture(params=sorted(TINY_TOKENIZERS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = TINY_TOKENIZERS[request.param]()
    return save_smallest(tmp_path / "model", positions=2048, tokenizer=tokenizer)


@contextmanager
def opened(model: Path, folder: Path, **options: Any) -> Iterator[LLM]:
    options = {"num_blocks": 200, "cache_dir": str(folder), "cache_words": True, **options}
    with closing(make_llm(model, **options)) as llm:
        yield llm


def listed(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["cache", "ls", *arguments, "--cache-dir", str(folder)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_person_recognizes_a_book(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(model, folder) as llm:
        llm.generate(BOOK * 5, PARAMS, use_tqdm=False)
        for question in QUESTIONS:
            llm.generate(SHARED * 5 + question * 5, PARAMS, use_tqdm=False)
    shown = listed(folder, "model")
    quoted = [line.strip() for line in shown.splitlines() if '"' in line]
    assert len(quoted) == 4, shown
    assert any(line.startswith('"there were answers to 你好世') for line in quoted)
    assert any(line.startswith('"system hello there, für Müller the end') for line in quoted)
    assert "\x1b" not in shown, "text changes the colors of the terminal"
    assert max(map(len, shown.splitlines())) <= 100
    for question in QUESTIONS:  # a block begins somewhere in it
        assert any(question[10:30] in line for line in quoted), shown


def test_texts_are_stored_only_on_request(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(model, folder, cache_words=False) as llm:
        llm.generate(BOOK * 5, PARAMS, use_tqdm=False)
    with opened(model, folder) as llm:
        llm.generate(SHARED * 5, PARAMS, cache_salt="a tenant", use_tqdm=False)
        llm.generate(SHARED * 5, SamplingParams(max_tokens=1), use_tqdm=False, cache_salt="b")
    assert '"' not in listed(folder, "model")
    assert b"system hello" not in (folder / INDEX).read_bytes()
    assert b"there were answers" not in (folder / INDEX).read_bytes()


def test_a_public_prefix_is_shown_but_a_tenants_text_is_not(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(model, folder) as llm:
        tokenizer = llm.get_tokenizer()
        llm.engine.manager.hasher.publish(tokenizer.encode(SHARED * 5))
        llm.generate(SHARED * 5 + QUESTIONS[0] * 5, PARAMS, cache_salt="a", use_tqdm=False)
    shown = listed(folder, "model")
    assert "system hello there" in shown
    assert "they went" not in shown
    assert b"they went" not in (folder / INDEX).read_bytes()


def test_dropped_prefixes_leave_no_words(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(model, folder) as llm:
        llm.generate(BOOK * 5, PARAMS, use_tqdm=False)
    assert b"there were answers" in (folder / INDEX).read_bytes()
    [state] = read_models(folder)
    with closing(DiskStore(folder, state.model.record, 1 << 30)) as store:
        store.clear()
    assert b"there were answers" not in (folder / INDEX).read_bytes()
    assert listed(folder) == "no prefixes are stored\n"


def test_a_failing_tokenizer_loses_only_the_words(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    with opened(model, folder) as llm:
        tokens = llm.get_tokenizer().encode(BOOK * 5)

        def decode(*arguments: Any, **options: Any) -> str:
            raise ValueError("no such token")

        monkeypatch.setattr(type(llm.frontend.tokenizer), "decode", decode)
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    assert '"' not in listed(folder, "model")
    assert "0 to " in listed(folder, "model"), "its blocks are kept"
