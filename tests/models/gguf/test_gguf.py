"""GGUF files written by the package `gguf`, read by headstart, and compared with their model."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Phi3Config

from headstart import LLM, SamplingParams, native
from headstart.errors import HeadstartError, ModelNotFoundError, UnsupportedModelError
from headstart.models.dense.decoder import DenseDecoder
from headstart.models.dense.loader import describe_decoder
from headstart.models.gguf import gguf_folder
from headstart.models.loader import load_model
from headstart.models.tokenizer import load_tokenizer
from headstart.models.transformers_backend.decoder import forward_rows
from headstart.weights import gguf as reading
from headstart.weights.bf16 import Bf16Weight, PackedWeight
from headstart.weights.gguf import _NARROW, FORMATS, GGUFCheckpoint, import_gguf, read_weight
from headstart.weights.grouped import GroupedWeight
from tests.models.gguf.files import BASE, CONFIGS, TOKENS, VOCABULARY, make_model, write_gguf
from tests.models.paged import Paged
from tests.weights.stored import matrix_of, quantized_matrices

gguf: Any = pytest.importorskip("gguf")


def logits(model: Any) -> torch.Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_file_of_floats_equals_the_model(architecture: str, tmp_path: Path) -> None:
    original = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, original, "F32")
    model = load_model(file, "float32")
    places = torch.arange(len(TOKENS))
    with torch.no_grad():
        expected = (
            original(TOKENS[None], use_cache=False).logits[0]
            if architecture in ("lfm2", "qwen35", "granitehybrid")
            else forward_rows(original, TOKENS, places, places)
        )
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert model.fallback_reason is None and model.eos_token_ids == {2}
    assert not quantized_matrices(model.module)


@pytest.mark.parametrize(
    ("kind", "wanted", "apart"),
    [
        ("Q4_0", "int4", 1e-6),
        ("Q4_1", "int4", 1e-6),
        ("Q5_0", "int5", 1e-6),
        ("Q8_0", "int8", 1e-6),
        ("F16", None, 0),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma4", "lfm2", "qwen35"])
def test_weights_are_those_of_the_file(
    architecture: str, kind: str, wanted: str | None, apart: float, tmp_path: Path
) -> None:
    """4, 5 and 8 bits are preserved, also of a head and of an embedding that shares its weight."""
    original = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, original, kind)
    model = load_model(file, "float32")
    number = gguf.GGMLQuantizationType[kind]
    for name in model.linear_widths():
        weight, layer = original.get_submodule(name).weight.detach().numpy(), model.layer(name)
        data = gguf.quants.dequantize(gguf.quants.quantize(weight, number), number)
        expected, loaded = torch.from_numpy(data).float(), model.weight(name)
        assert loaded is not None
        assert float((loaded - expected).norm()) <= apart * float(expected.norm())
        assert getattr(matrix_of(layer), "kind", None) == wanted
        own: Any = layer.bias
        bias = original.get_submodule(name).bias
        assert torch.equal(own, bias) if bias is not None else own is None
    tied = wanted is not None and original.config.tie_word_embeddings
    table, numbers = model.layer("model.embed_tokens"), torch.arange(VOCABULARY).flip(0)
    assert (getattr(matrix_of(table), "kind", None) is not None) == tied
    if tied:
        head = model.weight("lm_head")
        assert head is not None and torch.equal(table(numbers), head[numbers])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_model_recognizes_the_weights_of_its_file(kind: str, dtype: str, tmp_path: Path) -> None:
    """Regression: an adapter with a copy of the LM head, as the package reads it, was refused."""
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", make_model("qwen2"), kind)
    model = load_model(file, dtype)
    with GGUFCheckpoint(gguf_folder(file)) as opened:
        for name, own in (("lm_head", "model.embed_tokens"), ("model.layers.1.mlp.up_proj",) * 2):
            weight = opened.tensor(f"{own}.weight")
            assert model.holds(name, weight) and model.holds(name, weight.bfloat16())
            assert not model.holds(name, weight.roll(1, 0)) and not model.holds(name, weight[1:])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_floats_are_stored_as_in_a_checkpoint_of_floats(architecture: str, tmp_path: Path) -> None:
    """Regression: they were copied to float32 and multiplied by torch despite the kernels."""
    original = make_model(architecture).to(torch.bfloat16).float()
    original.tie_weights()
    kinds: dict[str, tuple[str, type]] = {"float32": ("BF16", Bf16Weight)}
    if native.library() is not None:
        kinds["bfloat16"] = ("F16", PackedWeight)
    for dtype, (kind, layer) in kinds.items():
        file = write_gguf(tmp_path / f"{kind}.gguf", architecture, original, kind)
        model = load_model(file, dtype)
        expected = layer if native.avx2_library() is not None else torch.nn.Linear
        for part in ("model.layers.1.mlp.up_proj", "lm_head"):
            assert isinstance(matrix_of(model.layer(part)), expected)
            weight = model.weight(part)
            assert weight is not None
            assert torch.equal(weight.float(), original.get_submodule(part).weight)


def test_floats_and_blocks_run_in_one_call(tmp_path: Path) -> None:
    """Regression: an embedding in blocks became float32, and so did all bfloat16 floats."""
    own = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, data: Any, raw_dtype: Any = None) -> None:
        if "ffn_down" in name:
            floats = gguf.quants.dequantize(data, raw_dtype)
            raw_dtype = gguf.GGMLQuantizationType.BF16
            data = gguf.quants.quantize(floats, raw_dtype)
        own(self, name, data, raw_dtype=raw_dtype)

    methods = {"add_tensor": add}
    file = write_gguf(tmp_path / "a.gguf", "llama", make_model("llama"), "Q4_0", methods=methods)
    model = load_model(file, "float32")
    assert isinstance(model, DenseDecoder)
    if native.avx2_library() is not None:
        down = model.layer("model.layers.1.mlp.down_proj")
        assert isinstance(matrix_of(down), Bf16Weight)
        assert model._compiled is not None
    actual = logits(model)
    model.calls_each_layer = True
    torch.testing.assert_close(actual, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_blocks_of_any_bytes(kind: str) -> None:
    """Compared with the package's dequantization, for bytes that no quantizer would write."""
    generator = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    data = generator.integers(0, 256, (40, 512 // per_block * size), dtype=np.uint8)
    scales = generator.normal(0, 0.1, (40, 512 // per_block, 2)).astype(np.float16)
    blocks = data.reshape(40, -1, size)
    one = kind in ("Q4_0", "Q5_0", "Q8_0")
    blocks[:, :, : 2 if one else 4] = scales[:, :, : 1 if one else 2].copy().view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data, number))
    matrix = GroupedWeight(read_weight(data, kind, gguf))
    assert matrix.kind == FORMATS[kind]
    unpacked = matrix.unpack()
    # Q4_K and Q5_K: a step and a start are products, which are rounded to 11 bits.
    limit = expected.view(40, -1, 32).abs().amax(-1, keepdim=True) * 0.002
    apart = (unpacked - expected).abs().view(40, -1, 32)
    assert (apart <= limit + 1e-6).all()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Converters write such a layer of Qwen3.5 as a block after the others."""

    def add(self: Any, count: int) -> None:
        gguf.GGUFWriter.add_block_count(self, count + 1)
        self.add_uint32("qwen35.nextn_predict_layers", 1)
        self.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((4, 4), dtype=np.float32))

    original = make_model("qwen35")
    methods = {"add_block_count": add}
    file = write_gguf(tmp_path / "a.gguf", "qwen35", original, "F32", methods=methods)
    with torch.no_grad():
        expected = original(TOKENS[None], use_cache=False).logits[0]
    actual = logits(load_model(file, "float32"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_groups_of_inputs_in_another_order(kind: str) -> None:
    """Qwen3.5's heads of values have another order: a block of 256 spans two of them."""
    number = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 60, (16, 512 // per_block * size), dtype=np.uint8)
    order = np.random.default_rng(1).permutation(16)
    plain = GroupedWeight(read_weight(data, kind, gguf)).unpack()
    unpacked = GroupedWeight(read_weight(data, kind, gguf, order)).unpack()
    assert torch.equal(
        unpacked.view(16, 16, 32), plain.view(16, 16, 32)[:, torch.from_numpy(order)]
    )


def test_a_weight_in_several_pieces_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 60, (65, 34), dtype=np.uint8)
    whole = read_weight(data, "Q8_0", gguf)
    assert reading._OUTPUTS % 16 == 0
    monkeypatch.setattr(reading, "_OUTPUTS", 32)
    pieces = read_weight(data, "Q8_0", gguf)
    assert torch.equal(pieces.panels, whole.panels) and torch.equal(pieces.scales, whole.scales)
    assert pieces[2:] == whole[2:]


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux to count the resident pages of a file"
)
def test_pages_of_the_file_are_released(tmp_path: Path) -> None:
    """Regression: the whole file was resident at the end of a load (1.5 times the memory)."""
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), "Q8_0")

    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        assert any(str(file) in line for line in lines)
        return int(next(line for line in lines if line.startswith("Rss")).split()[1])

    with GGUFCheckpoint(tmp_path) as opened:
        before = opened.tensor("lm_head.weight")
        assert resident() > 0
        opened.release()
        assert resident() == 0
        assert torch.equal(opened.tensor("lm_head.weight"), before)
    assert resident() == 0


@pytest.mark.parametrize("is_mapped", [False, True])
def test_memory_that_was_written_to_is_not_released(
    is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of files that are read, or mapped to be changed, cannot be read again."""
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), "Q8_0")
    held = np.memmap(file, mode="c") if is_mapped else np.empty(1 << 20, dtype=np.uint8)
    held.fill(7)
    opened = GGUFCheckpoint(tmp_path)
    monkeypatch.setattr(opened, "_mapped", held)
    opened.release()
    assert (held == 7).all()


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_pages_are_released_after_the_embedding_each_layer_and_the_head(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped_sizes: list[int] = []
    monkeypatch.setattr(reading, "drop_pages", lambda start, size: dropped_sizes.append(size))
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), "Q8_0")
    model = load_model(file, weights=weights)
    assert dropped_sizes == [file.stat().st_size] * (
        1 + len(model.layouts) + 1 + 1
    )  # and at its end


def test_a_file_answers_and_has_its_tokenizer(tmp_path: Path, cache: Path) -> None:
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
    assert [folder] == list(cache.iterdir()), "built once"
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    write_gguf(file, "llama", make_model("llama"), "Q8_0")
    load_model(file)
    assert len(list(cache.iterdir())) == 2, "another file of the same name"


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("no model")
    with pytest.raises(ModelNotFoundError, match="is a file; allowed: a folder"):
        load_model(tmp_path / "note.txt")
    with pytest.raises(ModelNotFoundError, match="there is no file nowhere/a"):
        load_model("nowhere/a.gguf")  # was looked up on the hub
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(Exception, match=r"broken\.gguf cannot be read"):
        load_model(tmp_path / "broken.gguf")


def test_one_of_several_files_is_refused_with_advice(tmp_path: Path) -> None:
    """Regression: the error was about layers after the file's last layer, which have no shape."""
    model = make_model("llama")
    file = write_gguf(tmp_path / "a-00001-of-00002.gguf", "llama", model, "F32", files=2)
    with pytest.raises(UnsupportedModelError, match=r"one of 2 files.*llama-gguf-split --merge"):
        load_model(file)
    load_model(write_gguf(tmp_path / "whole.gguf", "llama", model, "F32", files=1))


def test_a_format_that_the_package_does_not_read_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.double())
    file = write_gguf(tmp_path / "a.gguf", "llama", model, "F32")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has the format F64"):
        load_model(file)


def test_formats_of_few_bits_become_int4() -> None:
    """Regression: IQ2_XXS, of 2 bits, became int8."""
    assert {kind.name for kind in gguf.quants._type_traits if kind.name[:2] == "IQ"} <= _NARROW


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope"])
def test_scaled_positions_are_refused(scaling: str, tmp_path: Path) -> None:
    """transformers reads these keys for one architecture alone."""
    model = make_model("llama")
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, "F32", scaling)
    with pytest.raises(UnsupportedModelError, match=rf"positions are scaled \({scaling}\)"):
        load_model(file)
    load_model(write_gguf(tmp_path / "plain.gguf", "llama", model, "F32", "none"))


def test_frequencies_are_read_from_the_file(tmp_path: Path) -> None:
    """Regression: files of Llama 3.1 and later were refused.

    Compared with Llama 3.1 of transformers.
    """
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
    actual = logits(load_model(file, "float32"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    without = logits(load_model(write_gguf(tmp_path / "b.gguf", "llama", model, "F32"), "float32"))
    assert float((without - expected).abs().max()) > 1e-2, "the factors change nothing"


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0, None])
def test_impossible_frequencies_are_refused(factor: float | None, tmp_path: Path) -> None:
    factors = torch.ones(7 if factor is None else 8)
    if factor is not None:
        factors[3] = factor
    file = write_gguf(tmp_path / "a.gguf", "llama", make_model("llama"), "F32", factors=factors)
    with pytest.raises(HeadstartError):
        load_model(file)


def test_a_damaged_cache_folder_is_rebuilt(tmp_path: Path, cache: Path) -> None:
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


def test_caps_are_read_from_the_file(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    original = make_model("gemma2", Gemma2Config(**BASE, sliding_window=8, **caps))
    file = write_gguf(tmp_path / "tiny.gguf", "gemma2", original, "F32")
    shape = describe_decoder(gguf_folder(file))[0].shape
    assert (shape.softcap, shape.logit_softcap) == (2.0, 3.0)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UnsupportedModelError, match=r'pip install "\.\[gguf\]" in the folder of the clone'
    ):
        import_gguf(tmp_path / "some.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r'pip install "\.\[gguf\]" in the folder of the clone'
    ):
        load_model(tmp_path / "some.gguf")


def test_phi_3_has_two_sets_of_factors(tmp_path: Path) -> None:
    """The short factors are read, and the model is used up to their length."""
    angles = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    angles |= {"short_factor": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6], "long_factor": [9.0] * 6}
    config = Phi3Config(
        **BASE, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=angles
    )
    original = make_model("phi3", config)
    model = load_model(write_gguf(tmp_path / "tiny.gguf", "phi3", original, "F32"), "float32")
    assert (model.max_model_len, model.fallback_reason) == (64, None)
    places = torch.arange(len(TOKENS))
    expected = forward_rows(original, TOKENS, places, places)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "add", "reason"),
    [
        (
            "olmo2",
            lambda writer: writer.add_sliding_window(8),
            "layers, like OLMo 3",
        ),
        (
            "mistral3",
            lambda writer: writer.add_float32("mistral3.attention.temperature_scale", 0.1),
            "scaled by position",
        ),
        (
            "llama",
            lambda writer: writer.add_array("llama.attention.head_count_kv", [2, 2]),
            "allowed: a whole number",
        ),
    ],
)
def test_relatives_of_a_family_are_refused(
    architecture: str, add: Any, reason: str, tmp_path: Path
) -> None:
    methods = {"add_head_count_kv": lambda self, _: add(self)}
    model = make_model(architecture)
    file = write_gguf(tmp_path / "a.gguf", architecture, model, "F32", methods=methods)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(file)


@pytest.mark.parametrize(
    ("keys", "texts", "ends"),
    [
        ({"eot_token_id": 5, "eom_token_id": 6}, {}, {2, 5, 6}),
        ({}, {7: "<|im_end|>", 8: "<end_of_turn>"}, {2, 7, 8}),
        ({}, {7: "<|end|>", 8: "<|return|>", 9: "<|call|>"}, {2, 8, 9}),
        ({"eot_token_id": 1 << 20}, {}, {2}),
    ],
)
def test_ends_of_turns_end_a_reply(
    keys: dict[str, int], texts: dict[int, str], ends: set[int], tmp_path: Path
) -> None:
    """Regression: only `eos_token_id` was read, so that a chat continued after its turn."""
    own = gguf.GGUFWriter.add_token_list

    def add(self: Any, tokens: list[str]) -> None:
        own(self, [texts.get(at, token) for at, token in enumerate(tokens)])
        for name, value in keys.items():
            self.add_uint32(f"tokenizer.ggml.{name}", value)

    model, methods = make_model("llama"), {"add_token_list": add}
    file = write_gguf(tmp_path / "a.gguf", "llama", model, "F32", methods=methods)
    assert load_model(file).eos_token_ids == ends


def test_gemma_4_splits_texts_as_transformers_does(tmp_path: Path) -> None:
    """Spaces are letters, merges are the file's, and letters that it lacks become bytes."""
    letters = ["\u2581", *"abc", "ab", "\u2581ab", "\u2581\u2581", "<turn|>"]
    tokens = [*letters, *(f"<0x{byte:02X}>" for byte in range(149))]
    merges = ["a b", "\u2581 ab", "\u2581 \u2581"]

    def add_model(writer: Any, _name: str) -> None:
        gguf.GGUFWriter.add_tokenizer_model(writer, "gemma4")
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    methods = {"add_tokenizer_model": add_model, "add_tokenizer_pre": lambda *_: None}
    file = write_gguf(
        tmp_path / "tiny.gguf",
        "gemma4",
        make_model("gemma4"),
        "F32",
        words=(tokens, merges),
        methods=methods,
    )
    tokenizer = load_tokenizer(gguf_folder(file))
    assert tokenizer is not None
    parts = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab c  ab!", add_special_tokens=False))
    assert parts == ["ab", "\u2581", "c", "\u2581", "\u2581ab", "<0x21>"]
    assert tokenizer.decode(tokenizer.encode("ab c  ab!"), skip_special_tokens=True) == "ab c  ab!"


@pytest.mark.parametrize("factors", [[1.0, 8.0, 8.0], [2.0, 1e30, 1e30]])
def test_other_frequencies_of_gemma_4_are_refused(factors: list[float], tmp_path: Path) -> None:
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(writer: Any, name: str, data: Any, **options: Any) -> None:
        if name == "rope_freqs.weight":
            data = np.float32(factors)
        add_tensor(writer, name, data, **options)

    model = make_model("gemma4")
    file = write_gguf(tmp_path / "tiny.gguf", "gemma4", model, "F32", methods={"add_tensor": add})
    with pytest.raises(UnsupportedModelError, match=r"its rope_freqs.weight are \["):
        load_model(file)
