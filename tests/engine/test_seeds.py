"""The engine's seed is checked at configuration, and derived seeds never exceed torch's range."""

from typing import Any

import pytest
import torch

from headstart.cache import BlockHasher, Shares
from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError
from headstart.frontend.frontend import Frontend, ModelFacts


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -(2**63) - 1, 10**60, "a", 1.5, None, True])
def test_a_seed_outside_its_range(seed: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^seed is .*; allowed: a whole number from -9223.* to 9"
    ):
        EngineConfig(seed=seed)


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_every_seed_of_a_request_may_be_the_engine_s(seed: int) -> None:
    assert EngineConfig(seed=seed).seed == SamplingParams(seed=seed).seed


@pytest.mark.parametrize("first", [-(2**63), -1, 0, 2**63 - 1])
def test_answers_take_one_seed_after_the_other(first: int) -> None:
    """torch accepts seeds below 2**64, and a negative one counts as itself plus 2**64."""
    facts = ModelFacts(8, frozenset(), 8, 1, 1, BlockHasher(16), Shares())
    config = EngineConfig(seed=first)
    maker = Frontend(None, facts, config, None, None, lambda: None)  # type: ignore[arg-type]
    generators = [
        maker.prepare([1], SamplingParams()).requests[0].sampling.generator for _ in range(3)
    ]
    assert [one.initial_seed() for one in generators if one is not None] == [
        seed % 2**64 for seed in range(first, first + 3)
    ]
    drawn = torch.rand(4, generator=generators[0])
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(first)))
