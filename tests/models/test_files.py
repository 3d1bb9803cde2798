"""A checkpoint's files: places of weights, and clear errors for any content."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headstart.errors import DamagedModelError, ModelError
from headstart.models.files import check_files
from headstart.models.loader import load_model
from tests.tiny_models import TINY, save_tiny, tiny_config

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    TINY["llama"]().save_pretrained(folder, max_shard_size="40KB")
    return folder


def test_an_index_with_files_outside_its_folder_is_refused(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = json.loads((folder / INDEX).read_text())
    first, shard = next(iter(index["weight_map"].items()))
    outside = tmp_path / "outside.safetensors"
    shutil.copy(folder / shard, outside)
    inside = "C:\\x.safetensors", "\\x", 7, None, [shard], {}, ""
    for name in ("../outside.safetensors", str(outside), "a/../../outside.safetensors", *inside):
        changed = index | {"weight_map": index["weight_map"] | {first: name}}
        (folder / INDEX).write_text(json.dumps(changed))
        with pytest.raises(
            DamagedModelError, match="allowed: a file in the folder of the index"
        ) as raised:
            load_model(folder)
        assert first in str(raised.value) and repr(name) in str(raised.value)


def test_links_and_folders_inside_are_followed(sharded: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = json.loads((folder / INDEX).read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    (folder / shard).rename(tmp_path / "blob")
    (folder / "sub").mkdir()
    (folder / "sub" / shard).symlink_to(tmp_path / "blob")
    moved = {k: f"sub/{v}" if v == shard else v for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": moved}))
    assert load_model(folder).vocab_size == tiny_config("llama").vocab_size


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0.safetensors", "\ud800.safetensors"])
def test_impossible_file_names(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(DamagedModelError, match="1 of 1 weight files are missing"):
        load_model(folder)


# Any content of the files gives an error of headstart, or none.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", INDEX])
@FUZZ
@example(DEEP.encode())
@example(b'{"a":' * 900 + b"1" + b"}" * 900)
@example(b"\xff\xfe{}")
@example(b"1" * 5000)
@given(text=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_in_place_of_a_json_file(sharded: Path, name: str, text: bytes) -> None:
    path = sharded / name
    whole = path.read_bytes()
    try:
        path.write_bytes(text)
        with pytest.raises(ModelError):
            load_model(sharded)
    finally:
        path.write_bytes(whole)


@FUZZ
@example(name="dtype", value=[[]])
@given(
    name=st.sampled_from(sorted(tiny_config("llama").to_dict())),
    value=JSON | st.sampled_from([0, -1, 7, 10**9, 10**20, "eager", {"rope_type": "yarn"}]),
)
def test_any_value_in_a_configuration(saved: Path, name: str, value: object) -> None:
    path = saved / "config.json"
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps(json.loads(whole) | {name: value}))
        try:
            model = load_model(saved)
        except ModelError:
            return
        assert model.layouts and model.max_model_len > 0
    finally:
        path.write_bytes(whole)


@FUZZ
@given(data=st.data())
def test_any_header_in_a_weight_file(saved: Path, data: st.DataObject) -> None:
    path = saved / WEIGHTS
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = bytearray(whole[: 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(header) - 1))
        header[place] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(bytes(header) + whole[8 + length :])
        try:
            load_model(saved)
        except ModelError:
            return
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "mlp.up_proj.bias"])
def test_integers_for_weights_are_refused(
    saved: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """transformers casts them to floats, without their scales."""
    folder, name = shutil.copytree(saved, tmp_path / "model"), f"model.layers.1.{name}"
    weights = load_file(folder / WEIGHTS)
    weights[name] = torch.zeros(weights.get(name, torch.zeros(80)).shape, dtype=dtype)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        DamagedModelError, match=f"{name} has the integer dtype .*no quantization_config"
    ):
        load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    quantized = {"part": config | {"quantization_config": {"quant_method": "gptq"}}}
    (folder / "config.json").write_text(json.dumps(quantized))
    check_files(folder)


def test_masks_and_positions_may_be_integers(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    masks = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "embeddings.position_ids": torch.arange(4),
    }
    save_file(load_file(folder / WEIGHTS) | masks, folder / WEIGHTS, {"format": "pt"})
    check_files(folder)
