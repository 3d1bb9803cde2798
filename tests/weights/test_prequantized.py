"""Checkpoints of AWQ, GPTQ and compressed-tensors compared with their libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Lfm2Config, LlamaConfig, Qwen2Config

from headstart import LLM, SamplingParams
from headstart.models.decoder import DecoderModel
from headstart.models.loader import load_model
from headstart.weights import prequantized
from headstart.weights.grouped import GroupedWeight
from headstart.weights.int8 import Int8Weight
from headstart.weights.prequantized import Grouped
from headstart.weights.scheme import UnsupportedLayerError, read_scheme
from tests.models.paged import Paged
from tests.weights.stored import quantized_matrices
from tests.weights.written import (
    AWQ,
    BASE,
    COMPRESSED,
    GPTQ,
    Quantize,
    awq,
    compressed,
    compressed_config,
    decompressed,
    gptq,
    gptq_weight,
    pack,
    read,
    save,
    scheme,
    scheme_of,
)

compressed_tensors: Any = pytest.importorskip("compressed_tensors")
from compressed_tensors.entrypoints.convert.converters.autoawq import (  # noqa: E402
    AutoAWQConverter,
)

TOKENS = torch.arange(3, 23)


def logits(model: DecoderModel) -> Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits)


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 96]), st.sampled_from([16, 24, 40]))
@example(seed=55, inputs=64, outputs=40)  # a step of 6e-6 next to one near 1
def test_awq_is_read_as_by_the_library(seed: int, inputs: int, outputs: int) -> None:
    """Words of any bits, read by the converter of compressed-tensors."""
    torch.manual_seed(seed)
    parts = {
        "qweight": torch.randint(-(2**31), 2**31, (inputs, outputs // 8)).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (inputs // 32, outputs // 8)).int(),
        "scales": torch.randn(inputs // 32, outputs).half(),
    }
    named = {f"a.{name}": part.clone() for name, part in parts.items()}
    converted = AutoAWQConverter(group_size=32).process(named)
    theirs_are = scheme_of(strategy="group", group_size=32, symmetric=False)
    theirs = {name.removeprefix("a."): part for name, part in converted.items()}
    theirs["weight_scale"] = theirs["weight_scale"].float()
    expected = decompressed(theirs_are, "pack-quantized", theirs)
    matrix = read(scheme("awq"), (outputs, inputs), parts)
    torch.testing.assert_close(matrix.weight(), expected.float(), rtol=1e-6, atol=1e-6)
    unpacked = GroupedWeight(matrix.in_groups()).unpack()
    # A start is a step times a zero point, which is rounded to 11 bits.
    limit = 16 * parts["scales"].float().abs().T.repeat_interleave(32, dim=1) * 2**-11
    assert ((unpacked - expected.float()).abs() <= limit).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_is_read_by_its_format(bits: int, less: int, shuffled: bool) -> None:
    torch.manual_seed(bits)
    parts = gptq(torch.randn(24, 96), bits, 32, less, shuffled)
    expected = gptq_weight(parts, bits, less)
    matrix = read(scheme("gptq", bits, zero_offset=less), (24, 96), parts)
    torch.testing.assert_close(matrix.weight(), expected, rtol=1e-6, atol=1e-6)
    groups = matrix.in_groups()
    assert (groups is None) == shuffled and matrix.as_int8() is None
    if groups is not None:
        # A start is a step times a zero point, which is rounded to 11 bits.
        limit = float(parts["scales"].float().abs().max()) * 2 ** (bits - 12)
        assert (GroupedWeight(groups).unpack() - expected).abs().max() <= limit


def test_gptq_of_8_bits_for_an_output_is_int8() -> None:
    parts = gptq(torch.randn(24, 96), 8, 96)
    parts["qzeros"] = pack(torch.full((1, 24), 127), 8)
    matrix = read(scheme("gptq", 8, 96, zero_offset=1), (24, 96), parts)
    layer = Int8Weight(matrix.as_int8())
    torch.testing.assert_close(layer.unpack(), gptq_weight(parts, 8, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_are_read_as_by_the_library(kind: str) -> None:
    torch.manual_seed(1)
    layout, theirs = COMPRESSED[kind]
    parts = compressed(theirs, layout, torch.randn(40, 128))
    in_float = parts | {"weight_scale": parts["weight_scale"].float()}
    expected = decompressed(theirs, layout, in_float).float()
    checkpoint_scheme = read_scheme({"quantization_config": compressed_config(kind)})
    assert checkpoint_scheme is not None
    matrix = read(checkpoint_scheme, (40, 128), parts)
    torch.testing.assert_close(matrix.weight(), expected, rtol=1e-6, atol=1e-6)
    packed = matrix.in_groups(), matrix.as_int8()
    wanted = {"w4 in 16": (False, False), "w8 in 32": (True, False)}
    assert tuple(one is not None for one in packed) == wanted.get(kind, (True, "w8" in kind))
    if packed[0] is not None:
        layer = GroupedWeight(packed[0])
        torch.testing.assert_close(layer.unpack(), expected, rtol=0, atol=2e-3)
    if packed[1] is not None:
        torch.testing.assert_close(Int8Weight(packed[1]).unpack(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("bits", "zero"), [(4, 16.0), (8, 0.0)])
def test_the_last_group_may_be_short_and_starts_near_the_maximum(bits: int, zero: float) -> None:
    """Starts are near the largest float16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2**bits, (24, 70), generator=generator, dtype=torch.uint8)
    steps, zeros = torch.rand(24, 3, generator=generator), torch.full((24, 3), zero)
    steps[:, 1] = 0.99999
    matrix = Grouped(values, steps, zeros, torch.arange(70) // 32, bits)
    stored = matrix.in_groups()
    assert stored is not None
    apart = (GroupedWeight(stored).unpack() - matrix.weight()).abs()
    assert apart.max() <= 2 ** (bits - 11)  # steps and starts are rounded to 11 bits


def test_eight_bits_with_a_zero_point_per_output_are_stored_in_groups() -> None:
    """An int8 weight has no zero points: the weight would be moved by steps."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(256, (24, 70), generator=generator, dtype=torch.uint8)
    steps, groups = torch.rand(24, 1, generator=generator), torch.zeros(70, dtype=torch.int64)
    zeros = torch.full((24, 1), 128.0)
    assert Grouped(values, steps, zeros, groups, 8).as_int8() is not None
    zeros[5] = 127
    matrix = Grouped(values, steps, zeros, groups, 8)
    stored = matrix.in_groups()
    assert matrix.as_int8() is None and stored is not None
    assert (GroupedWeight(stored).unpack() - matrix.weight()).abs().max() <= 2**-3


def test_neighboring_outputs_may_share_a_step_in_torchao() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (8, 64), generator=generator, dtype=torch.int8)
    steps = torch.rand(4, 2, generator=generator)
    parts = {"_weight_qdata": values, "_weight_scale": steps}
    weight = read(scheme("torchao", 8), (8, 64), parts).weight()
    wide = steps.repeat_interleave(2, dim=0).repeat_interleave(32, dim=1)
    assert torch.equal(weight, values * wide)


FOLDERS: dict[str, tuple[dict[str, Any], Quantize, str]] = {
    "awq": (AWQ, awq, "int4"),
    "gptq": (GPTQ, gptq, "int4"),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less=0), "int4"),
    "gptq, groups shuffled": (GPTQ | {"desc_act": True}, lambda w: gptq(w, shuffled=True), "int8"),
    **{
        kind: (
            compressed_config(kind),
            lambda w, kind=kind: compressed(COMPRESSED[kind][1], COMPRESSED[kind][0], w),  # type: ignore[misc]
            "int4" if kind in ("w4 in 32", "w4 in 64, zeros", "w4 channel") else "int8",
        )
        for kind in COMPRESSED
    },
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("make", [LlamaConfig, Qwen2Config])
def test_a_checkpoint_answers_as_the_model_of_its_weights(
    kind: str, make: Any, tmp_path: Path
) -> None:
    about, quantize, wanted = FOLDERS[kind]
    config = make(**BASE, tie_word_embeddings=make is Qwen2Config)
    original = save(tmp_path, config, about, quantize)
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None
    layers = quantized_matrices(model.module)
    assert len(layers) == 14 and {layer.kind for layer in layers.values()} == {wanted}
    for name, layer in layers.items():
        weight = original.get_submodule(name).weight
        with torch.no_grad():
            assert float((layer.unpack() - weight).norm()) <= 0.2 * float(weight.norm())
            weight.copy_(layer.unpack())
    for name, parameter in original.named_parameters():
        if "_proj.weight" not in name:
            with torch.no_grad():
                parameter.copy_(parameter.bfloat16())
    with torch.no_grad():
        expected = original(TOKENS[None]).logits[0]
    actual = logits(model)
    assert float((actual - expected).norm()) <= 0.03 * float(expected.norm())  # rows are rounded


@pytest.mark.parametrize("kind", ["w8 channel", "w8a8"])
def test_weights_are_looked_up_by_the_names_of_their_family(kind: str, tmp_path: Path) -> None:
    """Unpacked values of 8 bits have the name of the weight, which the family renames."""
    about, quantize, _ = FOLDERS[kind]
    original = save(tmp_path, Lfm2Config(**BASE, full_attn_idxs=[1]), about, quantize)
    layers = quantized_matrices(load_model(tmp_path, "float32").module)
    assert len(layers) == 6
    weight = original.get_submodule("model.layers.0.conv.in_proj").weight.detach()
    unpacked = layers["model.layers.0.conv.in_proj"].unpack()
    assert float((unpacked - weight).norm()) <= 0.02 * float(weight.norm())


@pytest.mark.parametrize(
    ("quantize", "about", "why"),
    [
        (
            lambda w: gptq(w, 8, shuffled=True),
            {"bits": 8, "desc_act": True},
            "8 bits in groups of 32 with zero points, and its inputs are out of order",
        ),
        (
            lambda w: gptq(w, 8, 16),
            {"bits": 8, "group_size": 16},
            "8 bits in groups of 16 with zero points",
        ),
    ],
)
def test_the_reason_for_rounding_a_weight_again_is_logged(
    quantize: Quantize,
    about: dict[str, Any],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the text was "8 bits in 2 groups", which also described stored groups."""
    lines: list[str] = []
    monkeypatch.setattr(prequantized._log, "info", lambda text, *args: lines.append(text % args))
    save(tmp_path, LlamaConfig(**BASE), GPTQ | about, quantize)
    load_model(tmp_path, "float32")
    [message] = [line for line in lines if line.startswith("model.layers.1.mlp.down_proj")]
    assert message.endswith(f"is rounded again to int8, since its values have {why}")


def test_weights_that_are_rounded_again_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(prequantized._log, "info", lambda text, *args: lines.append(text % args))
    about, quantize, _ = FOLDERS["w4 in 16"]
    save(tmp_path, LlamaConfig(**BASE), about, quantize)
    load_model(tmp_path, "float32")
    assert lines[0] == "14 weights of the compressed-tensors checkpoint have 4 bits"
    named = "model.layers.1.mlp.up_proj.weight is rounded again to int8, since its values have 4 "
    assert len(lines) == 15 and any(line.startswith(named) for line in lines)


@pytest.mark.parametrize("kind", ["w8a8", "w4 in 32"])
def test_a_file_may_be_written_to_once_it_is_read(kind: str, tmp_path: Path) -> None:
    """Regression: 8-bit scales in float32 stayed in the file, so answers changed with it."""
    about, quantize, _ = FOLDERS[kind]

    def in_float(weight: Tensor) -> dict[str, Tensor]:
        parts = quantize(weight)
        return parts | {"weight_scale": parts["weight_scale"].float()}

    save(tmp_path, LlamaConfig(**BASE), about, in_float)
    model = load_model(tmp_path, "float32")
    expected = logits(model)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(logits(model), expected)


def test_an_llm_answers_and_caches_prefixes(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**BASE), AWQ | {"bits": 4}, awq)
    llm = LLM(tmp_path, num_blocks=24, block_size=8, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, second = (
        llm.generate({"prompt_token_ids": TOKENS.tolist()}, params)[0] for _ in range(2)
    )
    assert second.num_cached_tokens == len(TOKENS) - 1
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    llm.close()


def test_rows_are_bfloat16_even_if_the_checkpoint_declares_float16(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**BASE), AWQ, awq)
    for dtype in ("float16", None):
        content = json.loads((tmp_path / "config.json").read_text()) | {"dtype": dtype}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert load_model(tmp_path).dtype in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_can_be_quantized_where_transformers_keeps_them_compressed(
    weights: str, tmp_path: Path
) -> None:
    """Regression: the error was `'Linear' object has no attribute 'weight'`."""

    def with_more(weight: Tensor) -> dict[str, Tensor]:
        parts = compressed(COMPRESSED["w8 in 32"][1], "pack-quantized", weight)
        return parts | {"weight_of_no_family": torch.zeros(1)}

    save(tmp_path, LlamaConfig(**BASE), compressed_config("w8 in 32"), with_more)
    expected = logits(load_model(tmp_path, "float32"))
    model = load_model(tmp_path, "float32", weights=weights)
    assert model.fallback_reason is not None
    kinds = [matrix.kind for matrix in quantized_matrices(model.module).values()]
    assert kinds == ["int8"]  # the head's
    assert float((logits(model) - expected).norm()) <= 0.03 * float(expected.norm())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_can_be_quantized_again(weights: str, tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**BASE), GPTQ, gptq)
    model = load_model(tmp_path, "float32", weights=weights)
    kinds = {matrix.kind for matrix in quantized_matrices(model.module).values()}
    more = {"int5"} if weights == "int4" else set()
    assert kinds == {
        weights,
        "int8",
        *more,
    }  # the head's, and those of layers to which int4 gives more bits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"bits": 3}, "bits is 3; allowed: 4"),
        ({"bits": True}, "bits is True; allowed: 4"),
        ({"group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 2}, "bits is 2; allowed: 4, 8"),
        ({"quant_method": "gptq", "dynamic": {"+:x": {}}}, "dynamic is"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"quant_method": "gptq", "pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
    ],
)
def test_other_schemes_are_not_read(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=reason):
        read_scheme({"quantization_config": AWQ | changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_scheme": {"num_bits": 8}},
        {"transform_config": {"config_groups": {"a": 1}}},
        {"config_groups": {}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}},
        {"config_groups": {"a": {"weights": None}}},
        {"config_groups": {"W4A16": ["Linear"]}},
        {"config_groups": {"a": None}},
        {
            "config_groups": {
                "a": {"weights": {"type": "int", "num_bits": 8}, "input_activations": "x"}
            }
        },
        {
            "config_groups": {
                "a": {
                    "weights": {"type": "int", "num_bits": 8},
                    "input_activations": {"type": "int", "num_bits": 8, "dynamic": False},
                }
            }
        },
    ],
)
def test_other_compressed_tensors_are_not_read(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedLayerError):
        read_scheme({"quantization_config": compressed_config("w4 in 32") | changes})
