"""`headstart run` refuses a prompt longer than the context before the model is loaded."""

import json
import shutil
from pathlib import Path

import pytest

from headstart.cli.messages import Questions
from headstart.engine.config import make_config
from headstart.errors import RequestError
from headstart.models.config_values import context_bound
from tests.cli.test_main import call


@pytest.fixture
def broken(demo_model: Path, tmp_path: Path) -> Path:
    """Return the demo model, which has a token for each byte, without its weights."""
    folder = tmp_path / "broken"
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_a_file_longer_than_the_context_is_refused_before_loading(broken: Path) -> None:
    limit = json.loads((broken / "config.json").read_text())["max_position_embeddings"]
    file = broken / "book.txt"
    file.write_text("x" * (limit + 5))
    result = call("run", "--model", str(broken), "--file", str(file), "Sum it up.")
    assert result.exit_code == 2
    assert f"the prompt has {limit + 15:,} tokens with its files; the context holds {limit:,}" in (
        result.stderr
    )
    file.write_text("x" * 30 * limit)
    result = call("run", "--model", str(broken), "--file", str(file), "Sum it up.")
    assert "bytes of text; allowed: " in result.stderr


@pytest.mark.parametrize(
    "options", [{"max_model_len": 100}, {"num_blocks": 5, "block_size": 16}, {"num_blocks": 5}]
)
def test_options_limit_the_length(broken: Path, options: dict[str, int]) -> None:
    few = Questions(("y" * 50, "y"), ("x" * 60,))
    with pytest.raises(RequestError, match="has 110 tokens with its files; the context holds "):
        few.check_model(broken, make_config(options))
    few.check_model(broken, make_config({"max_model_len": 112}))


@pytest.mark.parametrize(
    ("content", "bound"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        (
            {
                "max_position_embeddings": 8192,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8192},
            },
            32768,
        ),
        ({"rope_parameters": {"full": {"factor": 2, "original_max_position_embeddings": 9}}}, 18),
        ({"rope_scaling": None, "hidden_size": 8}, None),
    ],
)
def test_a_limit_from_the_configuration(content: dict[str, object], bound: int) -> None:
    assert context_bound(content) == bound
