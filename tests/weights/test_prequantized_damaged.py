"""Checkpoints that are damaged, or whose configuration and tensors disagree."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart import LLM
from headstart.engine.parts import identify
from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.loader import load_model
from headstart.weights.grouped import quantize_groups
from headstart.weights.int8 import quantize_int8
from tests.engine.internals import kv_memory
from tests.weights.written import (
    BASE,
    COMPRESSED,
    GPTQ,
    Quantize,
    Tensors,
    compressed,
    compressed_config,
    gptq,
    gptq_weight,
    read,
    save,
    scheme,
)


def _damaged(change: Callable[[Tensors], Tensors]) -> Quantize:
    return lambda weight: change(gptq(weight))


DAMAGE: dict[str, Callable[[Tensors], Tensors]] = {
    **{
        f"{part} cut": lambda parts, part=part: parts | {part: parts[part][:-1]}  # type: ignore[misc]
        for part in ("qweight", "qzeros", "scales", "g_idx")
    },
    **{
        f"{part} in {dtype}": lambda parts, part=part, dtype=dtype: (  # type: ignore[misc]
            parts | {part: parts[part].to(dtype)}
        )
        for part in ("qweight", "qzeros", "g_idx")
        for dtype in (torch.float32, torch.int8, torch.int64, torch.bool)
        if (part, dtype) != ("g_idx", torch.int64)
    },
    "no qzeros": lambda parts: {n: t for n, t in parts.items() if n != "qzeros"},
    "no scales": lambda parts: {n: t for n, t in parts.items() if n != "scales"},
    "scales of integers": lambda parts: parts | {"scales": parts["scales"].int()},
    "scales not finite": lambda parts: parts | {"scales": parts["scales"] * torch.inf},
    "scales too large": lambda parts: parts | {"scales": parts["scales"].float() * 1e38},
    "an input of no group": lambda parts: parts | {"g_idx": parts["g_idx"] + 1},
    "other groups": lambda parts: parts | {n: parts[n].repeat(2, 1) for n in ("scales", "qzeros")},
    "an additional float": lambda parts: parts | {"weight": torch.zeros(3)},
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_damaged_weight_is_refused(damage: str, weights: str, tmp_path: Path) -> None:
    """Regression: integer types were read as others, or raised errors of torch."""
    save(tmp_path, LlamaConfig(**BASE), GPTQ, _damaged(DAMAGE[damage]))
    with pytest.raises(DamagedModelError, match="proj"):
        load_model(tmp_path, "float32", weights=weights)


def test_tensors_that_config_json_declares_are_required(tmp_path: Path) -> None:
    """Regression: without zero points a weight was read as symmetric, without an order as sorted.

    Undeclared zero points were used too; compressed-tensors has others there, or none.
    """
    kind = "w4 in 64, zeros"
    layout, theirs = COMPRESSED[kind]
    symmetric = compressed_config(kind)
    symmetric["config_groups"]["group_0"]["weights"]["symmetric"] = True

    def without_zeros(weight: Tensor) -> Tensors:
        parts = compressed(theirs, layout, weight)
        del parts["weight_zero_point"]
        return parts

    def without_shape(weight: Tensor) -> Tensors:
        parts = compressed(theirs, layout, weight)
        del parts["weight_shape"]
        return parts

    def without_order(weight: Tensor) -> Tensors:
        parts = gptq(weight, shuffled=True)
        del parts["g_idx"]
        return parts

    cases: list[tuple[dict[str, Any], Quantize, str]] = [
        (compressed_config(kind), without_zeros, "there is no weight_zero_point"),
        (symmetric, partial(compressed, theirs, layout), "there is weight_zero_point, but config"),
        (compressed_config(kind), without_shape, "there is no weight_shape"),
        (GPTQ | {"desc_act": True}, without_order, "there is no g_idx"),
        (GPTQ | {"group_size": 48}, gptq, "groups; config.json has groups of"),
    ]
    for config, quantize, reason in cases:
        save(tmp_path, LlamaConfig(**BASE), config, quantize)
        with pytest.raises(DamagedModelError, match=reason):
            load_model(tmp_path, "float32")


@pytest.mark.parametrize("shape", [[64.0, 64.0], [64], [64, 64, 1], [-64, 64], [2**40, 64], [0, 0]])
def test_an_impossible_shape_is_refused(shape: list[float], tmp_path: Path) -> None:
    layout, theirs = COMPRESSED["w4 in 32"]
    save(
        tmp_path,
        LlamaConfig(**BASE),
        compressed_config("w4 in 32"),
        lambda weight: compressed(theirs, layout, weight) | {"weight_shape": torch.tensor(shape)},
    )
    with pytest.raises(DamagedModelError, match="weight_shape"):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize("method", ["modelopt", "bitsandbytes", ["compressed-tensors"]])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_method_that_transformers_overlooks_is_refused(
    method: object, weights: str, tmp_path: Path
) -> None:
    """Regression: integers were used as weights without their scales, so all answers were wrong."""
    layout, theirs = COMPRESSED["w8a8"]
    about = compressed_config("w8a8") | {"quant_method": method}
    save(tmp_path, LlamaConfig(**BASE), about, lambda weight: compressed(theirs, layout, weight))
    with pytest.raises(UnsupportedModelError, match="which neither headstart nor"):
        load_model(tmp_path, "float32", weights=weights)


def test_zero_points_of_0_borrow_from_their_neighbors_in_gptq() -> None:
    """GPTQModel takes 1 from whole words, and adds 1 to whole words when it reads them."""
    torch.manual_seed(0)
    weight = torch.randn(24, 96)
    weight[5] = weight[5].abs()
    parts = gptq(weight, less=0)
    expected = gptq_weight(parts, 4, 0)
    words = parts["qzeros"].long() - 0x11111111
    parts["qzeros"] = ((words + 2**31) % 2**32 - 2**31).int()
    matrix = read(scheme("gptq", zero_offset=1), (24, 96), parts)
    torch.testing.assert_close(matrix.weight(), expected, rtol=1e-6, atol=1e-6)


def test_outputs_that_do_not_fill_a_word_of_zero_points(tmp_path: Path) -> None:
    """With one K/V head of 36, GPTQModel pads the last word."""

    def padded(weight: Tensor) -> Tensors:
        more = -len(weight) % 8
        parts = gptq(torch.cat((weight, torch.zeros(more, weight.shape[1]))))
        keep = len(weight)
        return parts | {
            "qweight": parts["qweight"][:, :keep],
            "scales": parts["scales"][:, :keep],
            "bias": parts["bias"][:keep],
        }

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 36}
    config = LlamaConfig(**BASE | sizes)
    save(tmp_path, config, GPTQ, padded)
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None


def test_readers_of_one_file_do_not_share_stored_prefixes(tmp_path: Path) -> None:
    """Regression: a layer in its own bits and one rounded here had one kind and one name."""
    folder = tmp_path / "model"
    folder.mkdir()
    layout, theirs = COMPRESSED["w8a8"]
    save(
        folder,
        LlamaConfig(**BASE),
        compressed_config("w8a8"),
        lambda weight: compressed(theirs, layout, weight),
    )
    names = []
    for weights in ("auto", "int8"):
        llm = LLM(folder, weights=weights, num_blocks=24, num_threads=1)
        memory, config = kv_memory(llm.engine), llm.engine.config
        names.append(identify(llm.engine.model, memory, config, folder).fingerprint)
        llm.close()
    assert names[0] != names[1]


def test_a_weight_in_its_own_bits_is_on_the_device_of_the_model() -> None:
    packed = quantize_groups(torch.randn(16, 64), 4), quantize_int8(torch.randn(16, 64))
    for weight in packed:
        matrix = weight.to(torch.device("meta")).store(None, torch.bfloat16)
        assert {part.device.type for part in matrix.tensors} == {"meta"}
