"""Copies of layers whose weights compiled code reads by address."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from headstart.errors import ModelError
from headstart.models.loader import load_model
from headstart.native import avx2_library, library
from headstart.weights.bf16 import PackedWeight
from headstart.weights.format import Embedding, Linear, WeightFormat, WeightKind
from headstart.weights.grouped import GroupedWeight, PackedForm, QuantizationGrid, pack_groups
from headstart.weights.int8 import Int8Weight, quantize_int8
from headstart.weights.quantize import quantize
from tests.tiny_models import TINY

NUMBERS = torch.arange(0, 40, 3)


def wipe(module: nn.Module) -> None:
    """Overwrite all weights of a module."""
    stored = module.matrix.tensors if isinstance(module, Linear | Embedding) else []
    with torch.no_grad():
        for tensor in (*module.parameters(), *stored):
            tensor.zero_()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's, of FBGEMM's weights
@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["auto", *get_args(WeightKind)])
@pytest.mark.usefixtures("amx_products")
def test_a_copy_multiplies_by_separate_weights(
    weights: str, dtype: str, make: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    """Regression: the error was `ctypes objects containing pointers cannot be pickled`."""
    TINY["qwen2"]().to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype, weights=weights).module
    copied, seen = make(model), set()
    for name, layer in model.named_modules():
        other = copied.get_submodule(name)
        width = getattr(layer, "in_features", None)
        if isinstance(layer, nn.Embedding | Embedding):
            inputs = NUMBERS
        elif width is not None:
            inputs = torch.randn(3, width).to(getattr(torch, dtype))
        else:
            continue
        with torch.no_grad():
            before = layer(inputs)
            wipe(layer)
            assert torch.equal(other(inputs), before)
            seen.add(type(layer.matrix if isinstance(layer, Linear | Embedding) else layer))
    if weights == "auto" and dtype == "bfloat16" and library() is not None:
        assert seen == {PackedWeight}


def _int8() -> WeightFormat:
    return Int8Weight(quantize_int8(torch.randn(40, 70)), table=True)


def _int4() -> WeightFormat:
    return quantize(torch.randn(40, 70), None, "int4")


def _int8_in_groups() -> WeightFormat:
    values = torch.randint(256, (40, 96), dtype=torch.uint8)
    grid = QuantizationGrid(values, torch.rand(40, 3), torch.rand(40, 3))
    return GroupedWeight(pack_groups(grid, PackedForm(8, False)))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's, of FBGEMM's weights
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("make", [_int8, _int4, _int8_in_groups])
def test_a_shared_embedding_and_head_are_copied_together(
    make: Callable[[], WeightFormat],
    kernels: str,
    copied: Callable[[nn.Module], nn.Module],
    use_kernels: Callable[..., None],
) -> None:
    use_kernels(kernels)
    head = Linear(make())
    table = Embedding(head.matrix, torch.float32)
    numbers, rows = NUMBERS % 40, torch.randn(3, head.in_features)
    before, product = table(numbers), head(rows)
    model = nn.ModuleList([table, head])
    assert not model.state_dict() and [*dict(model.named_modules())] == ["", "0", "1"]
    other = copied(model)
    other_table, other_head = other.children()
    assert isinstance(other_table, Embedding) and isinstance(other_head, Linear)
    assert other_table.matrix is other_head.matrix
    wipe(head)
    assert not table(numbers).any()
    assert torch.equal(other_table(numbers), before) and torch.equal(other_head(rows), product)


@pytest.mark.skipif(avx2_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["auto", *get_args(WeightKind)])
def test_a_pickle_for_missing_kernels_is_refused(
    weights: str, dtype: str, tmp_path: Path, use_kernels: Callable[..., None]
) -> None:
    """Regression: the error was `AssertionError: the caller asks first`."""
    TINY["qwen2"]().to(torch.bfloat16).save_pretrained(tmp_path)
    pickled = pickle.dumps(load_model(tmp_path, dtype, weights=weights).module)
    in_torch = (weights, dtype) == ("auto", "bfloat16") and library() is None
    use_kernels("0")
    if in_torch:
        pickle.loads(pickled)
        return
    with pytest.raises(ModelError, match="load the model here instead of unpickling it"):
        pickle.loads(pickled)
