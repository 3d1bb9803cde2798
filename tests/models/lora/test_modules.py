"""Adapters on the rows of a flat batch compared with PEFT's logits, merged and unmerged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.errors import UnsupportedAdapterError
from headstart.models.lora_files import LoraPair, LoraWeights, read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from headstart.models.transformers_backend.decoder import TransformersDecoder
from tests.models.paged import Paged, Sequence
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import TINY, VOCABULARY, save_tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 24, "use_rslora": True, "target_modules": "all-linear"},
    "head": {"r": 5, "target_modules": ["down_proj", "lm_head"]},
}
# Long runs and short ones; short ones near each other, then far apart.
BATCHES: dict[str, list[tuple[str | None, int]]] = {
    "mixed": [("small", 5), (None, 12), ("wide", 40), ("head", 3), (None, 60), ("wide", 7)],
    "side by side": [("small", 9), ("wide", 4), (None, 3), ("head", 6), ("small", 2)],
    "one among others": [(None, 9), ("head", 4), (None, 40)],
    "one twice": [("wide", 3), (None, 2), ("wide", 5)],
    "one far apart": [("wide", 3), (None, 50), ("wide", 5)],
    "alone": [("wide", 50)],
}


class Adapted:
    """A tiny model with adapters, each batch of which names the adapters of its sequences."""

    def __init__(self, model: Any, weights: dict[str, LoraWeights] | None = None) -> None:
        self.paged = Paged(model)
        self.layers = LoraLayers(self.paged.decoder)
        self.adapters = {name: ResidentAdapter(w) for name, w in (weights or {}).items()}

    def step(self, work: list[tuple[Sequence, str | None, int]]) -> None:
        runs = [
            AdapterRun(self.adapters[name] if name else None, rows, rows) for _, name, rows in work
        ]
        self.layers.begin_step(runs)
        try:
            self.paged.step([(sequence, rows) for sequence, _, rows in work])
        finally:
            self.layers.end_step()


class Files:
    """A model and its adapters on disk."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self.architecture = architecture
        self.base = save_tiny(architecture, folder / "base")
        self.paths: dict[str | None, Path] = {
            name: make_adapter(self.base, folder / name, seed, **options)
            for seed, (name, options) in enumerate(OPTIONS.items())
        }
        self._oracles: dict[tuple[str | None, bool], Oracle] = {}

    def open(self, dtype: torch.dtype = torch.float32) -> Adapted:
        adapted = Adapted(TINY[self.architecture]().to(dtype))
        for name, path in self.paths.items():
            weights = read_weights(path, adapted.paged.decoder, 64)
            adapted.adapters[str(name)] = ResidentAdapter(weights)
        return adapted

    def expect(self, name: str | None, tokens: list[int], *, merged: bool = False) -> Tensor:
        key = name, merged
        if key not in self._oracles:
            self._oracles[key] = Oracle(self.base, self.paths.get(name), merged=merged)
        return self._oracles[key].logits(tokens)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(request.param, tmp_path_factory.mktemp(request.param))


def draw(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("merged", [False, True], ids=["unmerged", "merged"])
def test_logits_are_those_of_peft(files: Files, batch: str, merged: bool) -> None:
    """A prefill of all, then two steps with one row each."""
    adapted = files.open()
    names = [name for name, _ in BATCHES[batch]]
    prompts = [draw(count + 2, seed) for seed, (_, count) in enumerate(BATCHES[batch])]
    sequences = [adapted.paged.add(prompt) for prompt in prompts]
    adapted.step([(s, n, len(p) - 2) for s, n, p in zip(sequences, names, prompts, strict=True)])
    for _ in range(2):
        adapted.step([(s, n, 1) for s, n in zip(sequences, names, strict=True)])
    for sequence, name, prompt in zip(sequences, names, prompts, strict=True):
        expected = files.expect(name, prompt, merged=merged)
        scale = float(expected.abs().max())
        actual = torch.stack(sequence.logits)
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5 * scale)


def test_a_step_without_adapters_runs_the_original_modules(files: Files) -> None:
    adapted, plain = files.open(), Paged(TINY[files.architecture]())
    prompt = draw(17, 1)
    adapted.step([(adapted.paged.add(draw(9, 2)), "wide", 9)])
    sequence, expected = adapted.paged.add(prompt), plain.add(prompt)
    adapted.step([(sequence, None, 17)])
    plain.step([(expected, 17)])
    assert torch.equal(torch.stack(sequence.logits), torch.stack(expected.logits))
    decoder = adapted.paged.decoder
    assert not any(decoder.layer(name)._forward_hooks for name in decoder.linear_widths())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full(files: Files, dtype: torch.dtype) -> None:
    adapted = files.open(dtype)
    work = [(adapted.paged.add(draw(n, n)), name, n) for name, n in BATCHES["mixed"]]
    adapted.step(work)
    for sequence, name, _ in work:
        expected = files.expect(name, sequence.token_ids)
        actual = torch.stack(sequence.logits)
        error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.median()) < 10 * torch.finfo(dtype).eps


def test_an_adapter_overflows_only_in_its_rows(tmp_path: Path) -> None:
    """In one product with other adapters, its ranks would make their rows infinite, too."""
    decoder = TransformersDecoder(TINY["llama"](), ())
    widths = decoder.linear_widths()["model.layers.0.self_attn.q_proj"]
    big = torch.full((2, widths.inputs), 6e4, dtype=torch.float16)
    small = torch.full((widths.outputs, 2), 1e-3, dtype=torch.float16)
    weights = {
        name: LoraWeights(name, {"model.layers.0.self_attn.q_proj": LoraPair(down, small)})
        for name, down in (("loud", big), ("calm", big / 1e6))
    }
    adapted = Adapted(TINY["llama"]().half(), weights)
    sequences = [adapted.paged.add(draw(6, seed)) for seed in range(2)]
    adapted.step([(sequences[0], "loud", 6), (sequences[1], "calm", 6)])
    assert not torch.isfinite(torch.stack(sequences[0].logits)).all()
    assert torch.isfinite(torch.stack(sequences[1].logits)).all()


class Loose(nn.Module):
    """Layers to which their caller may pass any rows."""

    device = torch.device("cpu")
    output_layer = None
    calls_each_layer = False

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(3, 5)
        self.q_proj = nn.Linear(3, 5)
        self.k_proj = nn.Linear(3, 5)

    def layer(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def test_a_layer_that_gets_other_rows_than_the_batch_is_an_error() -> None:
    """For example single experts of a mixture: the owners of their rows are not known."""
    model = Loose()
    pair = LoraPair(torch.ones(2, 3), torch.ones(5, 2))
    layers = LoraLayers(model)
    layers.begin_step([AdapterRun(ResidentAdapter(LoraWeights("a", {"only": pair})), 4, 1)])
    with torch.inference_mode():
        model.only(torch.ones(1, 4, 3))
        with pytest.raises(UnsupportedAdapterError, match="only does not receive all rows"):
            model.only(torch.ones(1, 3, 3))


def test_siblings_may_read_different_inputs() -> None:
    """Shared inputs of q and k are detected in the call, not by their names."""
    model = Loose()
    pair = LoraPair(torch.ones(2, 3), torch.ones(5, 2))
    layers = LoraLayers(model)
    adapter = ResidentAdapter(LoraWeights("a", {"q_proj": pair, "k_proj": pair}))
    x, y = torch.rand(1, 4, 3), torch.rand(1, 4, 3)
    with torch.inference_mode():
        plain = model.q_proj(x), model.k_proj(y)
        layers.begin_step([AdapterRun(adapter, 4, 1)])
        outputs = model.q_proj(x), model.k_proj(y)
    for base, inputs, adapted in zip(plain, (x, y), outputs, strict=True):
        torch.testing.assert_close(adapted, base + inputs @ pair.down.t() @ pair.up.t())


def test_stacks_are_rebuilt_only_when_adapters_join(files: Files) -> None:
    adapted = files.open()
    sequences = [(adapted.paged.add(draw(8, seed)), name) for seed, name in enumerate(OPTIONS)]
    first, both, all_three = (sequences[:1], sequences[:2], sequences)
    stacks = []
    for work in (all_three, both, all_three, first, all_three):
        adapted.step([(sequence, name, 1) for sequence, name in work])
        stacks.append(adapted.layers._mixed_stack)
    assert all(stack is stacks[0] for stack in stacks)
    adapted.layers.forget(adapted.adapters["head"])
    assert adapted.layers._mixed_stack is None
