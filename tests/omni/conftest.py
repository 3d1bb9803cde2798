"""Fixtures of the tests of omni pipelines."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel


@pytest.fixture(autouse=True, scope="session")
def _few_solver_steps() -> Iterator[None]:
    """Every wave of Qwen2.5-Omni, transformers' own too, comes of 3 points in time and not of 10.

    The others are the same computation again, and were half of the time of these tests.
    """
    forward = Qwen2_5OmniToken2WavModel.forward

    def shorter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, num_steps=3, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2_5OmniToken2WavModel, "forward", shorter)
        yield
