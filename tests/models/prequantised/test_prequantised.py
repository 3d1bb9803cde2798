"""Checkpoints of AWQ, GPTQ and compressed-tensors, against the libraries that know them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from headstart import LLM, SamplingParams
from headstart.errors import DamagedModelError, HeadstartError
from headstart.models.decoder import DecoderModel
from headstart.models.dense.shape import OtherKind
from headstart.models.linear import QuantizedLinear
from headstart.models.linear.int4 import Int4Linear
from headstart.models.linear.int8 import Int8Linear
from headstart.models.loader import load_model
from headstart.models.prequantised.grouped import read_grouped
from headstart.models.prequantised.layout import Module
from headstart.models.prequantised.scheme import Scheme, read_scheme
from tests.models.paged import Paged
from tests.models.prequantised.written import Tensors, awq, gptq, gptq_weight, pack

compressed_tensors: Any = pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.entrypoints.convert.converters.autoawq import (  # noqa: E402
    AutoAWQConverter,
)
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402

VOCABULARY = 160
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
TOKENS = torch.arange(3, 23)
Quantise = Callable[[Tensor], Tensors]


def scheme_of(**weights: Any) -> Any:
    inputs = weights.pop("inputs", None)
    given = {"num_bits": 4, "type": "int", "symmetric": True, **weights}
    return QuantizationScheme(targets=["Linear"], weights=given, input_activations=inputs)


def compressed(scheme: Any, layout: str, weight: Tensor) -> Tensors:
    """Compressed by the library itself, with steps and zeros of the smallest and largest."""
    given = scheme.weights
    group = given.group_size or weight.shape[1]
    groups = weight.view(len(weight), -1, group)
    half = 1 << (given.num_bits - 1)
    parts: Tensors = {"weight": weight}
    if given.symmetric:
        parts["weight_scale"] = (groups.abs().amax(-1) / (half - 0.5)).bfloat16()
    else:
        low, high = groups.aminmax(dim=-1)
        steps = ((high - low) / (2 * half - 1)).bfloat16()
        parts["weight_scale"] = steps
        parts["weight_zero_point"] = (-half - low / steps).round().clamp(-half, half - 1).char()
    done: Tensors = BaseCompressor.get_value_from_registry(layout).compress(parts, scheme)
    return {name: part.contiguous() for name, part in done.items()}


def decompressed(scheme: Any, layout: str, parts: Tensors) -> Tensor:
    done = BaseCompressor.get_value_from_registry(layout).decompress(dict(parts), scheme)
    weight: Tensor = done["weight"]
    return weight


def save(folder: Path, config: Any, scheme: dict[str, Any], quantise: Quantise) -> Any:
    """A model whose linear layers but the head are quantised; returns it in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "_proj" in name and name.endswith(".weight"):
            tensors |= {f"{module}.{part}": made for part, made in quantise(tensor).items()}
        elif name not in tensors:
            tensors[name] = tensor.to(torch.bfloat16)
    if hasattr(config, "use_sliding_window"):  # it has biases of its own
        tensors |= {n: t.bfloat16() for n, t in model.state_dict().items() if n.endswith("bias")}
    content = config.to_dict() | {"quantization_config": scheme, "dtype": "bfloat16"}
    content |= {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def logits(model: DecoderModel) -> Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits)


def in_groups(group: int = 32, **about: Any) -> dict[str, Any]:
    return {"bits": 4, "group_size": group, **about}


AWQ = in_groups(quant_method="awq", version="gemm", zero_point=True)
GPTQ = in_groups(quant_method="gptq", desc_act=False, sym=False)
COMPRESSED: dict[str, tuple[str, Any]] = {
    "w4 in 32": ("pack-quantized", scheme_of(strategy="group", group_size=32)),
    "w4 in 64, zeros": (
        "pack-quantized",
        scheme_of(strategy="group", group_size=64, symmetric=False),
    ),
    "w4 channel": ("pack-quantized", scheme_of(strategy="channel")),
    "w4 in 16": ("pack-quantized", scheme_of(strategy="group", group_size=16)),
    "w8 in 32": ("pack-quantized", scheme_of(strategy="group", group_size=32, num_bits=8)),
    "w8 channel": ("pack-quantized", scheme_of(strategy="channel", num_bits=8)),
    "w8a8": (
        "int-quantized",
        scheme_of(
            strategy="channel",
            num_bits=8,
            inputs={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        ),
    ),
}


def read(scheme: Scheme, shape: tuple[int, int], parts: Tensors) -> Any:
    bits = scheme.bits or (8 if "weight" in parts else 4)
    if "weight_packed" in parts:
        bits = 4 if parts["weight_packed"].shape[1] * 8 == shape[1] else 8
    return read_grouped(scheme, Module(shape, bits, ()), parts.get)


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 96]), st.sampled_from([16, 24, 40]))
def test_awq_is_what_the_library_makes_of_it(seed: int, inputs: int, outputs: int) -> None:
    """Words of any bits, by the converter of compressed-tensors."""
    torch.manual_seed(seed)
    parts = {
        "qweight": torch.randint(-(2**31), 2**31, (inputs, outputs // 8)).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (inputs // 32, outputs // 8)).int(),
        "scales": torch.randn(inputs // 32, outputs).half(),
    }
    named = {f"a.{name}": part.clone() for name, part in parts.items()}
    made = AutoAWQConverter(group_size=32).process(named)
    scheme = scheme_of(strategy="group", group_size=32, symmetric=False)
    theirs = {name.removeprefix("a."): part for name, part in made.items()}
    theirs["weight_scale"] = theirs["weight_scale"].float()
    expected = decompressed(scheme, "pack-quantized", theirs)
    found = read(Scheme("awq", 4), (outputs, inputs), parts)
    torch.testing.assert_close(found.weight(), expected.float(), rtol=1e-6, atol=1e-6)
    kept = Int4Linear(found.as_int4()).unpack()
    # A start is a step times a zero point, which is rounded to 11 bits.
    limit = 16 * parts["scales"].float().abs().T.repeat_interleave(32, dim=1) * 2**-11
    assert ((kept - expected.float()).abs() <= limit).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_is_what_its_format_says(bits: int, less: int, shuffled: bool) -> None:
    torch.manual_seed(bits)
    parts = gptq(torch.randn(24, 96), bits, 32, less, shuffled)
    expected = gptq_weight(parts, bits, less)
    found = read(Scheme("gptq", bits, less), (24, 96), parts)
    torch.testing.assert_close(found.weight(), expected, rtol=1e-6, atol=1e-6)
    assert (found.as_int4() is not None) == (bits == 4 and not shuffled)
    assert found.as_int8() is None


def test_gptq_of_8_bits_for_an_output_is_int8() -> None:
    parts = gptq(torch.randn(24, 96), 8, 96)
    parts["qzeros"] = pack(torch.full((1, 24), 127), 8)
    found = read(Scheme("gptq", 8, 1), (24, 96), parts)
    layer = Int8Linear(found.as_int8())
    expected = gptq_weight(parts, 8, 1)
    low = expected <= -127.5 * parts["scales"].float().T
    torch.testing.assert_close(layer.unpack()[~low], expected[~low], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_are_what_the_library_makes_of_them(kind: str) -> None:
    torch.manual_seed(1)
    layout, scheme = COMPRESSED[kind]
    weight = torch.randn(40, 128)
    parts = compressed(scheme, layout, weight)
    in_float = parts | {"weight_scale": parts["weight_scale"].float()}
    expected = decompressed(scheme, layout, in_float).float()
    found = read(Scheme("compressed-tensors"), (40, 128), parts)
    torch.testing.assert_close(found.weight(), expected, rtol=1e-6, atol=1e-6)
    packed = found.as_int4(), found.as_int8()
    wanted = {"w4 in 16": (False, False), "w8 in 32": (False, False)}
    assert tuple(one is not None for one in packed) == wanted.get(
        kind, ("w4" in kind, "w8" in kind)
    )
    if packed[0] is not None:
        torch.testing.assert_close(Int4Linear(packed[0]).unpack(), expected, rtol=0, atol=2e-3)
    if packed[1] is not None:
        steps = parts["weight_scale"].float()
        apart = (Int8Linear(packed[1]).unpack() - expected).abs()
        assert (apart <= 1e-5 + steps * (expected <= -127.5 * steps)).all()


def _compressed_config(kind: str) -> dict[str, Any]:
    layout, scheme = COMPRESSED[kind]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }


FOLDERS: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "awq": (AWQ, awq, "int4"),
    "gptq": (GPTQ, gptq, "int4"),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less=0), "int4"),
    "gptq, groups shuffled": (GPTQ | {"desc_act": True}, lambda w: gptq(w, shuffled=True), "int8"),
    **{
        kind: (
            _compressed_config(kind),
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
    scheme, quantise, wanted = FOLDERS[kind]
    config = make(**BASE, tie_word_embeddings=make is Qwen2Config)
    original = save(tmp_path, config, scheme, quantise)
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None
    layers = {
        name: one for name, one in model.module.named_modules() if isinstance(one, QuantizedLinear)
    }
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
    found = logits(model)
    assert float((found - expected).norm()) <= 0.03 * float(expected.norm())  # rows are rounded


def test_an_llm_answers_and_keeps_prefixes(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**BASE), AWQ | {"bits": 4}, awq)
    llm = LLM(tmp_path, num_blocks=24, block_size=8, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, second = (
        llm.generate({"prompt_token_ids": TOKENS.tolist()}, params)[0] for _ in range(2)
    )
    assert second.num_cached_tokens == len(TOKENS) - 1
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    llm.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_may_be_asked_for_all_the_same(weights: str, tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**BASE), GPTQ, gptq)
    model = load_model(tmp_path, "float32", weights=weights)
    kinds = {one.kind for one in model.module.modules() if isinstance(one, QuantizedLinear)}
    assert kinds == {weights, "int8"}  # the head's


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"bits": 3}, "3 bits, and not 4"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits, and not 4 or 8"),
        ({"quant_method": "gptq", "dynamic": {"+:x": {}}}, "several kinds"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
    ],
)
def test_other_schemes_are_not_read(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(OtherKind, match=reason):
        read_scheme({"quantization_config": AWQ | changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_scheme": {"num_bits": 8}},
        {"transform_config": {"config_groups": {"a": 1}}},
        {"config_groups": {}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}},
        {"config_groups": {"a": {"weights": None}}},
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
    with pytest.raises(OtherKind):
        read_scheme({"quantization_config": _compressed_config("w4 in 32") | changes})


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit_are_refused(part: str, tmp_path: Path) -> None:
    def cut(weight: Tensor) -> Tensors:
        parts = gptq(weight)
        return parts | {part: parts[part][:-1].contiguous()}

    save(tmp_path, LlamaConfig(**BASE), GPTQ, cut)
    with pytest.raises(HeadstartError):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize("damage", ["scales", "g_idx"])
def test_numbers_that_cannot_be_are_refused(damage: str, tmp_path: Path) -> None:
    def spoil(weight: Tensor) -> Tensors:
        parts = gptq(weight)
        parts[damage].view(-1)[3] = float("nan") if damage == "scales" else 99
        return parts

    save(tmp_path, LlamaConfig(**BASE), GPTQ, spoil)
    with pytest.raises(DamagedModelError, match="not finite, or inputs of no group"):
        load_model(tmp_path, "float32")
