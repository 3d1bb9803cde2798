"""PEFT's files are read strictly: an adapter that cannot be applied whole is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import (
    AdapterError,
    AdapterNotFoundError,
    DamagedAdapterError,
    UnsupportedAdapterError,
)
from headstart.models.decoder import DecoderModel
from headstart.models.loader import load_model
from headstart.models.lora_files import read_weights
from tests.tiny_adapters import make_adapter
from tests.tiny_models import save_tiny

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Sample:
    """A loaded model and a correct adapter for it; tests damage copies of it."""

    def __init__(self, folder: Path) -> None:
        self.base = save_tiny("llama", folder / "llama")
        self.model: DecoderModel = load_model(self.base)
        self.path = make_adapter(self.base, folder / "adapter", use_rslora=True)
        self.digest = self.read(self.path)

    def read(self, path: Path, max_rank: int = 64) -> str:
        return read_weights(path, self.model, max_rank).digest

    def copy(
        self,
        folder: Path,
        config: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> Path:
        """Return a copy of the adapter with some fields and tensors changed."""
        shutil.copytree(self.path, folder)
        content = json.loads((folder / CONFIG).read_text()) | (config or {})
        (folder / CONFIG).write_text(json.dumps(content))
        if tensors is not None:
            save_file(tensors(load_file(folder / WEIGHTS)), folder / WEIGHTS)
        return folder


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ({"peft_type": "IA3"}, UnsupportedAdapterError, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, UnsupportedAdapterError, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, UnsupportedAdapterError, "use_dora is True"),
        ({"bias": "lora_only"}, UnsupportedAdapterError, "bias is 'lora_only'"),
        ({"lora_bias": True}, UnsupportedAdapterError, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedAdapterError, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, UnsupportedAdapterError, "layer_replication"),
        ({"trainable_token_indices": [3]}, UnsupportedAdapterError, "trainable_token_indices"),
        ({"alora_invocation_tokens": [3]}, UnsupportedAdapterError, "alora_invocation_tokens"),
        ({"target_parameters": ["experts"]}, UnsupportedAdapterError, "target_parameters"),
        ({"of_a_later_peft": 1}, UnsupportedAdapterError, "of_a_later_peft is 1"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedAdapterError, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, UnsupportedAdapterError, "olora"),
        ({"target_modules": None}, UnsupportedAdapterError, "has no target_modules"),
        ({"r": 65}, UnsupportedAdapterError, r"rank 65 \(r\) is above max_lora_rank, .* 64"),
        ({"r": 0}, DamagedAdapterError, "r is 0"),
        ({"r": True}, DamagedAdapterError, "'r' expected int, got bool"),
        ({"lora_alpha": "8"}, DamagedAdapterError, "lora_alpha"),
        ({"lora_alpha": float("nan")}, DamagedAdapterError, "lora_alpha is nan"),
        ({"use_rslora": "yes"}, DamagedAdapterError, "use_rslora"),
        ({"rank_pattern": {"(": 4}}, DamagedAdapterError, r"'\(' is not a regular expression"),
        ({"rank_pattern": [4]}, DamagedAdapterError, "rank_pattern"),
        ({"target_modules": "(q_proj"}, DamagedAdapterError, "regular expression"),
        ({"target_modules": [1]}, DamagedAdapterError, "target_modules"),
        ({"layers_to_transform": ["1"]}, DamagedAdapterError, "layers_to_transform"),
        ({"r": 5}, DamagedAdapterError, r"\[4, 48\] and \[48, 4\]; .* requires rank 5"),
        ({"rank_pattern": {"q_proj": 2}}, DamagedAdapterError, "requires rank 2"),
        ({"target_modules": ["q_proj"]}, DamagedAdapterError, "v_proj.*does not name"),
        ({"exclude_modules": ["v_proj"]}, DamagedAdapterError, "v_proj.*does not name"),
        ({"layers_to_transform": [0, 1]}, DamagedAdapterError, r"layers\.2.*does not name"),
        ({"target_modules": "all-linear"}, DamagedAdapterError, "lacks the matrices of .*12 more"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    sample: Sample, tmp_path: Path, config: dict[str, Any], error: type[AdapterError], reason: str
) -> None:
    path = sample.copy(tmp_path / "copy", config)
    with pytest.raises(error, match=reason):
        sample.read(path)


def drop(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "error", "reason"),
    [
        (drop(f"{Q0}.lora_A.weight"), DamagedAdapterError, "one of the two matrices of model"),
        (lambda _: {}, DamagedAdapterError, "has no matrices"),
        (
            put(f"{Q0}.lora_A.weight", torch.ones(4, 47)),
            UnsupportedAdapterError,
            "47 inputs and 48",
        ),
        (put(f"{Q0}.lora_A.weight", torch.ones(48)), DamagedAdapterError, "requires rank 4"),
        (
            put(f"{Q0}.lora_A.weight", torch.ones(4, 48, dtype=torch.int32)),
            UnsupportedAdapterError,
            "int32",
        ),
        (
            put(f"{Q0}.lora_B.weight", torch.full((48, 4), torch.inf)),
            DamagedAdapterError,
            "not finite in torch.float32",
        ),
        (
            put(f"{Q0}.lora_magnitude_vector", torch.ones(48)),
            UnsupportedAdapterError,
            "lora_magnitude_vector, which is neither A nor B",
        ),
        (
            put("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", torch.ones(4, 4)),
            UnsupportedAdapterError,
            "another model.*layers.3",
        ),
        (
            put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 131)),
            UnsupportedAdapterError,
            "lora_embedding_A",
        ),
        (
            put("base_model.model.lm_head.base_layer.weight", torch.ones(131, 48)),
            UnsupportedAdapterError,
            "lm_head.base_layer",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    sample: Sample, tmp_path: Path, tensors: Any, error: type[AdapterError], reason: str
) -> None:
    path = sample.copy(tmp_path / "copy", tensors=tensors)
    with pytest.raises(error, match=reason):
        sample.read(path)


def test_missing_and_broken_files(sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="is not a folder"):
        sample.read(tmp_path / "nowhere")
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_config\.json"):
        sample.read(tmp_path)
    path = sample.copy(tmp_path / "copy")
    whole = (path / WEIGHTS).read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (path / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(DamagedAdapterError, match="truncated or not a safetensors file"):
            sample.read(path)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    with pytest.raises(DamagedAdapterError, match=r"_model\.safetensors; .* not read .*\.bin"):
        sample.read(path)
    for text, reason in (("{", "not readable JSON"), ("[]", "is a list")):
        (path / CONFIG).write_text(text)
        with pytest.raises(DamagedAdapterError, match=reason):
            sample.read(path)


def test_an_adapter_of_another_model_is_refused(sample: Sample, tmp_path: Path) -> None:
    other = save_tiny("gpt2", tmp_path / "gpt2")
    path = make_adapter(other, tmp_path / "adapter", target_modules=["c_attn"])
    with pytest.raises(UnsupportedAdapterError, match=r"for another model.*c_attn"):
        sample.read(path)


def test_identity_depends_on_the_effect_of_the_adapter(sample: Sample, tmp_path: Path) -> None:
    """It depends on scale and weights, not on name, place, base name or training."""
    same: dict[str, Any] = {"lora_dropout": 0.5, "base_model_name_or_path": "x", "revision": "y"}
    assert sample.read(sample.copy(tmp_path / "same", same)) == sample.digest
    spelt = {"target_modules": r".*\.(q|v)_proj", "use_rslora": False, "lora_alpha": 16}
    assert (
        sample.read(sample.copy(tmp_path / "spelt", spelt)) == sample.digest
    )  # 16 / 4 = 8 / sqrt(4)
    one = next(iter(load_file(sample.path / WEIGHTS)))

    def nudged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[one].view(-1)[5] = tensors[one].view(-1)[5].nextafter(torch.tensor(9.0))
        return tensors

    others = [
        sample.read(sample.copy(tmp_path / "alpha", {"lora_alpha": 9})),
        sample.read(sample.copy(tmp_path / "plain", {"use_rslora": False})),
        sample.read(sample.copy(tmp_path / "pattern", {"alpha_pattern": {"layers.2.*": 1}})),
        sample.read(sample.copy(tmp_path / "nudged", tensors=nudged)),
    ]
    assert len({sample.digest, *others}) == 5


def test_a_file_that_is_overwritten_after_reading_changes_nothing(
    sample: Sample, tmp_path: Path
) -> None:
    path = sample.copy(tmp_path / "copy")
    weights = read_weights(path, sample.model, 64)
    before = {name: pair.down.clone() for name, pair in weights.pairs.items()}
    size = (path / WEIGHTS).stat().st_size
    with (path / WEIGHTS).open("r+b") as file:
        file.write(b"\0" * size)
    assert all(torch.equal(weights.pairs[name].down, down) for name, down in before.items())


# Any content of the files gives an AdapterError, or none.

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = ["r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]
FIELDS += ["layers_to_transform", "layers_pattern", "use_rslora", "bias", "peft_type", "task_type"]
FIELDS += ["init_lora_weights", "of_a_later_peft"]


@FUZZ
@example(text=b"[" * 100_000)
@example(text=b'{"a":' * 100_000)
@example(text=b"1" * 5000)
@given(text=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_in_place_of_the_configuration(sample: Sample, text: bytes) -> None:
    path = sample.path / CONFIG
    whole = path.read_bytes()
    try:
        path.write_bytes(text)
        with pytest.raises(AdapterError):
            sample.read(sample.path)
    finally:
        path.write_bytes(whole)


@FUZZ
@example(name="lora_alpha", value=10**400)
@example(name="alpha_pattern", value={"q_proj": 10**400})
@example(name="r", value=10**400)
@given(name=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_the_configuration(sample: Sample, name: str, value: object) -> None:
    path = sample.path / CONFIG
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps(json.loads(whole) | {name: value}))
        try:
            assert len(sample.read(sample.path)) == 64
        except AdapterError:
            return
    finally:
        path.write_bytes(whole)


@FUZZ
@given(data=st.data())
def test_any_header_in_the_weight_file(sample: Sample, data: st.DataObject) -> None:
    path = sample.path / WEIGHTS
    whole = path.read_bytes()
    header = bytearray(whole[: 8 + int.from_bytes(whole[:8], "little")])
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(bytes(header) + whole[len(header) :])
        try:
            assert len(sample.read(sample.path)) == 64
        except AdapterError:
            return
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "dtype", ["F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "C64", "BOOL", "U16", "X"]
)
def test_other_dtypes_are_refused(sample: Sample, tmp_path: Path, dtype: str) -> None:
    """Some exist in the file format but not in headstart, or not in torch."""
    path = sample.copy(tmp_path / "copy")
    whole = (path / WEIGHTS).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for entry in header.values():
        if "dtype" in entry:
            entry["dtype"] = dtype
            start, end = entry["data_offsets"]
            size = {"F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "U16": 2, "C64": 8}.get(dtype, 0)
            entry["shape"] = [(end - start) // size] if size else [2 * (end - start)]
    changed = json.dumps(header).encode()
    data = whole[8 + length :]
    (path / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + data)
    with pytest.raises(AdapterError):
        sample.read(path)
