"""Weights that are a subclass of Tensor, as in quantized checkpoints, are not packed.

Such a weight reports bfloat16 but holds integers and scales; its address is invalid or has another
meaning. Regression: native loading of a torchao checkpoint of 8 bits ended in torch's RuntimeError.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from headstart.models.loader import load_model
from headstart.models.transformers_backend.linears import pack_linears
from headstart.native import library
from headstart.weights.bf16 import can_pack
from headstart.weights.format import Linear
from headstart.weights.memory import has_memory, map_pages
from tests.models.paged import Paged
from tests.tiny_models import TINY

BF16 = torch.bfloat16
PROMPT = [3, 14, 15, 92, 6, 53, 58]


class Quantized(Tensor):
    """A weight in 8 bits that reports bfloat16 and has no memory."""

    whole: Tensor
    scale: float

    @staticmethod
    def __new__(cls, weight: Tensor) -> "Quantized":
        tensor: Quantized = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        tensor.scale = float(weight.abs().max()) / 127
        tensor.whole = (weight.float() / tensor.scale).round().to(torch.int8)
        return tensor

    def dequantized(self) -> Tensor:
        return (self.whole.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].dequantized())

        def plain(value: Any) -> Any:
            return value.dequantized() if isinstance(value, Quantized) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def quantize(module: nn.Module, name: str) -> None:
    weight = module.get_parameter(name).detach()
    setattr(module, name, nn.Parameter(Quantized(weight), requires_grad=False))


def llama() -> PreTrainedModel:
    return TINY["llama"]().to(BF16)


def test_a_subclass_has_no_memory_to_read() -> None:
    weight = torch.ones(4, 6, dtype=BF16)
    assert has_memory(weight) and has_memory(nn.Parameter(weight)) and can_pack(weight)
    for quantized in (Quantized(weight), nn.Parameter(Quantized(weight), requires_grad=False)):
        assert not has_memory(quantized)
        assert not can_pack(quantized)
        map_pages([quantized, weight])


def expected(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0].float()
    return logits


@pytest.mark.parametrize("kind", ["linear", "bias", "norm"])
def test_weights_of_a_subclass_stay_and_their_modules_run(kind: str) -> None:
    model = TINY["qwen2"]().to(BF16) if kind == "bias" else llama()
    for name, module in model.get_decoder().named_modules():
        if kind == "norm" and name.endswith("norm"):
            quantize(module, "weight")
        elif kind == "bias" and isinstance(module, nn.Linear) and module.bias is not None:
            quantize(module, "bias")
        elif kind == "linear" and isinstance(module, nn.Linear) and "down" not in name:
            quantize(module, "weight")
    count = sum(isinstance(weight, Quantized) for weight in model.parameters())
    assert count > 3
    wanted = expected(model)
    pack_linears(model)
    engine = Paged(model)
    assert sum(isinstance(weight, Quantized) for weight in model.parameters()) == count
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert bool(linears) == (library() is not None)
    sequence = engine.add(PROMPT)
    engine.step([(sequence, 5)])
    engine.step([(sequence, 2)])
    actual = torch.stack(sequence.logits)
    assert float((actual - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_a_torchao_checkpoint_of_float8_answers_as_in_transformers(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig  # needs torchao

    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    llama().save_pretrained(plain)
    settings = TorchAoConfig(quantization.Float8WeightOnlyConfig())
    reference = AutoModelForCausalLM.from_pretrained(
        plain, dtype=BF16, quantization_config=settings
    )
    reference.save_pretrained(quantized)
    decoder = load_model(quantized)
    module = decoder.module
    assert isinstance(module, LlamaForCausalLM)
    assert not has_memory(module.model.layers[0].mlp.up_proj.weight)
    actual, wanted = expected(module), expected(reference)
    assert float((actual - wanted).norm() / wanted.norm()) < 0.03
