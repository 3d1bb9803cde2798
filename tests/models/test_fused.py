"""What fused parts leave to the modules that they stand in front of, or refuse."""

import pytest
import torch
from transformers import LlamaForCausalLM

from headstart.attention import AttentionOptions, Span, StepPlan
from headstart.errors import EngineError
from headstart.models.fused import FusedLayer, FusedLayers, FusedMLP, FusedNorm, FusionSwitch
from headstart.models.packed import PackedLinear, PackedWeight
from headstart.models.zoo.swap import accelerate
from headstart.native import library
from tests.models.paged import BLOCK, Paged
from tests.tiny_models import TINY

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")


def llama() -> LlamaForCausalLM:
    model = TINY["llama"]().to(torch.bfloat16)
    assert isinstance(model, LlamaForCausalLM)
    return model


def other_width(linear: PackedLinear, inputs: int, outputs: int) -> PackedLinear:
    weight = linear.packed.unpack().repeat(2, 2)[:outputs, :inputs]
    return PackedLinear(PackedWeight(weight))


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "mlp"])
def test_a_layer_whose_parts_differ_in_width_is_not_fused(name: str) -> None:
    """Every part is read with the widths of one of them."""
    model = llama()
    accelerate(model)
    layer = model.model.layers[0]
    width = model.config.hidden_size + 2
    if name == "mlp":
        for child in ("gate_proj", "up_proj"):
            linear = layer.mlp.get_submodule(child)
            setattr(layer.mlp, child, other_width(linear, width, linear.out_features))
        down = layer.mlp.down_proj
        layer.mlp.down_proj = other_width(down, down.in_features, width)
    else:
        linear = layer.self_attn.get_submodule(name)
        setattr(layer.self_attn, name, other_width(linear, width, linear.out_features))
    with pytest.raises(LookupError, match="do not fit together"):
        FusedLayer(layer, FusionSwitch(), AttentionOptions(1.0))


def test_layers_of_different_inner_widths_are_no_one_call() -> None:
    """The call has memory for the first layer's: a wider one wrote behind its end."""
    model = llama()
    accelerate(model)
    mlp = model.model.layers[1].mlp
    for child in ("gate_proj", "up_proj"):
        linear = mlp.get_submodule(child)
        setattr(mlp, child, other_width(linear, linear.in_features, 2 * linear.out_features))
    down = mlp.down_proj
    mlp.down_proj = other_width(down, 2 * down.in_features, down.out_features)
    switch, options = FusionSwitch(), AttentionOptions(1.0)
    for layers, alike in ((model.model.layers[:1], True), (model.model.layers[:2], False)):
        fused = FusedLayers([FusedLayer(layer, switch, options) for layer in layers])
        assert fused._alike == alike


@pytest.mark.parametrize("kind", [FusedNorm, FusedMLP])
def test_rows_of_another_width_are_left_to_the_module(kind: type) -> None:
    model = llama()
    accelerate(model)
    width = model.config.hidden_size
    found = [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), kind)]
    for rows in (torch.zeros(2, width - 1, dtype=torch.bfloat16), torch.zeros(2, 2 * width)):
        with pytest.raises((RuntimeError, ValueError)):
            found[0](rows)


def test_more_rows_than_the_step_has_are_refused() -> None:
    """Attention of a step of three tokens reads and writes three rows, whoever calls it."""
    model = llama()
    engine = Paged(model, fusion=accelerate(model))
    sequence = engine.add([3, 4, 5, 6])
    plan = StepPlan(torch.tensor(sequence.slots(0, 3)), (Span(0, 3, 3, sequence.blocks),))
    engine.backend.begin_step(plan)
    tokens = torch.tensor(sequence.token_ids)
    with pytest.raises(EngineError, match=r"tokens=4.*take.*tokens=3"):
        engine.decoder.forward(tokens, torch.arange(BLOCK), torch.arange(BLOCK))
    engine.backend.end_step()
