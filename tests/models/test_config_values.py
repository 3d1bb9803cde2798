"""The numbers of a config.json that are a model's sizes."""

import json
from pathlib import Path

import pytest

from headstart.errors import DamagedModelError
from headstart.models.config_values import check_values, find_values
from headstart.models.loader import load_model
from tests.tiny_models import save_tiny

FREE = {
    "label2id": {"depth": 0, "head_dim": 1},
    "id2label": {"0": "depth", "1": "head_dim"},
    "task_specific_params": {"summarization": {"num_layers": 0}},
}


def test_names_of_labels_and_tasks_are_not_sizes() -> None:
    content = {**FREE, "vision_config": {**FREE, "depth": 3}, "head_dim": [8, None, 16]}
    values = find_values(content, {"depth", "head_dim", "num_layers", "label2id"})
    assert sorted(values) == [("head_dim", 8), ("head_dim", 16), ("vision_config.depth", 3)]
    check_values(Path("config.json"), content)
    with pytest.raises(DamagedModelError, match=r"parts\.depth is 0"):
        check_values(Path("config.json"), {**FREE, "parts": {"depth": 0}})


def test_a_model_with_a_label_named_depth_is_loaded(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FREE))
    assert load_model(tmp_path).vocab_size


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["12", [2, "12"], 2.5, True])
def test_tokens_that_end_a_text_are_whole_numbers(name: str, value: object, tmp_path: Path) -> None:
    """Regression: the string "12" was read as the tokens 1 and 2, which then ended every answer."""
    path = save_tiny("llama", tmp_path) / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    with pytest.raises(DamagedModelError, match=rf"{name}: eos_token_id is .*; allowed: an int"):
        load_model(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 12]}))
    assert 12 in load_model(tmp_path).eos_token_ids or name == "config.json"
