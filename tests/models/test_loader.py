"""Loading: the returned model, and a clear error for everything that can be wrong."""

import json
import logging
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Phi3Config
from transformers.utils import logging as transformers_logging

from headstart.attention import LayerLayout
from headstart.errors import (
    ConfigError,
    DamagedModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from headstart.models.config_values import context_length
from headstart.models.dense.decoder import DenseDecoder
from headstart.models.loader import load_model
from headstart.models.transformers_backend.decoder import TransformersDecoder
from tests.tiny_models import TINY, VOCABULARY, save_tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def saved_in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    TINY["llama"]().save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_the_loaded_model(saved: Path) -> None:
    model = load_model(saved)
    assert isinstance(model, DenseDecoder)
    assert model.fallback_reason is None
    assert model.layouts == (LayerLayout(2, 8, 8),) * 3
    assert (model.vocab_size, model.max_model_len) == (VOCABULARY, 256)
    assert model.eos_token_ids == {2}
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")


def test_shards_hold_the_same_model(saved: Path, saved_in_shards: Path) -> None:
    assert len(list(saved_in_shards.glob("*.safetensors"))) > 1
    one, many = load_model(saved).module.state_dict(), load_model(saved_in_shards).module
    for name, tensor in many.state_dict().items():
        assert torch.equal(tensor, one[name])


def test_a_gguf_file_next_to_the_weights_is_not_read(saved: Path, folder: Path) -> None:
    """Regression: it was read with the fingerprint of the weights: two models shared K/V."""
    (folder / "model.gguf").write_bytes(b"GGUF of another model")
    assert load_model(folder).fingerprint() == load_model(saved).fingerprint()


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("half", torch.float16)])
def test_the_dtype_is_the_requested_one(saved: Path, name: str, dtype: torch.dtype) -> None:
    assert load_model(saved, dtype=name).dtype == dtype


def test_several_eos_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(folder).eos_token_ids == {2, 7}


def test_loading_prints_nothing_and_changes_no_settings(
    folder: Path, capfd: pytest.CaptureFixture[str], logged: list[logging.LogRecord]
) -> None:
    (folder / "generation_config.json").unlink()
    edit_weights(folder, lambda w: w.update({"model.rotary_inv_freq": torch.zeros(2)}))
    before = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    load_model(folder)
    assert capfd.readouterr() == ("", "")
    assert [record.name for record in logged] == ["headstart.models.loader"]
    after = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    assert after == before


# Fingerprints.


def test_fingerprint_is_by_content(saved: Path, folder: Path) -> None:
    original = load_model(saved).fingerprint()
    assert original == load_model(folder).fingerprint()
    assert len(original) == 64
    edit_weights(folder, lambda w: w["lm_head.weight"][3, 3].add_(1.0))
    assert load_model(folder).fingerprint() != original


def test_fingerprint_of_a_model_in_memory() -> None:
    one, same, other = (TINY[name]() for name in ("llama", "llama", "qwen2"))
    prints = [TransformersDecoder(model, ()).fingerprint() for model in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    with torch.no_grad():
        same.lm_head.weight[3, 3] += 1
    assert TransformersDecoder(same, ()).fingerprint() != prints[0]


# Context lengths.


def test_context_length_stays_where_rotary_frequencies_are_constant() -> None:
    base: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4}
    plain = LlamaConfig(**base, max_position_embeddings=100)
    assert context_length(plain) == 100
    factors = [1.0] * 4
    longrope = Phi3Config(
        **base,
        pad_token_id=0,
        max_position_embeddings=400,
        original_max_position_embeddings=100,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": [2.0] * 4,
        },
    )
    assert context_length(longrope) == 100
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 100,
    }
    stretched = LlamaConfig(**base, max_position_embeddings=100, rope_parameters=yarn)
    assert context_length(stretched) == 400


# Errors of the location.


def test_no_such_folder(tmp_path: Path) -> None:
    for wrong in (tmp_path / "nothing", f"{tmp_path}/nothing", "./nothing", "~/no such model"):
        with pytest.raises(ModelNotFoundError, match=r"there is no folder .*(nothing|no such)"):
            load_model(wrong)


def test_a_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_model(folder / "config.json")


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)


def test_models_in_gguf_are_named_by_their_file(tmp_path: Path) -> None:
    """Regression: the error did not name the allowed values: a folder or a name on the hub."""
    (tmp_path / "some.Q4_0.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"name the file: /.*/some\.Q4_0\.gguf$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("hf.co/owner/name", "did you mean owner/name?"),
        ("https://huggingface.co/owner/name/", "did you mean owner/name?"),
        ("qwen2.5:0.5b", "or OWNER/NAME:Q4_K_M for a GGUF file"),
        ("../owner/name", "there is no folder ../owner/name"),
    ],
)
def test_names_for_other_programs_are_refused_with_advice(name: str, advice: str) -> None:
    """Ollama and llama.cpp download a file of such a name.

    Regression: most names had an error without advice.
    """
    with pytest.raises(ModelNotFoundError) as error:
        load_model(name)
    assert str(error.value).endswith(advice)


def test_hub_name_without_network() -> None:
    with pytest.raises(ModelNotFoundError, match=r"the hub cannot be reached: (?!Got)"):
        load_model("no-such-owner/no-such-model")


def test_a_hub_name_uses_the_network_last(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    calls = []
    repository = ["config.json", "model.safetensors", "tokenizer.model", "1_Pooling/config.json"]
    copies = ["consolidated.safetensors", "original/params.json", "pytorch_model.bin"]

    def download(name: str, **options: Any) -> str:
        calls.append((name, options.get("local_files_only", False)))
        if options.get("local_files_only"):
            raise FileNotFoundError(name)
        some, others = (
            {name for name in repository + copies if any(fnmatch(name, one) for one in patterns)}
            for patterns in (options["allow_patterns"], options["ignore_patterns"])
        )
        assert some - others == {*repository}, "a second copy of the weights"
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", download)
    load_model("owner/name")
    assert calls == [("owner/name", True), ("owner/name", False)]


def test_hub_name_downloaded_before_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, saved: Path
) -> None:
    def download(name: str, **options: Any) -> str:
        assert options["local_files_only"]
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert load_model("owner/name").vocab_size == VOCABULARY


def test_a_name_that_is_not_a_hub_name() -> None:
    with pytest.raises(ModelNotFoundError, match="not a hub name"):
        load_model("what is this?")


# Errors of the files.


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(DamagedModelError, match=r"config\.json is not readable JSON.*line 1"):
        load_model(folder)


@pytest.mark.parametrize("text", ["[1, 2]", '"llama"'])
def test_config_that_is_not_an_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(DamagedModelError, match="allowed: a JSON object"):
        load_model(folder)


def test_config_without_model_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(DamagedModelError, match="has no model_type"):
        load_model(folder)


def test_config_with_a_wrong_value(folder: Path) -> None:
    edit_config(folder, rms_norm_eps="small")
    with pytest.raises(DamagedModelError, match=r"config\.json does not describe a llama"):
        load_model(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DamagedModelError, match="has no weights"):
        load_model(folder)


def test_missing_shard(saved_in_shards: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_in_shards, tmp_path / "model"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(DamagedModelError, match=f"1 of .* are missing: {shard.name}"):
        load_model(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {}}'])
def test_broken_index(saved_in_shards: Path, tmp_path: Path, index: str) -> None:
    folder = Path(shutil.copytree(saved_in_shards, tmp_path / "model"))
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedModelError, match=r"model\.safetensors\.index\.json"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedModelError, match=r"model\.safetensors is truncated or not"):
        load_model(folder)


def test_a_pointer_of_git_lfs_is_reported_as_such(folder: Path) -> None:
    """A clone without Git LFS has these.

    Regression: the errors were "truncated", and "header too large".
    """
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(DamagedModelError, match=r"is a Git LFS pointer .* git lfs pull"):
        load_model(folder)


def test_missing_parameters_are_not_initialized(folder: Path) -> None:
    edit_weights(folder, lambda w: w.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(DamagedModelError, match=r"1 parameters are missing: model\.layers\.1\.mlp"):
        load_model(folder)


def test_a_setting_that_fails_when_the_model_is_built(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "nonesuch", "rope_theta": 1e4})
    with pytest.raises(DamagedModelError, match="cannot be built: KeyError: 'nonesuch'"):
        load_model(folder)


def test_weights_of_another_width(folder: Path) -> None:
    edit_config(folder, intermediate_size=96)
    with pytest.raises(DamagedModelError, match=r"have another shape: .* is \[80, 48\] and not"):
        load_model(folder)


# Errors of the architecture, or of the call.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "nonesuch"}, r"'nonesuch' is not one of transformers' .*unknown"),
        ({"model_type": "nonesuch", "auto_map": {}}, "custom code, which is not run"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": "qwen2_5_omni"}, "generates speech; use Omni or headstart serve"),
        ({"model_type": "t5", "d_kv": 8}, "is an encoder-decoder"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
    ],
)
def test_unknown_and_unsupported(folder: Path, changes: dict[str, Any], reason: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder)


def test_wrong_options(saved: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: auto, float32"):
        load_model(saved, dtype="int8")
    with pytest.raises(ConfigError, match="device is 'toaster'"):
        load_model(saved, device="toaster")
