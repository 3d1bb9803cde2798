"""Mixtures of experts whose rows have the same bits whatever the other rows are.

transformers gives each expert the rows that chose it. The number of these rows is a size of the
expert's matrix products, which decides on their last bits. Here every expert that a row chose
computes all rows, and the rows that chose it are taken: for a block of 16 rows that reads the same
weights, and costs time only for the further rows.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headstart.errors import UnsupportedModelError
from headstart.models.transformers_backend.decoder import forward_rows

__all__ = ["check_rows", "compute_all_rows"]

_NAME = "headstart_all_rows"
_ROWS = 16
_CUTS = (1, 6, 11, 15)


def compute_all_rows(model: PreTrainedModel) -> str | None:
    """Give every expert all rows from now on. Return the name of the earlier implementation.

    None, and nothing is changed, for a model whose experts transformers lets no one replace.
    """
    if not model._can_set_experts_implementation():
        return None
    earlier = model.config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _compute)
    model.set_experts_implementation(_NAME)
    return str(earlier or "eager")


def check_rows(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if rows have other bits when the rows behind them change."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (_ROWS,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(_ROWS, device=model.device)
    expected = forward_rows(model, tokens.to(model.device), places, places)
    for cut in _CUTS:
        padded = torch.where(torch.arange(_ROWS) < cut, tokens, 0).to(model.device)
        found = forward_rows(model, padded, places, places)
        if not torch.equal(found[:cut], expected[:cut]):
            raise UnsupportedModelError(
                f"{type(model).__name__} gives a token other logits in their last bits when the "
                "tokens behind it change, as layers of experts do that get other numbers of rows: "
                "deterministic=True is not possible"
            )


def _compute(experts: Any, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
    """Return the weighted sum of the experts that each row chose."""
    chosen, weights = (*routing, *named.values())
    compute = type(experts).forward.__wrapped__
    one = weights.new_ones((len(hidden_states), 1))
    output = torch.zeros_like(hidden_states)
    for expert in torch.unique(chosen).tolist():
        if not 0 <= expert < experts.num_experts:  # stands for none
            continue
        rows, places = torch.where(chosen == expert)
        every = compute(experts, hidden_states, chosen.new_full((len(one), 1), expert), one)
        weighted = every[rows] * weights[rows, places, None]
        output.index_add_(0, rows, weighted.to(output.dtype))
    return output
