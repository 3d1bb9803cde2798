"""Attention over paged K/V in plain torch operations: runs on every device and dtype.

Scores are float32 whatever the dtype of K and V, as in every fused kernel: rounded to bfloat16, a
score of 1,000 is off by up to 2, which a softmax turns into a factor of 7. On a CPU all products
are in float32; products in narrow dtypes are faster only on CPUs where the compiled kernels run.

The g query heads of a KV head are treated as g query rows, so that a layer is a gather, a
batched product, a softmax and a batched product. On a CPU this is several times faster than
`scaled_dot_product_attention`, which repeats K and V per query head. Contiguous block ids get no
path of their own: measured in bf16, products over a strided view of the memory cost 3 to 5 times
as much as a gather.
"""

import torch
from torch import Tensor

from headstart.attention.backend import AttentionOptions, RowShapes, StepPlan
from headstart.attention.memory import PagedKVMemory
from headstart.attention.shared import SharedPlanner, SharingCost
from headstart.attention.tables import (
    DecodeGroup,
    HeadIndex,
    PrefillSpan,
    SharedGroup,
    StepTables,
    WindowTables,
)

__all__ = ["TorchAttention"]

# Measured with 2 KV heads of 64 and 7 query heads each, on one core with AVX2: 16 rows that share
# 2,000 tokens take 3.7 ms instead of 10.7 ms, but each group costs 0.4 ms in torch operations.
SHARING = SharingCost(group=8192, member=32)


class TorchAttention:
    """The `AttentionBackend` for every device and dtype.

    With `share`, decoding rows attend once to the prefix that their sequences share.
    """

    def __init__(self, memory: PagedKVMemory, *, share: bool = True) -> None:
        self._memory = memory
        wide = torch.promote_types(memory.dtype, torch.float32)
        is_narrow = memory.device.type == "cuda" and not memory.has_scales
        self._dtype = memory.dtype if is_narrow else wide
        """The dtype of the products' inputs."""
        self._planner = SharedPlanner(memory.block_size, SHARING) if share else None
        self._slots: Tensor | None = None
        self._tables: StepTables | None = None
        # Per layer of the step and for K and V: float `[tokens]`, 0 for finite rows, else NaN.
        self._finite: list[Tensor] = []

    def begin_step(self, plan: StepPlan) -> None:
        memory = self._memory
        self._finite = []
        self._slots = plan.slots.to(memory.device)
        shared = self._planner.plan(plan.decoding) if self._planner is not None else None
        self._tables = StepTables(plan, memory.block_size, memory.device, shared)

    def end_step(self) -> None:
        self._slots = self._tables = None

    def nonfinite_rows(self) -> list[int]:
        if not self._finite:
            return []
        found: list[int] = torch.stack(self._finite).sum(0).nonzero().flatten().tolist()
        return found

    def compiled(
        self, layer_idx: int, rows: RowShapes, options: AttentionOptions, dtype: torch.dtype
    ) -> None:
        """None: this backend has no compiled form."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self._tables is None or self._slots is None:
            raise RuntimeError("attend() outside of a step: call begin_step() first")
        memory = self._memory
        if not memory.has_scales:
            key, value = key.to(memory.dtype), value.to(memory.dtype)
        memory.write(layer_idx, self._slots, key, value)
        self._finite += (_zero_if_finite(key, (1, 2)), _zero_if_finite(value, (1, 2)))
        tables = self._tables.for_window(options.sliding_window)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        query = query.to(self._dtype)
        if tables.shared:
            self._decode_shared(layer_idx, query, out, tables, options)
        else:
            for group in tables.decode:
                self._decode(layer_idx, query, out, group, options)
        for span in tables.prefill:
            self._prefill(layer_idx, query, out, span, options)
        return out

    def _decode(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        group: DecodeGroup,
        options: AttentionOptions,
    ) -> None:
        batch = group.rows.shape[0]
        scores, values = self._decode_scores(layer_idx, query, group, options)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.view(-1, scores.shape[1], 1).repeat(batch, 1, 1)
        mixed = _mix(scores, values, sinks)
        out.index_copy_(0, group.rows, mixed.view(batch, *out.shape[1:]).to(out.dtype))

    def _decode_scores(
        self, layer_idx: int, query: Tensor, group: DecodeGroup, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Scores `[batch * kv_heads, heads, columns]` and their values."""
        keys, values = self._gather(layer_idx, group.index, group.columns)
        batch, kv_heads = group.rows.shape[0], keys.shape[0] // group.rows.shape[0]
        rows = query.index_select(0, group.rows).view(batch * kv_heads, -1, query.shape[2])
        scores = _scores(rows, keys, options)
        if group.hidden is not None:
            scores.view(batch, -1, group.columns).masked_fill_(
                group.hidden.unsqueeze(1), -torch.inf
            )
        return scores, values

    def _decode_shared(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        tables: WindowTables,
        options: AttentionOptions,
    ) -> None:
        """Attention of decoding rows with shared groups: one part per group, merged per row."""
        merged = MergedParts(out)
        for shared in tables.shared:
            merged.add(shared.rows, *self._attend_shared(layer_idx, query, shared, options))
        for group in tables.decode:
            scores, values = self._decode_scores(layer_idx, query, group, options)
            mixed, total = _mix_part(scores, values)
            shape = (group.rows.shape[0], *out.shape[1:])
            merged.add(group.rows, mixed.view(shape), total.view(*shape[:2], 1))
        rows = torch.cat([group.rows for group in tables.decode])
        out.index_copy_(0, rows, merged.result(options.sinks).index_select(0, rows).to(out.dtype))

    def _attend_shared(
        self, layer_idx: int, query: Tensor, group: SharedGroup, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Output float32 `[members, heads, dim]` over shared tokens only, and its log-sum-exp."""
        keys, values = self._gather(layer_idx, group.index, group.columns)
        kv_heads, members = keys.shape[0], group.rows.shape[0]
        rows = query.index_select(0, group.rows).view(members, kv_heads, -1, query.shape[2])
        rows = rows.transpose(0, 1).reshape(kv_heads, -1, query.shape[2])
        mixed, total = _mix_part(_scores(rows, keys, options), values)

        def by_row(part: Tensor) -> Tensor:
            part = part.view(kv_heads, members, -1, part.shape[-1]).transpose(0, 1)
            return part.reshape(members, -1, part.shape[-1])

        return by_row(mixed), by_row(total)

    def _prefill(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        span: PrefillSpan,
        options: AttentionOptions,
    ) -> None:
        keys, values = self._gather(layer_idx, span.index, span.columns)
        _isolate_nonfinite(keys[:, span.seen_columns :], values[:, span.seen_columns :])
        kv_heads = keys.shape[0]
        heads = query.shape[1] // kv_heads
        for chunk in span.chunks:
            count = chunk.last_row - chunk.first_row
            part = slice(chunk.first_row, chunk.last_row)
            rows = query[part].reshape(count, kv_heads, heads, -1).permute(1, 2, 0, 3)
            rows = rows.reshape(kv_heads, heads * count, -1)
            seen = slice(chunk.first_column, chunk.last_column)
            scores = _scores(rows, keys[:, seen], options)
            if chunk.hidden is not None:
                tail = scores.view(kv_heads * heads, count, -1)[:, :, -chunk.hidden.shape[1] :]
                tail.masked_fill_(chunk.hidden, -torch.inf)
            sinks = None
            if options.sinks is not None:
                sinks = options.sinks.view(kv_heads, heads, 1).repeat_interleave(count, dim=1)
            mixed = _mix(scores, values[:, seen], sinks).view(kv_heads, heads, count, -1)
            out[part].view(count, kv_heads, heads, -1).copy_(mixed.permute(2, 0, 1, 3))

    def _gather(self, layer_idx: int, index: HeadIndex, columns: int) -> tuple[Tensor, Tensor]:
        """K and V as new dense tensors `[batch * kv_heads, columns, dim]`, for products."""
        memory = self._memory
        rows = index.rows(memory.layouts[layer_idx].kv_heads)
        keys, values = memory.gather(layer_idx, rows, self._dtype)
        return keys.view(-1, columns, keys.shape[1]), values.view(-1, columns, values.shape[1])


def _zero_if_finite(rows: Tensor, dim: tuple[int, ...]) -> Tensor:
    """0 where all elements along `dim` are finite, else NaN; several times faster than `isfinite`.

    >>> _zero_if_finite(torch.tensor([[3e38, 3e38], [1.0, torch.inf]]), (1,))
    tensor([0., nan])
    """
    return (rows - rows).sum(dim)


def _isolate_nonfinite(keys: Tensor, values: Tensor) -> None:
    """Keep values that are not finite from rows that do not see them; changes both in place.

    A weight of 0 times such a value is NaN. So the value becomes zeros and its key NaN: the score
    is then NaN for every row that sees it, and masked for every other row. Only on a CPU is there a
    check whether any exists: on another device the check would have to wait for the device.
    """
    found = _zero_if_finite(values, (-1,)).isnan().unsqueeze(-1)
    if found.is_cpu and not found.any():
        return
    keys.masked_fill_(found, torch.nan)
    values.masked_fill_(found, 0.0)


def _scores(rows: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Scores `[batch, rows, columns]`, scaled and softcapped, never narrower than float32."""
    if keys.dtype.itemsize < 4:
        scores = torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
        scores *= options.scaling
    else:
        scores = torch.bmm(rows * options.scaling, keys.transpose(1, 2))
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores


def _mix_part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and weighted sum over part of the rows' context, and its log-sum-exp, in float32.

    The largest score s has the largest weight w = exp(s - total), so total = s - log w. This
    takes two maxima; logsumexp takes several passes over new float32 tensors, whose page faults
    cost more than the products (measured: 1.9 ms against 0.2 ms for 224 rows of 2,000).
    """
    weights = torch.softmax(scores, dim=-1)
    largest = weights.amax(dim=-1, keepdim=True).log_()
    total = scores.amax(dim=-1, keepdim=True) - largest
    return torch.bmm(weights.to(values.dtype), values).float(), total


class MergedParts:
    """The output of rows, merged part by part from outputs over parts of their context."""

    def __init__(self, out: Tensor) -> None:
        shape = out.shape
        self._mixed = torch.zeros(shape, dtype=torch.float32, device=out.device)
        self._total = torch.full((*shape[:2], 1), -torch.inf, device=out.device)

    def add(self, rows: Tensor, mixed: Tensor, total: Tensor) -> None:
        """Merge one part: its output `[rows, heads, dim]` and log-sum-exp `[rows, heads, 1]`."""
        before = self._total.index_select(0, rows)
        after = torch.logaddexp(before, total)
        mixed = mixed * (total - after).exp()
        mixed += self._mixed.index_select(0, rows) * (before - after).exp()
        self._mixed.index_copy_(0, rows, mixed)
        self._total.index_copy_(0, rows, after)

    def result(self, sinks: Tensor | None) -> Tensor:
        """The output of all rows; a sink scales it down as in `_mix`."""
        if sinks is None:
            return self._mixed
        return self._mixed * torch.sigmoid(self._total - sinks.float().view(1, -1, 1))


def _mix(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over `scores`, then the weighted sum of `values`; hidden scores are -inf.

    A sink with score s takes the share 1 - sigmoid(lse - s) of the softmax and has no value, so
    it only scales the result down.
    """
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    mixed = torch.bmm(weights, values)
    if sinks is None:
        return mixed
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    return mixed * torch.sigmoid(total - sinks.float())
