"""The checkpoints that headstart's modules load, and the treatment of all others."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from headstart.errors import DamagedModelError, OutOfMemoryError, UnsupportedModelError
from headstart.models import dtypes
from headstart.models.dense.decoder import DenseDecoder
from headstart.models.dense.loader import read_config
from headstart.models.dense.modules import read_frequencies
from headstart.models.families import FAMILIES
from headstart.models.loader import load_model
from headstart.models.shapes import read_shape
from headstart.native import avx2_library
from headstart.weights.bf16 import Bf16Weight
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.scheme import UnsupportedLayerError
from tests.forked import run_program
from tests.tiny_models import TINY, save_tiny, tiny_config, tiny_model
from tests.weights.stored import matrix_of

WEIGHTS = "model.safetensors"
LIBRARY = avx2_library()


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", TINY)
def test_the_families_of_the_table_and_no_others(
    name: str, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    model = load_model(save_tiny(name, tmp_path))
    assert not logged
    assert isinstance(model, DenseDecoder) == (tiny_config(name).model_type in FAMILIES)
    assert (model.fallback_reason is None) == isinstance(model, DenseDecoder)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & TINY.keys()))
def test_widths_and_names_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    own = load_model(save_tiny(name, tmp_path))
    theirs = TINY[name]()
    linears = {
        module_name: (module.in_features, module.out_features)
        for module_name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert own.linear_widths() == linears
    for module_name in linears:
        assert torch.equal(own.weight(module_name), theirs.get_submodule(module_name).weight)
    assert own.weight("model.embed_tokens").shape == (131, 48)
    assert own.weight("model.nothing") is None


def as_a_base_model(folder: Path) -> None:
    edit_weights(
        folder,
        lambda weights: [
            weights.update({name.removeprefix("model."): weights.pop(name)})
            for name in list(weights)
            if name.startswith("model.")
        ],
    )


def in_torch_s_format(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def with_a_tensor_twice(folder: Path) -> None:
    """Store a tensor in both files of an index, which names one of them."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    other = {"model.norm.weight": weights["model.norm.weight"]}
    save_file(weights, folder / "a.safetensors", metadata={"format": "pt"})
    save_file(other, folder / "b.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(weights, "a.safetensors") | dict.fromkeys(other, "b.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_a_tensor_twice, r"model\.norm\.weight is in a\.safetensors and b\.safetensors"),
        (as_a_base_model, r"has no model\.embed_tokens\.weight"),
        (in_torch_s_format, "not in safetensors files"),
        (
            lambda folder: edit_weights(folder, lambda w: w.update({"a.bias": torch.ones(2)})),
            r"has a\.bias, which its family",
        ),
    ],
)
def test_unusual_checkpoints_run_through_transformers_with_a_warning(
    change: Callable[[Path], None], reason: str, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    """Regression: the reason for a slow model was logged at a level that is not shown."""
    folder = save_tiny("llama", tmp_path)
    change(folder)
    model = load_model(folder)
    assert not isinstance(model, DenseDecoder)
    assert model.fallback_reason is not None
    assert re.search(reason, model.fallback_reason)
    [message] = [record.getMessage() for record in logged]
    assert message.startswith(f"{folder} runs in transformers' modules, not in headstart's: ")
    assert message.endswith(model.fallback_reason)


def test_a_tied_head_may_stand_in_the_file_if_it_is_the_embedding(tmp_path: Path) -> None:
    config = LlamaConfig(**tiny_config("llama").to_dict() | {"tie_word_embeddings": True})
    tiny_model(config).save_pretrained(tmp_path)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    edit_weights(tmp_path, lambda w: w.update({head: w[embedding].clone()}))
    assert isinstance(load_model(tmp_path), DenseDecoder)
    edit_weights(tmp_path, lambda w: w[head][3].add_(1))
    reason = load_model(tmp_path).fallback_reason
    assert reason is not None
    assert "but differs from its embedding" in reason
    # torch compares no float8 with a float: its RuntimeError reached the caller.
    edit_weights(tmp_path, lambda w: w.update({head: w[embedding].to(torch.float8_e4m3fn)}))
    assert "F8_E4M3" in (load_model(tmp_path).fallback_reason or "")


def test_an_infinite_factor_stretches_nothing(tmp_path: Path) -> None:
    """Regression: an OverflowError reached the caller."""
    folder = save_tiny("llama", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308}
    yarn["original_max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(content | {"rope_parameters": yarn}))
    assert load_model(folder).max_model_len == content["max_position_embeddings"]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_scale_of_angles_that_is_not_finite_is_of_no_family(factor: float) -> None:
    """Regression: every answer was NaN."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": factor}
    yarn["original_max_position_embeddings"] = 64
    content = tiny_config("llama").to_dict() | {"rope_parameters": yarn}
    config = read_config(FAMILIES["llama"], content)
    with pytest.raises(UnsupportedLayerError, match="are scaled by"):
        read_frequencies(config, "", read_shape(FAMILIES["llama"], config))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(name: str, dtype: str, value: float, tmp_path: Path) -> None:
    """Regression: the error suggested another dtype, which changes nothing."""
    folder = save_tiny("llama", tmp_path)
    edit_weights(folder, lambda w: w[name].view(-1)[-1:].fill_(value))
    message = f"{name} has weights that are not finite in the file itself"
    for weights in ("auto", "int8"):
        with pytest.raises(DamagedModelError, match=message):
            load_model(folder, dtype, weights=weights)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_damaged_embedding_is_named_as_in_the_file(saved: torch.dtype, tmp_path: Path) -> None:
    """Regression: with a shared LM head the error named the head, which is not in the file."""
    config = LlamaConfig(**tiny_config("llama").to_dict() | {"tie_word_embeddings": True})
    tiny_model(config).to(saved).save_pretrained(tmp_path)
    name = "model.embed_tokens.weight"
    edit_weights(tmp_path, lambda w: w[name].view(-1)[-1:].fill_(float("nan")))
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(DamagedModelError, match=f"{name} has weights that are not finite in"):
            load_model(tmp_path, dtype)


def test_large_weights_are_finite_where_their_dtype_holds_them(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    edit_weights(folder, lambda w: w["lm_head.weight"].fill_(3e38))
    assert isinstance(load_model(folder, "float32"), DenseDecoder)
    with pytest.raises(UnsupportedModelError, match=r"not finite in torch\.float16"):
        load_model(folder, "float16")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_weights_that_bfloat16_makes_infinite_are_refused(name: str, tmp_path: Path) -> None:
    """Regression: with packing kernels, weights were checked before they were rounded."""
    folder = save_tiny("llama", tmp_path)
    edit_weights(folder, lambda w: w[f"{name}.weight"].fill_(3.4e38))
    with pytest.raises(UnsupportedModelError, match=rf"{name}.* not finite in torch\.bfloat16"):
        load_model(folder, "bfloat16")


@pytest.mark.parametrize("weights", ["int8", "int5", "int4"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_weights_too_large_to_be_quantized_are_refused(
    name: str, weights: str, tmp_path: Path
) -> None:
    """Regression: with scales near the largest float, int4 made infinite weights."""
    folder = save_tiny("llama", tmp_path)
    edit_weights(folder, lambda w: w[f"{name}.weight"][3, 5:7].fill_(3e38))
    kind = "int8" if name == "lm_head" else "int5" if weights == "int4" else weights
    with pytest.raises(UnsupportedModelError, match=rf"{name}\.weight .* too large for {kind};"):
        load_model(folder, "float32", weights=weights)
    edit_weights(folder, lambda w: w[f"{name}.weight"][3, 5:7].fill_(1e25))
    weight = load_model(folder, "float32", weights=weights).weight(name)
    assert weight is not None and torch.isfinite(weight).all()


@pytest.mark.parametrize("weights", ["auto", "int8", "int5", "int4"])
def test_weights_of_64_bits_that_are_too_large(weights: str, tmp_path: Path) -> None:
    """Regression: with quantization they were loaded, and every logit was NaN."""
    folder, name = save_tiny("llama", tmp_path), "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, lambda w: w.update({name: w[name].double().fill_(1e300)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} has weights that are not finite"):
        load_model(folder, "float32", weights=weights)


def test_weights_in_bfloat16_stay_so_under_float32(
    tmp_path: Path, use_kernels: Callable[..., None]
) -> None:
    """They do if the CPU has AVX2 and the kernels are built; the numbers are equal everywhere."""
    TINY["qwen3"]().to(torch.bfloat16).save_pretrained(tmp_path)
    own = load_model(tmp_path, "float32")
    use_kernels("0")
    plain = load_model(tmp_path, "float32")
    name = "model.layers.1.mlp.down_proj"
    halved = [isinstance(matrix_of(model.layer(name)), Bf16Weight) for model in (own, plain)]
    assert halved == [LIBRARY is not None, False]
    assert own.dtype == plain.dtype == torch.float32
    assert own.linear_widths() == plain.linear_widths()
    for part in (name, "lm_head", "model.embed_tokens"):
        assert torch.equal(own.weight(part), plain.weight(part))


def test_a_lack_of_memory_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path)
    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", lambda *_: torch.empty(1 << 50))  # a PiB
    with pytest.raises(OutOfMemoryError, match="not enough memory for the model in"):
        load_model(folder)


@pytest.mark.parametrize("place", ["loader.read_shape", "loader._read_plain"])
def test_a_configuration_without_memory_for_it_is_not_another_family_s(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the model ran in transformers, and a GGUF file was refused as unreadable."""
    monkeypatch.setattr(f"headstart.models.dense.{place}", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        load_model(save_tiny("llama", tmp_path))


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    """They are copies: truncating the file ends no process that has loaded it."""
    folder = save_tiny("llama", tmp_path)
    model = load_model(folder)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    (folder / WEIGHTS).write_bytes(b"")
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, before[name])


MEASURE = """
import sys
from headstart.models.loader import load_model
def now(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind): return int(line.split()[1])
import torch
torch.set_num_threads(1)
load_model(sys.argv[1], sys.argv[3])  # what is imported at first use
start = now("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
model = load_model(sys.argv[2], sys.argv[3])
print(now("VmHWM:") - start, now("VmRSS:") - start)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    base = tiny_config("llama").to_dict()
    wide = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    config = LlamaConfig(**base | wide | {"head_dim": 128})
    tiny_model(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_in_memory_twice(dtype: str, large: Path, tmp_path: Path) -> None:
    """Compare peak resident memory with what remains; mapped pages of the file count too."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not report a process's peak")
    small = save_tiny("llama", tmp_path / "small")
    done = run_program(MEASURE, small, large, dtype)
    assert done.returncode == 0, done.stderr
    most, stays = map(int, done.stdout.split())
    assert stays > 100_000  # KiB
    assert most <= 1.15 * stays


def test_files_that_are_replaced_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model could mix two files, or its K/V could have the name of another one."""
    folder, other = save_tiny("llama", tmp_path / "a"), tmp_path / "b"
    shutil.copytree(folder, other)
    edit_weights(other, lambda w: w["lm_head.weight"].add_(1))
    release = SafetensorsCheckpoint.release

    def replace(self: SafetensorsCheckpoint) -> None:
        release(self)
        if (other / WEIGHTS).exists():
            (other / WEIGHTS).replace(folder / WEIGHTS)

    monkeypatch.setattr(SafetensorsCheckpoint, "release", replace)
    with pytest.raises(DamagedModelError, match="changed while they were read"):
        load_model(folder)
    assert isinstance(load_model(folder), DenseDecoder)


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(b""), lambda p: p.unlink()])
def test_files_that_are_damaged_while_they_are_read(
    change: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path)
    release = SafetensorsCheckpoint.release

    def damage(self: SafetensorsCheckpoint) -> None:
        release(self)
        change(folder / WEIGHTS) if (folder / WEIGHTS).exists() else None

    monkeypatch.setattr(SafetensorsCheckpoint, "release", damage)
    with pytest.raises(DamagedModelError, match="cannot be read"):
        load_model(folder)


def test_weights_whose_files_were_replaced_later_have_no_fingerprint(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    model, same = load_model(folder), load_model(folder)
    fingerprint = same.fingerprint()
    edit_weights(folder, lambda w: w["lm_head.weight"].add_(1))
    assert not model.has_original_files
    assert model.fingerprint() not in (fingerprint, load_model(folder).fingerprint())
    assert same.fingerprint() == fingerprint


def test_matrices_determine_the_dtype_without_a_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is slow in bfloat16; norms may be wider than matrices."""
    TINY["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({n: x.float() for n, x in w.items() if x.dim() < 2}))
    path = tmp_path / "config.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if "dtype" not in k}
    path.write_text(json.dumps(content))
    monkeypatch.setattr(dtypes, "multiplies_bfloat16", lambda: False)
    model = load_model(tmp_path)
    assert isinstance(getattr(model.layer("lm_head"), "matrix", None), Bf16Weight) == (
        LIBRARY is not None
    )
