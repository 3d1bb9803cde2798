"""Attention over paged K/V in plain torch operations: runs on every device and dtype.

Scores are float32 for every dtype of K and V, as in fused kernels: rounded to bfloat16, a score of
1,000 has an error of up to 2, which a softmax turns into a factor of 7. On a CPU all products are
in float32. CPUs with fast bfloat16 products run the compiled kernels instead of these operations.

The g query heads of a KV head are treated as g query rows. A layer is then a gather, a batched
product, a softmax and a batched product. On a CPU this is several times faster than
`scaled_dot_product_attention`, which repeats K and V per query head. Contiguous block ids have no
separate path, since products over a strided view of the memory are slower than a gather.

All layers with the same sliding window read the same memory rows, so the row numbers are computed
once in a step. A prefix that decoding sequences share (`shared.py`) is read once. Their remaining
contexts are grouped by similar length. One gather reads a group, padded to its longest context. The
padding of a row is at most `SMALL_GAP` tokens, or a quarter of this length if that is more. A span
of several rows is cut into chunks of rows. A chunk reads no key after its last row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.attention.backend import AttentionOptions, Span, StepPlan
from headstart.attention.memory import PagedKVMemory
from headstart.attention.shared import SharedPlan, SharedPlanner, SharingCost

# Break-even point measured by `bench/kernels/attention.py`. A group adds a few torch operations.
SHARING = SharingCost(group=8192, member=32)
# Rows of a prefill in one pair of products: enough for full GEMM speed, but few enough to limit
# wasted work above the causal diagonal.
CHUNK_ROWS = 128
# Maximum number of tokens in a decode group, so that its K of one layer stay in the caches.
GROUP_TOKENS = 16_384
# Up to this difference in length, in tokens, padding costs less than another group.
SMALL_GAP = 64


class TorchAttention:
    """The `AttentionBackend` for every device and dtype.

    With `share`, decoding rows attend once to the prefix that their sequences share.
    """

    def __init__(self, memory: PagedKVMemory, *, share: bool = True) -> None:
        self._memory = memory
        is_narrow = memory.device.type == "cuda" and not memory.has_scales
        float_dtype = torch.promote_types(memory.dtype, torch.float32)
        self._dtype = memory.dtype if is_narrow else float_dtype
        """The dtype of the products' inputs."""
        self._planners = [SharedPlanner(memory.block_size, SHARING) for _ in range(2 * share)]
        self._pools: list[PoolPlan] = []  # the step's plans for blocks, then for window blocks
        self._longest = 0
        # By pool, window and number of KV heads.
        self._tables: dict[tuple[int, int | None, int], StepTables] = {}
        # For K and V of each layer in the step: float `[tokens]`, 0 for finite rows, else NaN.
        self._finite: list[Tensor] = []

    def begin_step(self, plan: StepPlan) -> None:
        self.end_step()
        memory = self._memory
        self._longest = max((span.context for span in plan.spans), default=0)
        self._finite = []
        for pool, part in enumerate(memory.plans(plan)):
            # In the pool of window blocks, every layer masks a part of a context that is longer
            # than the widest window. Such a layer attends without shared prefixes.
            may_share = pool == 0 or self._longest <= memory.window
            shared = None
            if self._planners and may_share:
                shared = self._planners[pool].plan(part.decoding)
            self._pools.append(PoolPlan(part, part.slots.to(memory.device), shared))

    def end_step(self) -> None:
        self._pools = []
        self._tables = {}

    def nonfinite_rows(self) -> list[int]:
        if not self._finite:
            return []
        rows: list[int] = torch.stack(self._finite).sum(0).nonzero().flatten().tolist()
        return rows

    def compiled(
        self, layer_idx: int, rows: tuple[int, int], options: AttentionOptions, dtype: torch.dtype
    ) -> None:
        """Return None, since this backend is not compiled."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        memory = self._memory
        memory.check_window(layer_idx, options.sliding_window)
        assert self._pools, "call begin_step() first"
        pool = int(memory.has_windows(layer_idx))
        tables = self._find_tables(pool, options.sliding_window, memory.layouts[layer_idx].kv_heads)
        if not memory.has_scales:
            key, value = key.to(memory.dtype), value.to(memory.dtype)
        memory.write(layer_idx, self._pools[pool].slots, key, value)
        self._finite += (_zero_if_finite(key, (1, 2)), _zero_if_finite(value, (1, 2)))
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

    def _find_tables(self, pool: int, window: int | None, kv_heads: int) -> "StepTables":
        if window is not None and window >= self._longest:
            window = None
        key = (pool, window, kv_heads)
        if key not in self._tables:
            plan, _, shared = self._pools[pool]
            self._tables[key] = StepTables(
                plan, self._memory, kv_heads, window, shared if window is None else None
            )
        return self._tables[key]

    def _decode(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        group: "Group",
        options: AttentionOptions,
    ) -> None:
        batch = len(group.rows)
        scores, values = self._decode_scores(layer_idx, query, group, options)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.view(-1, scores.shape[1], 1).repeat(batch, 1, 1)
        mixed = _mix(scores, values, sinks)
        out.index_copy_(0, group.rows, mixed.view(batch, *out.shape[1:]).to(out.dtype))

    def _decode_scores(
        self, layer_idx: int, query: Tensor, group: "Group", options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Return a group's scores `[batch * kv_heads, heads, columns]` and values."""
        keys, values = self._gather(layer_idx, group)
        rows = query.index_select(0, group.rows).view(len(keys), -1, query.shape[2])
        scores = _scores(rows, keys, options)
        if group.hidden is not None:
            by_sequence = scores.view(len(group.rows), -1, group.columns)
            by_sequence.masked_fill_(group.hidden.unsqueeze(1), -torch.inf)
        return scores, values

    def _decode_shared(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        tables: "StepTables",
        options: AttentionOptions,
    ) -> None:
        """Compute decoding rows with shared groups. Each row merges the results of its groups."""
        result = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        totals = torch.full((*out.shape[:2], 1), -torch.inf, device=out.device)

        def merge(rows: Tensor, mixed: Tensor, total: Tensor) -> None:
            old_total = totals.index_select(0, rows)
            new_total = torch.logaddexp(old_total, total)
            mixed = mixed * (total - new_total).exp()
            mixed += result.index_select(0, rows) * (old_total - new_total).exp()
            result.index_copy_(0, rows, mixed)
            totals.index_copy_(0, rows, new_total)

        for shared in tables.shared:
            merge(shared.rows, *self._attend_shared(layer_idx, query, shared, options))
        for group in tables.decode:
            mixed, total = _mix_part(*self._decode_scores(layer_idx, query, group, options))
            shape = (len(group.rows), *out.shape[1:])
            merge(group.rows, mixed.view(shape), total.view(*shape[:2], 1))
        if options.sinks is not None:  # see `_mix`
            result = result * torch.sigmoid(totals - options.sinks.float().view(1, -1, 1))
        rows = torch.cat([group.rows for group in tables.decode])
        out.index_copy_(0, rows, result.index_select(0, rows).to(out.dtype))

    def _attend_shared(
        self, layer_idx: int, query: Tensor, group: "Group", options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Return outputs `[members, heads, dim]` over shared tokens only, and log-sum-exps."""
        keys, values = self._gather(layer_idx, group)
        kv_heads, members = keys.shape[0], len(group.rows)
        rows = query.index_select(0, group.rows).view(members, kv_heads, -1, query.shape[2])
        rows = rows.transpose(0, 1).reshape(kv_heads, -1, query.shape[2])
        mixed, total = (
            part.view(kv_heads, members, -1, part.shape[-1]).transpose(0, 1)
            for part in _mix_part(_scores(rows, keys, options), values)
        )
        return mixed.reshape(members, -1, mixed.shape[-1]), total.reshape(members, -1, 1)

    def _prefill(
        self,
        layer_idx: int,
        query: Tensor,
        out: Tensor,
        span: "PrefillSpan",
        options: AttentionOptions,
    ) -> None:
        keys, values = self._gather(layer_idx, span)
        _isolate_nonfinite(keys[:, span.seen_columns :], values[:, span.seen_columns :])
        kv_heads = keys.shape[0]
        heads = query.shape[1] // kv_heads
        for chunk in span.chunks:
            count = chunk.rows.stop - chunk.rows.start
            rows = query[chunk.rows].reshape(count, kv_heads, heads, -1).permute(1, 2, 0, 3)
            rows = rows.reshape(kv_heads, heads * count, -1)
            scores = _scores(rows, keys[:, chunk.columns], options)
            if chunk.hidden is not None:
                tail = scores.view(kv_heads * heads, count, -1)[:, :, -chunk.hidden.shape[1] :]
                tail.masked_fill_(chunk.hidden, -torch.inf)
            sinks = None
            if options.sinks is not None:
                sinks = options.sinks.view(kv_heads, heads, 1).repeat_interleave(count, dim=1)
            mixed = _mix(scores, values[:, chunk.columns], sinks)
            mixed = mixed.view(kv_heads, heads, count, -1).permute(2, 0, 1, 3)
            out[chunk.rows].view(count, kv_heads, heads, -1).copy_(mixed)

    def _gather(self, layer_idx: int, part: "Group | PrefillSpan") -> tuple[Tensor, Tensor]:
        """Return K and V as new dense tensors `[sequences * kv_heads, columns, dim]`."""
        keys, values = self._memory.gather(layer_idx, part.kv_rows, self._dtype)
        return (
            keys.view(-1, part.columns, keys.shape[1]),
            values.view(-1, part.columns, values.shape[1]),
        )


class PoolPlan(NamedTuple):
    """A step's plan for one pool, its slots on the memory's device, and its shared prefixes."""

    plan: StepPlan
    slots: Tensor
    shared: SharedPlan | None


class Group(NamedTuple):
    """Decoding rows that are computed together, over shared tokens or each over its own tokens.

    rows: row numbers in the flat batch, int64 `[batch]`. kv_rows: row numbers in the memory, int64,
    in the order `[sequences, kv_heads, columns]`. hidden: bool `[batch, columns]`, True for
    padding; None without padding.
    """

    rows: Tensor
    columns: int
    kv_rows: Tensor
    hidden: Tensor | None = None


class PrefillChunk(NamedTuple):
    """Rows of a prefill in the flat batch, and the columns of their span's context that they read.

    `hidden` bool `[rows, width]` masks the last `width` columns; rows see all columns before these.
    """

    rows: slice
    columns: slice
    hidden: Tensor | None


class PrefillSpan(NamedTuple):
    """One sequence with several rows, whose `columns` tokens are gathered once for all chunks.

    No chunk masks any of the first `seen_columns` tokens.
    """

    columns: int
    seen_columns: int
    kv_rows: Tensor
    chunks: list[PrefillChunk]


class DecodeSpan(NamedTuple):
    """A decoding span that attends to its tokens from `first` on."""

    span: Span
    first: int

    @property
    def length(self) -> int:
        return self.span.context - self.first


class StepTables:
    """The memory rows that a step reads in layers with the same window and number of KV heads.

    With shared groups, `decode` has only the tokens of each sequence outside its groups. The
    members of a shared group are indices in `plan.decoding`.
    """

    def __init__(
        self,
        plan: StepPlan,
        memory: PagedKVMemory,
        kv_heads: int,
        window: int | None,
        shared: SharedPlan | None,
    ) -> None:
        self._block_size, self._device = memory.block_size, memory.device
        self._heads = torch.arange(kv_heads, device=memory.device).view(1, kv_heads, 1)
        self._window = window
        decoding = plan.decoding
        firsts = shared.own_first if shared is not None else (0,) * len(decoding)
        spans = [
            DecodeSpan(span, max(first, 0 if window is None else span.context - window))
            for span, first in zip(decoding, firsts, strict=True)
        ]
        self.decode = [self._make_decode(group) for group in group_by_length(spans)]
        self.prefill = [self._make_prefill(span) for span in plan.separate]
        self.shared: list[Group] = []
        for group in shared.groups if shared is not None else ():
            position = torch.arange(group.first, group.last, device=self._device)
            rows = self._tensor([decoding[member].first_row for member in group.members])
            table = decoding[group.members[0]].block_ids[: group.last // self._block_size]
            kv_rows = self._kv_rows(self._tensor([table]), position.unsqueeze(0))
            self.shared.append(Group(rows, len(position), kv_rows))

    def _make_decode(self, spans: Sequence[DecodeSpan]) -> Group:
        lengths = [span.length for span in spans]
        columns = lengths[0]
        tables = [
            span.block_ids[first // self._block_size : self._num_blocks(span)]
            for span, first in spans
        ]
        width = max(map(len, tables))
        table = self._tensor([[*ids, *[0] * (width - len(ids))] for ids in tables])
        offset = torch.arange(columns, device=self._device).unsqueeze(0)
        length = self._tensor(lengths).unsqueeze(1)
        # Padding reads the sequence's last token again, not another sequence's memory.
        position = torch.minimum(offset, length - 1)
        position += self._tensor([first % self._block_size for _, first in spans]).unsqueeze(1)
        rows = self._tensor([span.first_row for span, _ in spans])
        hidden = offset >= length if lengths[-1] < columns else None
        return Group(rows, columns, self._kv_rows(table, position), hidden)

    def _make_prefill(self, span: Span) -> PrefillSpan:
        start, window = span.context - span.num_rows, self._window
        first = max(0, start + 1 - window) if window is not None else 0
        columns = seen_columns = span.context - first
        chunks = []
        for row in range(0, span.num_rows, CHUNK_ROWS):
            end = min(row + CHUNK_ROWS, span.num_rows)
            low = max(first, start + row + 1 - window) if window is not None else 0
            hidden = self._hidden(end - row, start + end - low)
            last = start + end - first
            if hidden is not None:
                seen_columns = min(seen_columns, last - hidden.shape[1])
            rows = slice(span.first_row + row, span.first_row + end)
            chunks.append(PrefillChunk(rows, slice(low - first, last), hidden))
        table = self._tensor([span.block_ids[: self._num_blocks(span)]])
        position = torch.arange(first, span.context, device=self._device).unsqueeze(0)
        return PrefillSpan(columns, seen_columns, self._kv_rows(table, position), chunks)

    def _hidden(self, rows: int, columns: int) -> Tensor | None:
        """Return the mask for the last `rows` of `columns` tokens; None if they see everything."""
        window = self._window
        cut_left = window is not None and columns > window
        if rows == 1 and not cut_left:
            return None
        width = columns if cut_left else rows
        position = torch.arange(width - rows, width, device=self._device).unsqueeze(1)
        column = torch.arange(width, device=self._device).unsqueeze(0)
        hidden = column > position
        if window is not None and cut_left:
            hidden |= column <= position - window
        return hidden

    def _num_blocks(self, span: Span) -> int:
        return (span.context - 1) // self._block_size + 1

    def _kv_rows(self, table: Tensor, position: Tensor) -> Tensor:
        """Return the rows of positions in a memory that is viewed as `[slots * kv_heads, dim]`.

        Gathering these rows returns `[sequences, kv_heads, columns, dim]`, the order for the
        products, without a transposition.
        """
        block = torch.div(position, self._block_size, rounding_mode="floor")
        slots = table.gather(1, block) * self._block_size + position % self._block_size
        return (slots.unsqueeze(1) * self._heads.shape[1] + self._heads).flatten()

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def group_by_length(spans: Sequence[DecodeSpan]) -> list[list[DecodeSpan]]:
    """Group spans of similar length, longest first.

    >>> spans = [DecodeSpan(Span(0, 1, context, ()), 0) for context in (10, 1000, 900, 60)]
    >>> [[span.length for span in group] for group in group_by_length(spans)]
    [[1000, 900], [60, 10]]
    """
    groups: list[list[DecodeSpan]] = []
    longest = 0
    for span in sorted(spans, key=lambda span: span.length, reverse=True):
        is_similar = span.length * 4 >= longest * 3 or longest - span.length <= SMALL_GAP
        if groups and is_similar and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS:
            groups[-1].append(span)
        else:
            groups.append([span])
            longest = span.length
    return groups


def _zero_if_finite(rows: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Return 0 where all elements along `dim` are finite, else NaN.

    This is several times faster than `isfinite`.

    >>> _zero_if_finite(torch.tensor([[3e38, 3e38], [1.0, torch.inf]]), (1,))
    tensor([0., nan])
    """
    return (rows - rows).sum(dim)


def _isolate_nonfinite(keys: Tensor, values: Tensor) -> None:
    """Change values that are not finite, in place, so that they affect only rows that see them.

    In other rows the weight of such a value is 0, but the product would be NaN. So the value
    becomes zeros and its key NaN: its score is NaN in rows that see it, and masked in other rows.
    On a CPU, return early if all values are finite. Elsewhere this check would wait for the device.
    """
    nonfinite = _zero_if_finite(values, (-1,)).isnan().unsqueeze(-1)
    if nonfinite.is_cpu and not nonfinite.any():
        return
    keys.masked_fill_(nonfinite, torch.nan)
    values.masked_fill_(nonfinite, 0.0)


def _scores(rows: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Return scores `[batch, rows, columns]`, scaled and softcapped, in float32 or wider."""
    if keys.dtype.itemsize < 4:
        scores = torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
        scores *= options.scaling
    else:
        scores = torch.bmm(rows * options.scaling, keys.transpose(1, 2))
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores


def _mix_part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 outputs over part of the rows' context, and their log-sum-exps.

    The largest score s has the largest weight w = exp(s - total), so total = s - log w. This needs
    only two maxima; logsumexp would allocate large tensors, whose page faults are slow.
    """
    weights = torch.softmax(scores, dim=-1)
    largest = weights.amax(dim=-1, keepdim=True).log_()
    total = scores.amax(dim=-1, keepdim=True) - largest
    return torch.bmm(weights.to(values.dtype), values).float(), total


def _mix(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores` times `values`; hidden scores are -inf.

    A sink has a score s and no value. So it only multiplies the result by sigmoid(lse - s), where
    lse is the log-sum-exp of the scores.
    """
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    mixed = torch.bmm(weights, values)
    if sinks is None:
        return mixed
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    return mixed * torch.sigmoid(total - sinks.float())
