"""Fixtures of the tests of omni pipelines."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel


@pytest.fixture(autouse=True, scope="session")
def _few_solver_steps() -> Iterator[None]:
    """Use 3 solver steps instead of 10 for waveforms of Qwen2.5-Omni, here and in transformers.

    The other steps repeat the same computation, and took half of the time of these tests.
    """
    forward = Qwen2_5OmniToken2WavModel.forward

    def shorter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, num_steps=3, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2_5OmniToken2WavModel, "forward", shorter)
        yield
