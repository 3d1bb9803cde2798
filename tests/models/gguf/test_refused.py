"""GGUF files that are damaged, or would be read wrongly, are refused with a reason."""

import errno
import logging
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headstart.errors import DamagedModelError, ModelError, OutOfMemoryError, UnsupportedModelError
from headstart.models.loader import load_model
from headstart.weights import gguf as checkpoint
from headstart.weights.format import Embedding, Linear
from tests.models.gguf.files import BASE, make_model, write_gguf


def metadata(*parts: bytes, keys: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, keys) + b"".join(parts)


KEY = struct.pack("<Q", 1) + b"x"
HEADERS = {
    "bytes past the end": (metadata(KEY, struct.pack("<IIQ", 9, 0, 1 << 21)), "bytes before"),
    "numbers without end": (metadata(KEY, struct.pack("<IIQ", 9, 6, 1 << 60)), "elements, more"),
    "no end of empty arrays": (metadata(KEY, struct.pack("<IIQ", 9, 9, 1 << 60)), "elements, more"),
    "a long text": (metadata(KEY, struct.pack("<IQ", 8, 1 << 62)), "before the file's end"),
    "many keys": (metadata(KEY, struct.pack("<II", 4, 7), keys=1 << 60), "ends within"),
    "arrays in arrays": (
        metadata(KEY, struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000),
        "too deep",
    ),
    "an unknown type": (metadata(KEY, struct.pack("<I", 77)), "type 77"),
    "big-endian": (metadata(version=3 << 24), "big-endian"),
    "nothing": (b"", "is empty"),
    "a page of a site": (b"<!DOCTYPE html>", "not a GGUF file, as it begins with b'<!DO'"),
    "an old version": (metadata(version=1), "version 1 of the format, which is not supported"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "a few bytes": (b"GGUF" + bytes([3, 0]), "within its metadata; was it .* only in part"),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_counts_are_checked(damage: str, tmp_path: Path) -> None:
    """Regression: a file of 60 bytes took all memory.

    The package reads the elements of an array one by one, past the end of the file too.
    """
    data, reason = HEADERS[damage]
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path / "tiny.gguf")


NO_MEMORY = [MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))]


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_lack_of_memory_is_not_damage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the file was refused as unreadable, and a user would have downloaded it again."""
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), "Q4_0")

    def full(*args: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "from_pretrained", full)
        with pytest.raises(
            OutOfMemoryError, match=r"not enough memory to read the metadata of .*tiny\.g"
        ):
            load_model(file)
    load_model(file)
    monkeypatch.setattr(gguf, "GGUFReader", full)  # no more can be mapped
    with pytest.raises(MemoryError):
        load_model(file)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(kind: str, scale: float, tmp_path: Path) -> None:
    """Regression: they were read, and every request ended with an error."""
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), kind)
    [place] = (t.data_offset for t in gguf.GGUFReader(file).tensors if t.name == UP)
    data = bytearray(file.read_bytes())
    data[place : place + 2] = np.float16(scale).tobytes()
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has scales .* not finite"):
        load_model(file)


UP = "blk.1.ffn_up.weight"


def write_with(file: Path, add: Any) -> Path:
    """Write a file for which `add(writer)` is called as well."""
    own = gguf.GGUFWriter.add_vocab_size
    methods = {
        "add_vocab_size": lambda self, n: (own(self, n), add(self)),
        "add_rope_dimension_count": lambda self, n: None,
    }
    return write_gguf(file, "llama", make_model("llama"), "F32", methods=methods)


@pytest.mark.parametrize(
    ("method", "key", "value", "reason"),
    [
        ("add_uint32", "rope.dimension_count", 8, "8 elements of each head are rotated"),
        ("add_float32", "rope.scaling.factor", 4.0, r"positions are scaled \(rope.scaling.factor"),
        ("add_float32", "rope.scale_linear", 4.0, r"positions are scaled \(rope.scale_linear 4"),
        ("add_bool", "attention.causal", False, "attention is not causal"),
    ],
)
def test_keys_that_change_answers_are_not_ignored(
    method: str,
    key: str,
    value: Any,
    reason: str,
    tmp_path: Path,
) -> None:
    """llama.cpp rotates a part of each head, scales linearly, or hides nothing."""
    file = write_with(
        tmp_path / "tiny.gguf",
        lambda writer: getattr(writer, method)(f"llama.{key}", value),
    )
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(file)


@pytest.mark.parametrize(
    ("architecture", "name"), [("gemma3", "block_count"), ("phi3", "rope_dimension_count")]
)
def test_counts_of_missing_entries_are_refused(
    architecture: str, name: str, tmp_path: Path
) -> None:
    """Regression: a list of this many entries took all memory."""
    add = getattr(gguf.GGUFWriter, f"add_{name}")
    methods = {f"add_{name}": lambda self, _: add(self, 2**31)}
    model = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, model, "F32", methods=methods)
    with pytest.raises(DamagedModelError, match=r"count is 2,147,483,648; allowed: 1 to \d+"):
        load_model(file)


def test_duplicate_tensors_are_refused(tmp_path: Path) -> None:
    """Regression: the last one was read."""
    name, zeros = "model.norm.weight", np.zeros(BASE["hidden_size"], np.float32)
    file = write_with(tmp_path / "a.gguf", lambda w: w.add_tensor(name, zeros))
    with pytest.raises(UnsupportedModelError, match=rf"two tensors for {name}"):
        load_model(file)


@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
@pytest.mark.parametrize("left", [-90, 10, 13, 0.5, -1])
def test_a_truncated_file_is_reported_as_such(left: float, kind: str, tmp_path: Path) -> None:
    """Regression: errors of numpy were shown (cannot reshape an array, a view needs a divisor).

    90 bytes before the first tensor the list of tensors ends.
    """
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), kind)
    data, start = file.read_bytes(), min(t.data_offset for t in gguf.GGUFReader(file).tensors)
    halfway = (start + len(data)) // 2
    size = {0.5: halfway, -1: len(data) - 1}.get(left, start + int(left))
    file.write_bytes(data[:size])
    with pytest.raises(DamagedModelError, match=rf"within its tensors, after {size:,} bytes; was"):
        load_model(file)


def test_a_file_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    """Regression: reading a mapped file beyond its end crashed the process without a message."""
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), "Q4_0")
    with checkpoint.GGUFCheckpoint(tmp_path) as opened:
        os.truncate(file, file.stat().st_size - 1)
        for read in (opened.tensor, opened.packed):
            with pytest.raises(DamagedModelError, match=r"model\.gguf changed while"):
                read("lm_head.weight")


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("add_context_length", r"llama\.context_length"),
        ("add_layer_norm_rms_eps", r"llama\.attention\.layer_norm_rms_epsilon"),
        ("add_head_count", r"llama\.attention\.head_count"),
        ("add_tokenizer_model", r"tokenizer\.ggml\.model"),
        ("add_token_list", r"tokenizer\.ggml\.tokens"),
        ("add_token_merges", r"tokenizer\.ggml\.merges"),
    ],
)
def test_a_missing_key_is_named(method: str, key: str, tmp_path: Path) -> None:
    """Regression: transformers took a default (epsilon 1e-6), or raised `KeyError: 'scores'`."""
    model, methods = make_model("llama"), {method: lambda self, *_: None}
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, "Q4_0", methods=methods)
    with pytest.raises(DamagedModelError, match=rf"its metadata has no {key};"):
        load_model(file)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def add(self: Any, name: str, *more: Any, **named: Any) -> None:
        if name != UP:
            gguf.GGUFWriter.add_tensor(self, name, *more, **named)

    model, methods = make_model("llama"), {"add_tensor": add}
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, "Q4_0", methods=methods)
    with pytest.raises(UnsupportedModelError, match=r"it has no .*layers\.1\.mlp\.up_proj\.weight"):
        load_model(file)


def test_another_architecture_is_refused_before_any_conversion(tmp_path: Path, cache: Path) -> None:
    """Regression: for Mamba, the error listed values of `model_type`, which a GGUF file lacks."""
    (tmp_path / "a.gguf").write_bytes(metadata(ARCHITECTURE, struct.pack("<IQ", 8, 5), b"mamba"))
    with pytest.raises(UnsupportedModelError, match=r"its architecture is mamba; allowed: llama,"):
        load_model(tmp_path / "a.gguf")
    assert not list(cache.iterdir())


ARCHITECTURE = struct.pack("<Q", 20) + b"general.architecture"


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("llama", "1 {0} converted to float, 15 {0} stored as int4"),
        ("qwen2", "15 {0} stored as int4"),
        (
            "llama",
            "1 {0} converted to float, 14 {0} rounded again to int4, 1 {0} rounded again to int8",
        ),
        ("qwen2", "14 {0} rounded again to int4, 1 {0} rounded again to int8"),
    ],
)
def test_the_conversion_of_a_file_is_logged(
    architecture: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a head that is rounded again counted as unchanged. It is int8, and has a line.

    That numbers change was logged at INFO, which commands do not show.
    """
    own, name = gguf.GGUFWriter.add_tensor, "IQ4_NL" if "again" in message else "Q4_0"

    def add(self: Any, tensor: str, data: Any, raw_dtype: Any = None) -> None:
        # Both have blocks of 18 bytes with a scale first: any bytes are a weight.
        raw_dtype = None if raw_dtype is None else gguf.GGMLQuantizationType[name]
        own(self, tensor, data, raw_dtype=raw_dtype)

    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(
        checkpoint._log, "log", lambda level, text, *args: lines.append((level, text % args))
    )
    original = make_model(architecture)
    methods = {"add_tensor": add}
    file = write_gguf(tmp_path / "a.gguf", architecture, original, "Q4_0", methods=methods)
    model = load_model(file, "float32")
    [(level, line)] = lines
    assert level == (logging.WARNING if "again" in message else logging.INFO)
    _, _, formats = line.partition(" F32 stored as float, ")
    assert formats == message.format(name)
    head = model.layer("lm_head")
    assert isinstance(head, Linear)
    assert head.matrix.kind == ("int8" if "again" in message else "int4")
    assert head.matrix.is_prequantized == ("again" not in message)
    table = model.layer("model.embed_tokens")
    assert (isinstance(table, Embedding) and table.matrix is head.matrix) == (
        architecture == "qwen2"
    )
    if architecture == "qwen2":
        bias = original.model.layers[1].self_attn.k_proj.bias
        loaded_bias: Any = model.layer("model.layers.1.self_attn.k_proj").bias
        assert torch.equal(loaded_bias, bias)
