"""Configuration and weights that disagree are refused by name, before a model is built."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.files import check_files, tensor_shapes
from headstart.models.loader import load_model
from headstart.models.transformers_backend import loader
from headstart.omni.output_cache import OutputCache
from headstart.omni.qwen2_5 import Qwen25Omni
from headstart.omni.qwen3 import Qwen3Omni
from headstart.weights.reader import Checkpoint
from tests.omni.tiny_omni import save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3
from tests.tiny_models import TINY, save_tiny, tiny_config

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts to build a model."""

    def build(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", build)
    monkeypatch.setattr(loader.AutoConfig, "from_pretrained", build)
    monkeypatch.setattr(Checkpoint, "tensor", build)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


# Numbers outside their range.


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("value", [0, -1, 100_001, 10**9, 10**30, True, 3.0, "3", [3, 0]])
def test_a_count_of_layers_outside_its_range(folder: Path, value: object) -> None:
    edit_config(folder, num_hidden_layers=value)
    with pytest.raises(DamagedModelError, match=r"_layers is .*; .* integer from 1 to 100000"):
        load_model(folder)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "head_dim",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -8, 10**12, 1.5, False, "8"])
def test_a_size_outside_its_range(folder: Path, name: str, value: object) -> None:
    edit_config(folder, **{name: value})
    with pytest.raises(DamagedModelError, match=rf"{name} is {value!r}; allowed: an integer"):
        load_model(folder)


@pytest.mark.usefixtures("unbuilt")
def test_parts_of_a_model_are_checked_too(folder: Path) -> None:
    edit_config(folder, vision_config={"inner": {"depth": -2}})
    with pytest.raises(DamagedModelError, match=r"vision_config\.inner\.depth is -2; allowed"):
        load_model(folder)


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 99_999}, r"is 99999; .* have 30 tensors in all"),
        ({"vision_config": {"depth": 31}}, r"vision_config\.depth is 31; .* 30 tensors"),
        ({"intermediate_size": 10**6}, r"is 1000000; .* have \d+ weights in all"),
    ],
)
def test_sizes_above_all_weights(folder: Path, changes: dict[str, Any], reason: str) -> None:
    assert len(tensor_shapes(folder)) == 30
    edit_config(folder, **changes)
    with pytest.raises(DamagedModelError, match=reason):
        load_model(folder)


def test_all_tiny_configurations_are_in_range(tmp_path: Path) -> None:
    for name in TINY:
        save_tiny(name, tmp_path)
        check_files(tmp_path)


# Numbers that differ from those of the weights, reported before the model is built.


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "llama",
            {"hidden_size": 36},
            "hidden_size is 36, and no tensor has a dimension of this size",
        ),
        ("llama", {"vocab_size": 132}, "vocab_size is 132, and no tensor"),
        ("gpt2", {"n_embd": 36}, "hidden_size is 36, and no tensor"),
    ],
)
def test_sizes_that_differ_from_the_weights(
    tmp_path: Path,
    name: str,
    change: dict[str, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "load_weights", None)
    edit_config(save_tiny(name, tmp_path), **change)
    with pytest.raises(DamagedModelError, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"head_dim": 12}),
        ("llama", {"intermediate_size": 99}),
        ("gpt2", {"n_positions": 257}),
        ("opt", {"max_position_embeddings": 300}),
    ],
)
def test_other_sizes_are_reported_after_loading(
    tmp_path: Path, name: str, change: dict[str, int]
) -> None:
    edit_config(save_tiny(name, tmp_path), **change)
    with pytest.raises(DamagedModelError, match="parameters have another shape: "):
        load_model(tmp_path)


def add_layer(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if ".layers.2." in name]:
        weights[name.replace(".layers.2.", ".layers.3.")] = weights[name].clone()


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 have such layers after the last layer."""
    save_tiny("deepseek_v3", tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    expected = load_model(tmp_path).module.state_dict()
    edit_weights(tmp_path, add_layer)
    with pytest.raises(DamagedModelError, match=r"do not belong to this model: model\.layers\.3\."):
        load_model(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    state = load_model(tmp_path).module.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [WEIGHTS, "pytorch_model.bin"])
def test_layers_are_counted_after_loading(folder: Path, name: str) -> None:
    if name != WEIGHTS:
        torch.save(load_file(folder / WEIGHTS), folder / name)
        (folder / WEIGHTS).unlink()
    assert load_model(folder).vocab_size == tiny_config("llama").vocab_size
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(DamagedModelError, match=r"9 parameters are missing: model\.layers\.3\."):
        load_model(folder)
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(DamagedModelError, match=r"9 parameters do not belong .*model\.layers\.2\."):
        load_model(folder)


# Weights that a model would leave out.


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # the configuration has none
        "model.layers.1.self_attn.q_norm.weight",  # of another architecture
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_weight_that_would_not_be_used(folder: Path, name: str) -> None:
    edit_weights(folder, lambda weights: weights.update({name: torch.ones(8)}))
    with pytest.raises(DamagedModelError, match=f"1 parameters do not belong.* {name}$"):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.bias",  # the causal mask of old versions
        "visual.blocks.0.attn.qkv.weight",
        "score.weight",
    ],
)
def test_weights_that_change_no_answer_are_allowed(folder: Path, name: str) -> None:
    edit_weights(folder, lambda weights: weights.update({name: torch.ones(8)}))
    load_model(folder)


# Pipelines.

OMNI: dict[str, tuple[Callable[[Path], Path], type[Qwen3Omni] | type[Qwen25Omni]]] = {
    "qwen3": (save_qwen3, Qwen3Omni),
    "qwen2.5": (save_qwen25, Qwen25Omni),
}
EACH = pytest.mark.parametrize("name", OMNI)


@pytest.fixture(scope="session")
def omni_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("omni")) for name, (save, _) in OMNI.items()}


@EACH
@pytest.mark.parametrize("part", ["thinker.model.layers", "talker.", "audio_tower", "visual"])
def test_a_pipeline_is_not_randomly_initialized(
    omni_folders: dict[str, Path], tmp_path: Path, name: str, part: str
) -> None:
    folder = Path(shutil.copytree(omni_folders[name], tmp_path / "model"))
    keys = [key for key in sorted(load_file(folder / WEIGHTS)) if part in key]
    missing = next(key for key in keys if ".experts." not in key)
    edit_weights(folder, lambda weights: weights.pop(missing))
    with pytest.raises(DamagedModelError, match=r" 1 parameters are missing: ") as raised:
        OMNI[name][1](folder, "auto", "cpu", OutputCache(0))
    end = missing.split(".")[-2:]  # its prefix has another name in transformers
    assert ".".join(end) in str(raised.value)


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_an_expert_that_lacks_a_matrix(
    omni_folders: dict[str, Path], tmp_path: Path, part: str
) -> None:
    folder = Path(shutil.copytree(omni_folders["qwen3"], tmp_path / "model"))
    missing = f"{part}.model.layers.1.mlp.experts.2.up_proj.weight"
    edit_weights(folder, lambda weights: weights.pop(missing))
    with pytest.raises(DamagedModelError, match=f"experts are missing: {missing}$"):
        Qwen3Omni(folder, "auto", "cpu", OutputCache(0))


@EACH
def test_a_pipeline_s_other_shapes_and_counts(
    omni_folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(omni_folders[name], tmp_path / "model"))
    whole = json.loads((folder / "config.json").read_text())
    text = whole["thinker_config"]["text_config"]
    for change, reason in (
        ({"num_hidden_layers": 0}, "text_config.num_hidden_layers is 0; allowed"),
        (
            {"num_hidden_layers": 9, "layer_types": None},
            r"parameters are missing: thinker\.model\..*layers\.",
        ),
        ({"hidden_size": 51}, "hidden_size is 51, and no tensor"),
        (
            {"num_key_value_heads": 1},
            r"parameters have another shape: thinker\..*\.0\.self_attn\.k_proj",
        ),
    ):
        edit_config(folder, thinker_config=whole["thinker_config"] | {"text_config": text | change})
        with pytest.raises(DamagedModelError, match=reason):
            OMNI[name][1](folder, "auto", "cpu", OutputCache(0))
    edit_config(folder, thinker_config=whole["thinker_config"], enable_audio_output=False)
    with pytest.raises(UnsupportedModelError, match="has no talker"):
        OMNI[name][1](folder, "auto", "cpu", OutputCache(0))


@pytest.mark.parametrize(
    "voices", [b"", b"no file of torch's", {"ada": {"cond": 3}}, [1], {"a": 1}]
)
def test_invalid_voices(omni_folders: dict[str, Path], tmp_path: Path, voices: object) -> None:
    folder = Path(shutil.copytree(omni_folders["qwen2.5"], tmp_path / "model"))
    path = folder / "spk_dict.pt"
    if isinstance(voices, bytes):
        path.write_bytes(voices)
    else:
        torch.save(voices, path)
    with pytest.raises(DamagedModelError, match=r"spk_dict\.pt has no voices"):
        Qwen25Omni(folder, "auto", "cpu", OutputCache(0))
