"""GGUF files that are damaged, or would be read wrongly: refused with a reason."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headstart.errors import ModelError, UnsupportedModelError
from headstart.models.loader import load_model
from tests.models.gguf.files import BASE, make_model, write_gguf


def metadata(*parts: bytes, keys: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, keys) + b"".join(parts)


KEY = struct.pack("<Q", 1) + b"x"
HEADERS = {
    "bytes past the end": (metadata(KEY, struct.pack("<IIQ", 9, 0, 1 << 21)), "bytes before"),
    "numbers without end": (metadata(KEY, struct.pack("<IIQ", 9, 6, 1 << 60)), "elements, more"),
    "no end of empty arrays": (metadata(KEY, struct.pack("<IIQ", 9, 9, 1 << 60)), "elements, more"),
    "a long text": (metadata(KEY, struct.pack("<IQ", 8, 1 << 62)), "bytes before its end"),
    "many keys": (metadata(KEY, struct.pack("<II", 4, 7), keys=1 << 60), "ends within"),
    "arrays in arrays": (
        metadata(KEY, struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000),
        "too deep",
    ),
    "an unknown type": (metadata(KEY, struct.pack("<I", 77)), "type 77"),
    "big-endian": (metadata(version=3 << 24), "big-endian"),
    "nothing": (b"", "is empty"),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_counts_are_not_believed(damage: str, tmp_path: Path) -> None:
    """The package reads the elements of an array one by one, past the end of the file too: a file
    of 60 bytes took all memory."""
    data, said = HEADERS[damage]
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(kind: str, scale: float, tmp_path: Path) -> None:
    """They were read, and every request ended with an error."""
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), kind)
    [place] = (t.data_offset for t in gguf.GGUFReader(file).tensors if t.name == UP)
    data = bytearray(file.read_bytes())
    data[place : place + 2] = np.float16(scale).tobytes()
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has scales .* not finite"):
        load_model(file)


UP = "blk.1.ffn_up.weight"


def write_with(file: Path, patch: pytest.MonkeyPatch, add: Any) -> Path:
    """A file for which `add(writer)` is called besides."""
    own = gguf.GGUFWriter.add_vocab_size
    patch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda self, n: (own(self, n), add(self)))
    patch.setattr(gguf.GGUFWriter, "add_rope_dimension_count", lambda self, n: None)
    return write_gguf(file, "llama", make_model("llama"), "F32")


@pytest.mark.parametrize(
    ("method", "key", "value", "said"),
    [
        ("add_uint32", "rope.dimension_count", 8, "8 elements of each head are rotated"),
        ("add_float32", "rope.scaling.factor", 4.0, r"positions are scaled \(rope.scaling.factor"),
        ("add_float32", "rope.scale_linear", 4.0, r"positions are scaled \(rope.scale_linear 4"),
        ("add_bool", "attention.causal", False, "tokens see tokens after them"),
    ],
)
def test_keys_that_change_answers_are_not_left_out(
    method: str,
    key: str,
    value: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp rotates a part of each head, scales linearly, or hides nothing."""
    file = write_with(
        tmp_path / "tiny.gguf",
        monkeypatch,
        lambda writer: getattr(writer, method)(f"llama.{key}", value),
    )
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(file)


def test_two_tensors_for_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one was read."""
    name, zeros = "model.norm.weight", np.zeros(BASE["hidden_size"], np.float32)
    file = write_with(tmp_path / "a.gguf", monkeypatch, lambda w: w.add_tensor(name, zeros))
    with pytest.raises(UnsupportedModelError, match=rf"two tensors for {name}"):
        load_model(file)
