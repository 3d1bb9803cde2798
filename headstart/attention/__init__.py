"""Attention over paged K/V: the memory, the backends, and the hook into transformers.

This package does not depend on requests or models. A step is a `StepPlan`, and each layer calls
`AttentionBackend.attend` with its queries, keys and values.
"""

from headstart.attention.backend import (
    AttentionBackend,
    AttentionOptions,
    LayerLayout,
    Span,
    StateLayout,
    StepPlan,
)
from headstart.attention.memory import PagedKVMemory, StateMemory
from headstart.attention.native import NativeAttention, make_backend
from headstart.attention.recurrent import Recurrence
from headstart.attention.torch_ops import TorchAttention

__all__ = ["AttentionBackend", "AttentionOptions", "NativeAttention", "TorchAttention"]
__all__ += ["LayerLayout", "StateLayout", "PagedKVMemory", "StateMemory", "Recurrence"]
__all__ += ["Span", "StepPlan", "make_backend"]
