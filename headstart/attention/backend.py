"""The seam between models and attention kernels.

A backend is told once per step who is in the batch (`begin_step`), then once per layer for the
attention itself (`attend`), then that the step is over (`end_step`). Everything that is the same
in all layers belongs into `begin_step`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from headstart.attention.layout import StepPlan

__all__ = ["AttentionBackend", "AttentionOptions", "CompiledCall", "RowShapes"]


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What a layer asks for beyond plain causal attention.

    - `scaling` multiplies the scores q·k.
    - `sliding_window`: a row sees itself and the `sliding_window - 1` tokens before it.
    - `softcap`: scores become `softcap * tanh(scores / softcap)` before masking (Gemma 2).
    - `sinks` `[query_heads]`: one more score per head that takes its share of the softmax and
      adds nothing (GPT-OSS).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class RowShapes(NamedTuple):
    """Queries `[tokens, heads, key_dim]`, keys and values `[tokens, kv_heads, their width]`."""

    tokens: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class CompiledCall(NamedTuple):
    """Addresses of a layer's `AttentionStep` and `AttentionCall`, see native/attention.h.

    Queries, keys, values and the output are left open. Both stay valid until the step ends.
    """

    step: int
    call: int


class AttentionBackend(Protocol):
    """Attention over paged K/V for one engine."""

    def begin_step(self, plan: StepPlan) -> None:
        """Take the step's plan; nothing of the memory changes yet."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write this layer's K/V into the plan's slots, then attend.

        `query` is `[tokens, query_heads, key_dim]`, `key` `[tokens, kv_heads, key_dim]`, `value`
        `[tokens, kv_heads, value_dim]`; any strides. The result is a new contiguous tensor
        `[tokens, query_heads, value_dim]`. All rows are written before any is read, so two
        sequences of one step may share blocks that one of them is filling.

        A position that a row does not see has no influence on it, even if its K or V are not
        finite. A row that sees such a position is not finite itself.
        """

    def compiled(
        self, layer_idx: int, rows: RowShapes, options: AttentionOptions
    ) -> CompiledCall | None:
        """What compiled code needs to do the same as `attend`; None if it has to be called.

        `rows` is what the code will bring: dense rows of its own, in the dtype of the memory.
        """

    def end_step(self) -> None:
        """Forget the plan; safe to call without one."""

    def nonfinite_rows(self) -> list[int]:
        """Rows of the step whose K or V were not finite when written, in any layer so far.

        In order. Rows of padding and of the scratch slot count like any other. The answer holds
        from a layer's `attend` until the next `begin_step`; `end_step` does not clear it.
        """
