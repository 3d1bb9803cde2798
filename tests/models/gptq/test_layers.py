"""A layer over whole windows equals that of transformers, and units change no output."""

from pathlib import Path

import pytest
import torch

from headstart.models.dense.layer import DecoderLayer
from headstart.models.dense.loader import describe_decoder
from headstart.models.files import weight_files
from headstart.models.gptq import apply_units, collect_inputs, make_step, stages
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.reader import TorchReader
from tests.models.gptq.small import FAMILY_NAMES, save_small

WINDOWS, LENGTH = 3, 40


@pytest.mark.parametrize("name", FAMILY_NAMES)
@torch.no_grad()
def test_layers_are_transformers_and_units_change_nothing(name: str, tmp_path: Path) -> None:
    original = save_small(tmp_path, name)
    tokens = torch.randint(3, 400, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
    states = original(tokens, output_hidden_states=True).hidden_states
    about, _ = describe_decoder(tmp_path)
    step = make_step(about, WINDOWS, LENGTH)
    with SafetensorsCheckpoint(weight_files(tmp_path)) as checkpoint:
        read = TorchReader(checkpoint, torch.float32, torch.device("cpu"))
        layer = DecoderLayer(about.shape, 0, "model.layers.0", read)
        read.release()
    rows = states[0].flatten(0, 1)
    heads = [names[0] for names in stages(about.shape)]
    before, inputs = collect_inputs(layer, heads, rows, step)
    torch.testing.assert_close(before, states[1].flatten(0, 1), rtol=1e-4, atol=1e-4)
    sizes = {one: seen.abs().mean(dim=0) for one, seen in inputs.items()}
    weights = {one: layer.get_submodule(one).weight.clone() for one in heads}
    units = apply_units(layer, about.shape, sizes, torch.bfloat16)
    torch.testing.assert_close(layer(rows, step), before, rtol=1e-4, atol=1e-4)
    for one in heads:
        _, collected = collect_inputs(layer, [one], rows, step, stop=True)
        torch.testing.assert_close(collected[one] * units[one], inputs[one], rtol=1e-3, atol=1e-4)
    changed = [
        one for one in heads if not torch.equal(weights[one], layer.get_submodule(one).weight)
    ]
    assert changed == (heads[1::2] if name == "olmo2" else heads)
    for norm, weight in layer.named_parameters():
        if norm.endswith("layernorm.weight") and name != "olmo2":
            is_divided = not norm.startswith("post") or about.shape.norms == "before"
            assert not is_divided or torch.equal(weight, weight.bfloat16().float())
