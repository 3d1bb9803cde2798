"""Programs in examples/: vLLM's with one changed line each, and the demos."""

import ast
import json
import re
import wave
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from examples.demos.images import make_picture
from examples.small_models.adapter import write_adapter
from headstart import LLM
from tests.forked import run_program
from tests.house.source import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))

# vLLM's modules of the names of `from headstart import ...` that its package does not export.
ELSEWHERE = {
    "AsyncLLM",
    "StructuredOutputsParams",
    "BeamSearchParams",
    "RequestOutputKind",
    "LoRARequest",
}

SHOWN = {
    "async_streaming": "stream-example-3: ",
    "basic": "Prompt:    'The future of AI is'",
    "batch": "40 prompts, 120 tokens",
    "beam_search": "'Hello, my name is",
    "chat": "Answer: The age of Bob Ray is 44",
    "logprobs": "prompt: None then",
    "lora": "adapter-2: ",
    "parallel_sampling": "[12, 12, 12, 12]",
    "prefix_caching": "Generated answers are the same: True",
    "structured_outputs": "choice: Negative",
    "vision_language": "Chat: ",
}


PROGRAM = """
import json, os, runpy, sys
folder, variables = json.loads(sys.argv.pop(1))
os.chdir(folder)
os.environ.update(variables)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(path: Path, *arguments: str, folder: Path = ROOT, variables: Mapping[str, str] = {}) -> str:
    """Run a program in a folder, with changes of the environment; return its output."""
    done = run_program(PROGRAM, json.dumps([str(folder), variables]), path, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def arguments(request: pytest.FixtureRequest, demo_vision: Path, tmp_path: Path) -> list[str]:
    name: str = request.node.callspec.params["path"].stem
    if name == "lora":
        llm = LLM("headstart-tiny", num_blocks=16)
        for number in (1, 2):
            write_adapter(llm.engine.model, tmp_path / str(number), (50, 60), number)
        llm.close()
        return [str(tmp_path / "1"), str(tmp_path / "2")]
    if name == "vision_language":
        paths = [tmp_path / f"{number}.png" for number in (1, 2)]
        for number, path in enumerate(paths):
            make_picture(number).save(path)
        return [str(demo_vision), *map(str, paths)]
    return []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, arguments: list[str]) -> None:
    assert SHOWN[path.stem] in run(path, *arguments)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_only_names_of_vllm(path: Path) -> None:
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headstart")
        for alias in node.names
    }
    assert names
    assert names <= {*SURFACE["vllm"], *ELSEWHERE}


def test_each_interface_has_an_example() -> None:
    assert {path.stem for path in EXAMPLES} == set(SHOWN)


@pytest.fixture
def show(demo_folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a demo in a folder and a terminal with `columns`; return its output."""

    def show(name: str, *arguments: str, columns: int = 80) -> str:
        path = ROOT / "examples" / "demos" / f"{name}.py"
        variables = {"COLUMNS": str(columns), "HEADSTART_DEMO_DIR": str(demo_folder)}
        return run(path, *arguments, folder=tmp_path, variables=variables)

    return show


def test_the_demo_of_adapters_shows_what_is_shared(show: Callable[..., str]) -> None:
    lines = re.findall(
        r"^ (none|cheerful|doubtful|jolly) +[\d,]+ \((\d+)%\).*? s? +(\S.*?) *$",
        show("adapters"),
        re.M,
    )
    hits = [(name, int(share) > 95) for name, share, _ in lines]
    everybody = ("none", "cheerful", "doubtful")
    assert hits == [
        *((name, False) for name in everybody),
        *((name, True) for name in everybody),
        ("jolly", True),
        ("cheerful", False),
        *((name, True) for name in (*everybody, "jolly")),
    ]
    signs = {"none": "is 29", "cheerful": "29!", "doubtful": "29?", "jolly": "29!"}
    assert all(answer.endswith(signs[name]) for name, _, answer in (*lines[:3], *lines[-4:]))


def test_the_demo_of_images_shows_what_is_computed(
    show: Callable[..., str], demo_vision: Path
) -> None:
    output = show("images")
    cards = re.findall(r"│ ([\d,]+) +(\d+) +[\d,]+ \((\d+)%\) +(\d of \d) ", output)
    assert [card[3] for card in cards] == ["1 of 1", "0 of 1", "1 of 2", "0 of 2", "1 of 1"]
    assert [int(card[1]) for card in cards] == [196, 196, 392, 392, 196]
    shares = [int(card[2]) for card in cards]
    assert shares[1] > 80 and shares[2] > 40 and max(shares[0], shares[3], shares[4]) < 5
    assert "of 7 pictures 3 were encoded" in output


def test_the_omni_demo_speaks_and_reports_skipped_tokens(
    show: Callable[..., str], tmp_path: Path
) -> None:
    first, second = show("omni", "--tiny", "--wav", str(tmp_path / "new")).split("╭─ 2")
    assert re.search(r"thinker +\S+ +0 ", first)
    for stage in ("thinker", "talker"):
        match = re.search(rf"{stage} +(\S+) +(\S+)", second)
        assert match is not None
        computed, cached = (int(number.replace(",", "")) for number in match.groups())
        assert cached > 400 and computed < 120
    sounds = []
    for number in (1, 2):
        with wave.open(str(tmp_path / "new" / f"answer-{number}.wav")) as file:
            assert file.getframerate() == 24_000 and file.getnframes() == 16 * 2 * 480
            sounds.append(np.frombuffer(file.readframes(16 * 2 * 480), "<i2").astype(int))
    assert all(3_000 < abs(sound).max() < 30_000 for sound in sounds)
    assert abs(sounds[0] - sounds[1]).max() > 3_000


def test_the_omni_demo_writes_no_files_by_default(show: Callable[..., str], tmp_path: Path) -> None:
    """Regression: it wrote its answers into the current folder."""
    output = show("omni", "--tiny", columns=60)
    # Units were cut off in narrow terminals.
    rows = re.findall(r"^│ \w+(?: +[\d,–]+){3}(?: +[\d.]+ m?s){2} *│$", output, re.M)
    assert len(rows) == 6
    assert "--wav FOLDER" in output
    assert list(tmp_path.iterdir()) == []
