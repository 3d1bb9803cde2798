"""The programs in examples/: written as for vLLM, run with one line of each changed."""

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

from headstart import LLM
from headstart.cli.demo.images import make_picture
from headstart.models.demo.adapter import write_adapter
from tests.house.source import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))

# Where vLLM has what `from headstart import ...` gives, beside what its package exports.
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
def test_an_example_runs(
    path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    assert SHOWN[path.stem] in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_what_vllm_has(path: Path) -> None:
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headstart")
        for alias in node.names
    }
    assert names
    assert names <= {*SURFACE["vllm"], *ELSEWHERE}


def test_there_is_an_example_for_each_way() -> None:
    assert {path.stem for path in EXAMPLES} == set(SHOWN)
