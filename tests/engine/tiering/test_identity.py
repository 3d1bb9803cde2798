"""Titles of models, and the files that determine their fingerprints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart import LLM, SamplingParams
from headstart.attention import PagedKVMemory
from headstart.engine import parts
from headstart.engine.config import EngineConfig
from headstart.engine.parts import _kinds, _name, _quantized_layers
from headstart.models import decoder
from headstart.models.files import BUILT_IN, find_folder
from headstart.models.loader import load_model
from headstart.native import avx2_library
from headstart.tiers.contents import read_models
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_models import TINY
from tests.weights.stored import quantized_matrices


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (Path("/cache/models--Qwen--Qwen2.5-0.5B/snapshots/0123abcd"), "Qwen/Qwen2.5-0.5B"),
        (Path("/models/mine"), "mine"),
        (find_folder(BUILT_IN), BUILT_IN),
        (None, "a model in memory"),
    ],
)
def test_a_model_has_its_usual_name(folder: Path | None, name: str) -> None:
    assert _name(folder) == name


def test_a_model_in_gguf_has_its_file_s_name(tmp_path: Path) -> None:
    """Regression: it had the name of its cached folder: some.Q4_1-d094b70c07dc."""
    (tmp_path / "some.Q4_1.gguf").touch()
    folder = tmp_path / "some.Q4_1-d094b70c07dc"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(tmp_path / "some.Q4_1.gguf")
    assert _name(folder) == "some.Q4_1.gguf"


def test_kinds_of_one_model_have_different_titles(tmp_path: Path) -> None:
    """Regression: lines of `headstart cache ls` differed only in the fingerprint."""
    model, cache_dir = save_smallest(tmp_path / "model"), str(tmp_path / "kept")
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"weights": "int8"},
        {"weights": "int4", "kv_cache_dtype": "int8"},
        {"deterministic": True},
        {"block_size": 8},
    ]
    for kind in kinds:
        llm = make_llm(model, cache_dir=cache_dir, **kind)
        llm.generate([list(range(3, 43))], SamplingParams(max_tokens=1), use_tqdm=False)
        llm.close()
    assert sorted(state.model.record.title for state in read_models(Path(cache_dir))) == [
        "model (bfloat16)",
        "model (float32)",
        "model (float32, blocks of 8)",
        "model (float32, deterministic)",
        "model (float32, int4 weights, int8 K/V)",
        "model (float32, int8 weights)",
    ]


def test_a_few_rounded_layers_do_not_change_the_title(tmp_path: Path) -> None:
    """Rounding the head alone does not change the title of a file that is already quantized."""
    model = load_model(save_smallest(tmp_path), "float32", weights="int8")
    layers = [*quantized_matrices(model.module).values()]
    about = (model, PagedKVMemory(model.layouts, 1, 16, torch.float32, "cpu"), EngineConfig())
    assert _kinds(*about) == ["float32", "int8 weights"]
    for layer in layers[1:]:
        layer.is_prequantized = True
    assert _kinds(*about) == ["float32"]


def fingerprint(llm: LLM) -> str:
    model = llm.engine.manager.hasher.model
    llm.close()
    return model


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start or dtype reuses the digest; other bytes under the same name are read again."""
    read: list[Path] = []
    original = decoder.fingerprint_files

    def count(folder: Path) -> str:
        read.append(folder)
        return original(folder)

    monkeypatch.setattr(decoder, "fingerprint_files", count)
    model, cache_dir = save_smallest(tmp_path / "model"), str(tmp_path / "kept")
    first = fingerprint(make_llm(model, cache_dir=cache_dir))
    assert fingerprint(make_llm(model, cache_dir=cache_dir)) == first
    other = fingerprint(make_llm(model, cache_dir=cache_dir, dtype="bfloat16"))
    assert other != first and len(read) == 1
    weights = model / "model.safetensors"
    state = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1  # the lowest bit of a weight
    weights.write_bytes(data)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert fingerprint(make_llm(model, cache_dir=cache_dir)) != first, "size and times are the same"
    assert len(read) == 2


def test_deterministic_blocks_depend_on_the_products(
    tmp_path: Path, use_kernels: Callable[..., None]
) -> None:
    """Kernels multiply weights in bfloat16 under float32 in another order."""
    if avx2_library() is None:
        pytest.skip("no compiled kernels for AVX2 here")
    TINY["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for deterministic in (True, False):
        fingerprints = []
        for switch in ("1", "0"):
            use_kernels(switch)
            options = {"cache_dir": str(tmp_path / "kept"), "deterministic": deterministic}
            fingerprints.append(fingerprint(make_llm(tmp_path / "model", **options)))
        assert (fingerprints[0] == fingerprints[1]) is not deterministic


@pytest.mark.parametrize("weights", ["int8", "int5", "int4"])
def test_blocks_depend_on_the_rounding_of_rows(
    weights: str, tmp_path: Path, use_kernels: Callable[..., None]
) -> None:
    """Regression: a prefix that was stored without the kernels was hit with them.

    Compiled products round rows to 8 bits, so their logits differ by a hundredth from those of
    other products.
    """
    if avx2_library() is None:
        pytest.skip("no compiled kernels for AVX2 here")
    model, fingerprints = save_smallest(tmp_path / "model"), []
    for switch in ("1", "0"):
        use_kernels(switch)
        options = {"cache_dir": str(tmp_path / "kept"), "weights": weights}
        fingerprints.append(fingerprint(make_llm(model, **options)))
    assert fingerprints[0] != fingerprints[1]


def test_blocks_depend_on_the_rounding_and_the_reader_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared embedding counts too, since K and V are computed from its rows."""
    config = TINY["llama"]().config
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, weights="int8")
    layers = [*quantized_matrices(model.module).values()]
    seen = [_quantized_layers(model)]
    assert len(seen[0]) == len(layers) + 1, "the embedding shares the head's weight"
    monkeypatch.setitem(parts.REVISIONS, "int8", 1000)
    seen.append(_quantized_layers(model))
    for layer in layers:
        layer.is_prequantized = True
    seen.append(_quantized_layers(model))
    monkeypatch.setattr(parts, "PREQUANTIZED_REVISION", 1000)
    seen.append(_quantized_layers(model))
    for lines in zip(*seen, strict=True):
        assert len({*lines}) == 4


def test_deterministic_blocks_depend_on_the_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a prefix computed by oneDNN with AVX2 alone was hit without that cap.

    Its bits differ.
    """
    model, fingerprints = save_smallest(tmp_path / "model"), []
    for cap in ("", "AVX2"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
        fingerprints.append(
            fingerprint(make_llm(model, cache_dir=str(tmp_path / "kept"), deterministic=True))
        )
    assert fingerprints[0] != fingerprints[1]


def test_stored_fingerprints_may_be_damaged(tmp_path: Path) -> None:
    model, cache_dir = save_smallest(tmp_path / "model"), tmp_path / "kept"
    first = fingerprint(make_llm(model, cache_dir=str(cache_dir)))
    for damage in ("", "[]", "{", '{"a": 7}', "\0" * 99):
        (cache_dir / "fingerprints.json").write_text(damage)
        assert fingerprint(make_llm(model, cache_dir=str(cache_dir))) == first
