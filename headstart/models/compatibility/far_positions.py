"""Checks that a model takes positions from `position_ids` alone, up to its last position.

A batch holds rows of many sequences, so the index of a row in the batch is not its position. Some
layers nevertheless use that index plus the length of transformers' cache. In Llama 4, layers
without rotary angles scale their queries by it, with a visible effect from position 8,192 on.

The oracle is transformers' own decoding: the last rows of the longest sequence, with a cache that
reports all earlier tokens. The same rows without a cache, with the same `position_ids`, must give
attention the same queries, keys and values. In both passes each row attends only to itself, so the
earlier tokens need not exist.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headstart.attention.register import AttentionCall, read_options
from headstart.errors import UnsupportedModelError
from headstart.models.compatibility.substitute_attention import Attending
from headstart.models.context_length import context_length

__all__ = ["check_far_positions"]

_ROWS = 3
_PARTS = 4  # queries, keys, values, scaling


_Recorded = list[tuple[str, Tensor]]
"""The layers' inputs to attention, `_PARTS` per call, then the logits; the first axis is rows."""


class _CacheBehind(DynamicCache):
    """A cache that reports `length` tokens more than it holds."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length + int(super().get_seq_length(layer_idx))


class _AttendToSelf:
    """An attention function in which each row sees only itself; records its inputs."""

    def __init__(self) -> None:
        self.asked: _Recorded = []

    def __call__(self, call: AttentionCall) -> Tensor:
        where = f"of layer {call.layer.layer_idx}"
        scaling = torch.tensor([[read_options(call).scaling]], dtype=torch.float64)
        self.asked += [
            (f"the queries {where}", call.query[0].transpose(0, 1).flatten(1)),
            (f"the keys {where}", call.key[0].transpose(0, 1).flatten(1)),
            (f"the values {where}", call.value[0].transpose(0, 1).flatten(1)),
            (f"the scaling {where}", scaling),
        ]
        shared = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(shared, dim=1).transpose(1, 2).contiguous()


def check_far_positions(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if the last rows differ from those behind a cache."""
    last = context_length(model.config)
    first = max(0, last - _ROWS)
    found, expected = _run(model, first, last), _run(model, first, last, _CacheBehind(first))
    name = type(model).__name__
    if [what for what, _ in found] != [what for what, _ in expected]:
        raise UnsupportedModelError(
            f"{name} calls attention {len(expected) // _PARTS} times behind a cache of {first} "
            f"tokens and {len(found) // _PARTS} times without one"
        )
    for (what, ours), (_, theirs) in zip(found, expected, strict=True):
        apart = _apart(ours, theirs)
        if not apart <= 4 * torch.finfo(model.dtype).eps:  # so that NaN is wrong
            raise UnsupportedModelError(
                f"{name} makes {what} from the index of a row in the batch and not from its "
                f"position: from position {first} to {last - 1} they differ by {apart:.1e} of "
                "their size from those that transformers makes behind its cache"
            )


def _run(
    model: PreTrainedModel, first: int, last: int, cache: DynamicCache | None = None
) -> _Recorded:
    """A pass over the rows at positions `first` to `last - 1`."""
    positions = torch.arange(first, last, device=model.device)
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.arange(len(positions), device=model.device) % vocabulary
    function = _AttendToSelf()
    behind: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    try:
        with Attending(model, function), torch.inference_mode():
            output: Any = model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=cache is not None,
                **behind,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        where = "without a cache" if cache is None else f"behind a cache of {first} tokens"
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over positions {first} to {last - 1}, the last that it "
            f"is made for, {where}: {type(error).__name__}: {error}"
        ) from error
    return [*function.asked, ("the logits", output.logits[0])]


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest relative difference between a row of `found` and of `expected`."""
    if torch.equal(found, expected):
        return 0.0
    size = expected.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found.double() - expected.double()).norm(dim=-1) / size).max())
