"""GGUF files: written by the package `gguf`, read by headstart, held to the model they are of."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headstart import LLM, SamplingParams
from headstart.errors import HeadstartError, ModelError, ModelNotFoundError, UnsupportedModelError
from headstart.models.gguf import library
from headstart.models.gguf.blocks import FORMATS, read_weight
from headstart.models.gguf.checkpoint import _NARROW, ARCHITECTURES
from headstart.models.linear import Int8Embedding, QuantizedLinear
from headstart.models.linear.int4 import Int4Linear, Int5Linear
from headstart.models.loader import load_model
from headstart.models.tokenizer import load_tokenizer
from headstart.models.zoo.decoder import forward_rows
from tests.models.paged import Paged

gguf: Any = pytest.importorskip("gguf")

VOCABULARY = 160
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**BASE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**BASE, tie_word_embeddings=False),
    # The file has no scale of queries: it is the head's width.
    "gemma2": Gemma2Config(**BASE, query_pre_attn_scalar=16, sliding_window=64),
}
TOKENS = torch.arange(3, 23)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_GGUF_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_model(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[architecture] if not changes else LlamaConfig(**BASE, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 0.5 * ("norm" in name), max(weight.shape[-1], 16) ** -0.5)
    return model


def write_gguf(
    file: Path,
    architecture: str,
    model: Any,
    kind: str,
    scaling: str | None = None,
    factors: torch.Tensor | None = None,
    files: int | None = None,
) -> Path:
    """The model as llama.cpp converts it, its matrices in one format.

    factors: what it divides the frequencies of rotary positions by. files: of how many it is one.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(8.0)
    if files is not None:
        writer.add_uint16("split.count", files)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(30 + at) for at in range(3, VOCABULARY - 1)]
    writer.add_token_list(["<0>", "<1>", "<2>", *letters, "ab"])
    writer.add_token_types([3 if at < 3 else 1 for at in range(VOCABULARY)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    theirs = {ours: name for name, ours in ARCHITECTURES[architecture].items()}
    wanted = gguf.GGMLQuantizationType[kind]
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part, _, suffix = name.rpartition(".")
        prefix, number = "", part.split(".")[2:3]
        if part.startswith("model.layers."):
            prefix, part = f"blk.{number[0]}.", part.split(".", 3)[3]
        data = tensor.numpy()
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            data = data.reshape(-1, 2, config.head_dim // 2, data.shape[-1])
            data = data.swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gemma2" and "norm" in part:
            data = data + 1
        if data.ndim == 1:
            writer.add_tensor(f"{prefix}{theirs[part]}.{suffix}", data)
        else:
            packed = gguf.quants.quantize(data, wanted)
            writer.add_tensor(f"{prefix}{theirs[part]}.{suffix}", packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits(model: Any) -> torch.Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_file_of_floats_is_the_model(architecture: str, tmp_path: Path) -> None:
    original = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, original, "F32")
    model = load_model(file, "float32")
    places = torch.arange(len(TOKENS))
    expected = forward_rows(original, TOKENS, places, places)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert model.fallback_reason is None and model.eos_token_ids == {2}
    assert not any(isinstance(m, QuantizedLinear) for m in model.module.modules())


@pytest.mark.parametrize(
    ("kind", "wanted", "apart"),
    [
        ("Q4_0", "int4", 1e-6),
        ("Q4_1", "int4", 1e-6),
        ("Q5_0", "int5", 1e-6),
        ("Q8_0", "int8", 8e-3),
        ("F16", None, 0),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_are_those_of_the_file(
    architecture: str, kind: str, wanted: str | None, apart: float, tmp_path: Path
) -> None:
    """4 and 5 bits are kept; 8 bits, and the head, are rounded once more."""
    original = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, original, kind)
    model = load_model(file, "float32")
    number = gguf.GGMLQuantizationType[kind]
    for name in model.linear_widths():
        weight, layer = original.get_submodule(name).weight.detach().numpy(), model.layer(name)
        data = gguf.quants.dequantize(gguf.quants.quantize(weight, number), number)
        expected, found = torch.from_numpy(data).float(), model.weight(name)
        assert found is not None
        limit = 8e-3 if wanted and name == "lm_head" else apart
        assert float((found - expected).norm()) <= limit * float(expected.norm())
        assert getattr(layer, "kind", None) == (
            wanted if name != "lm_head" or not wanted else "int8"
        )
    tied = wanted is not None and original.config.tie_word_embeddings
    assert isinstance(model.layer("model.embed_tokens"), Int8Embedding) == tied


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_blocks_of_any_bytes(kind: str) -> None:
    """Against the package's own dequantising, for bytes that no quantiser would write."""
    generator = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    data = generator.integers(0, 256, (40, 512 // per_block * size), dtype=np.uint8)
    scales = generator.normal(0, 0.1, (40, 512 // per_block, 2)).astype(np.float16)
    blocks = data.reshape(40, -1, size)
    one = kind in ("Q4_0", "Q5_0")
    blocks[:, :, : 2 if one else 4] = scales[:, :, : 1 if one else 2].copy().view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data, number))
    layer = Int5Linear if FORMATS[kind] == "int5" else Int4Linear
    found = layer(read_weight(data, kind, gguf)).unpack()
    # Q4_K and Q5_K: a step and a start are products, which are rounded to 11 bits.
    limit = expected.view(40, -1, 32).abs().amax(-1, keepdim=True) * 0.002
    apart = (found - expected).abs().view(40, -1, 32)
    assert (apart <= limit + 1e-6).all()


def test_a_file_answers_and_brings_its_tokenizer(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), "Q4_1")
    llm = LLM(str(file), dtype="float32", num_blocks=24, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": TOKENS.tolist()}, params)
    assert len(output.outputs[0].token_ids) == 4
    llm.close()
    tokenizer = load_tokenizer(file)
    assert tokenizer is not None and tokenizer.decode([3 + 35]) == chr(30 + 38)
    [folder] = cache.iterdir()
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    load_model(file, weights="int8")
    assert [folder] == list(cache.iterdir()), "made once"
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    write_gguf(file, "llama", make_model("llama"), "Q8_0")
    load_model(file)
    assert len(list(cache.iterdir())) == 2, "another file of the same name"


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("no model")
    with pytest.raises(ModelNotFoundError, match="is a file; a model is a folder"):
        load_model(tmp_path / "note.txt")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(Exception, match=r"broken\.gguf cannot be read"):
        load_model(tmp_path / "broken.gguf")


def test_one_of_several_files_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """It was said that layers behind the file's last one have no shape."""
    model = make_model("llama")
    file = write_gguf(tmp_path / "a-00001-of-00002.gguf", "llama", model, "F32", files=2)
    with pytest.raises(UnsupportedModelError, match=r"one of 2 files.*llama-gguf-split --merge"):
        load_model(file)
    load_model(write_gguf(tmp_path / "whole.gguf", "llama", model, "F32", files=1))


def test_a_format_that_the_package_does_not_read_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.double())
    file = write_gguf(tmp_path / "a.gguf", "llama", model, "F32")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is of the format F64"):
        load_model(file)


def test_formats_of_few_bits_become_int4() -> None:
    """IQ2_XXS, of 2 bits, became int8."""
    assert {kind.name for kind in gguf.quants._type_traits if kind.name[:2] == "IQ"} <= _NARROW


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


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope"])
def test_scaled_positions_are_refused_and_not_left_out(scaling: str, tmp_path: Path) -> None:
    """transformers reads these keys for one architecture alone."""
    model = make_model("llama")
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, "F32", scaling)
    with pytest.raises(UnsupportedModelError, match=rf"positions are scaled \({scaling}\)"):
        load_model(file)
    load_model(write_gguf(tmp_path / "plain.gguf", "llama", model, "F32", "none"))


def test_frequencies_are_the_file_s(tmp_path: Path) -> None:
    """Files of Llama 3.1 and later were refused. Against transformers' own Llama 3.1."""
    angles = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0}
    angles |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    angles["original_max_position_embeddings"] = 16
    model = make_model("llama", rope_parameters=angles)
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.unique().numel() > 2
    load = load_model(write_gguf(tmp_path / "a.gguf", "llama", model, "F32", factors=factors))
    assert load.max_model_len == BASE["max_position_embeddings"]
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, "F32", factors=factors)
    places = torch.arange(len(TOKENS))
    expected = forward_rows(model, TOKENS, places, places)
    found = logits(load_model(file, "float32"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    without = logits(load_model(write_gguf(tmp_path / "b.gguf", "llama", model, "F32"), "float32"))
    assert float((without - expected).abs().max()) > 1e-2, "the factors change nothing"


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0, None])
def test_frequencies_that_cannot_be_are_refused(factor: float | None, tmp_path: Path) -> None:
    factors = torch.ones(7 if factor is None else 8)
    if factor is not None:
        factors[3] = factor
    file = write_gguf(tmp_path / "a.gguf", "llama", make_model("llama"), "F32", factors=factors)
    with pytest.raises(HeadstartError):
        load_model(file)


def test_a_cache_folder_that_is_damaged_is_made_anew(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "gemma2", make_model("gemma2"), "F32")
    load_model(file)
    [folder] = cache.iterdir()
    for damage in (
        lambda: (folder / "config.json").write_text(""),
        lambda: (folder / "config.json").unlink(),
        lambda: (folder / "model.gguf").unlink(),
    ):
        damage()
        assert load_model(file).vocab_size == VOCABULARY
    assert list(cache.iterdir()) == [folder]


def test_caps_are_the_file_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make_model("gemma2")
    monkeypatch.setattr(original.config, "attn_logit_softcapping", 2.0)
    monkeypatch.setattr(original.config, "final_logit_softcapping", 3.0)
    file = write_gguf(tmp_path / "tiny.gguf", "gemma2", original, "F32")
    shape = load_model(file)._about.shape
    assert (shape.softcap, shape.logit_softcap) == (2.0, 3.0)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UnsupportedModelError, match=r'pip install "\.\[gguf\]" in the folder of the clone'
    ):
        library.import_gguf(tmp_path / "some.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r'pip install "\.\[gguf\]" in the folder of the clone'
    ):
        load_model(tmp_path / "some.gguf")
