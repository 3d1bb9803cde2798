"""Layers whose state has a fixed size: gated delta rule, Mamba-2, causal convolution.

A step's rows are one flat batch, without padding. Each sequence reads its state from a source slot
and writes the state after its last row to a target slot. If both are the same slot, the state is
updated in place. With different slots, a sequence resumes from a checkpoint without a copy.

Arithmetic is in float32, and the result has the dtype of the rows. The compiled kernels
(`headstart/native/recurrent_kernels.h`) compute one token after another. So a sequence's result has
the same bits in any batch, and however its prompt is split into steps. On other devices and CPUs,
torch operations compute a recurrence in chunks, as matrix products. A chunk ends at a multiple of
`CHUNK` positions of a sequence, at the end of the step, or at a row whose state is saved.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart import native
from headstart.native.bindings import (
    ConvCall,
    DeltaCall,
    ScanCall,
    Sequences,
    States,
    Strided,
)

CHUNK = 64  # positions
_DTYPES = (torch.float32, torch.bfloat16)  # of rows that the kernels support
_MAX_TAPS = 4  # the widest convolution that the kernels support


@dataclass(frozen=True)
class Recurrence:
    """The sequences of one step, for all recurrent layers; contiguous int32 tensors on the CPU.

    Kernels do not check these numbers. All targets must differ, and a sequence's target must not be
    another sequence's source. A source that is not a target is not written.
    """

    starts: Tensor
    """The first row of each sequence in the flat batch, then the number of rows: `[n + 1]`."""
    sources: Tensor
    """The slot of the state before each sequence's first row, -1 for zeros: `[n]`."""
    targets: Tensor
    """The slot of the state after each sequence's last row: `[n]`."""
    positions: Tensor
    """The position of each sequence's first row in the sequence: `[n]`."""
    saves: Tensor = field(default_factory=lambda: torch.empty((0, 2), dtype=torch.int32))
    """Ascending row indices, and the slots to which the states after them are written: `[m, 2]`."""

    @cached_property
    def kernels(self) -> ctypes.CDLL | None:
        """The compiled kernels, or None if they cannot be used."""
        return native.avx2_library()

    @cached_property
    def sequences(self) -> Sequences:
        """The kernels' struct of the sequences."""
        tensors = (self.starts, self.sources, self.targets, self.saves)
        addresses = (tensor.data_ptr() for tensor in tensors)
        return Sequences(*addresses, count=len(self.sources), num_saves=len(self.saves))


class DeltaWeights(NamedTuple):
    """A layer's weights of the gated delta rule, each `[heads]`."""

    a_log: Tensor
    dt_bias: Tensor


class ScanWeights(NamedTuple):
    """A layer's weights of Mamba-2's scan, each `[heads]`, and the limits of dt."""

    a_log: Tensor
    d: Tensor
    dt_bias: Tensor
    dt_limits: tuple[float, float]


def causal_conv(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    recurrence: Recurrence,
    *,
    silu: bool,
) -> Tensor:
    """Return the weighted sums of each row and the `width - 1` rows before it, by channel.

    rows: `[T, channels]`, float32 or bfloat16.
    weight: `[channels, width]`; the last column multiplies the row itself.
    states: float32 `[slots, width - 1, channels]`, the last inputs of each sequence.
    """
    kernels = _find_kernels(recurrence, rows)
    channels, width = weight.shape
    if kernels is None or not 1 < width <= _MAX_TAPS:
        return _convolve(rows, weight, bias, states, recurrence, silu)
    out = rows.new_empty(rows.shape)
    weights = {"weight": weight.t(), "bias": bias}
    sizes = {"channels": channels, "width": width, "silu": silu}
    kernel = kernels.headstart_causal_conv
    _run(kernel, ConvCall, (rows,), weights, states, recurrence, out, sizes)
    return out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    states: Tensor,
    recurrence: Recurrence,
) -> Tensor:
    """Return the gated delta rule's output `[T, heads, dv]`, as Qwen3-Next and Qwen3.5 define it.

    query, key: `[T, key_heads, dk]`, before they are normalized. Head h reads key head
        `h // (heads // key_heads)`.
    value: `[T, heads, dv]`.
    a, b: `[T, heads]`. The decay is `exp(-exp(a_log) * softplus(a + dt_bias))`; `sigmoid(b)` is
        the share of a value that is written.
    states: float32 `[slots, heads, dk, dv]`.
    """
    kernels = _find_kernels(recurrence, query, key, value, a, b)
    if kernels is None:
        return _delta_rule((query, key, value, a, b), weights, states, recurrence)
    out, rows = value.new_empty(value.shape), (query, key, value, a, b)
    sizes = {
        "key_heads": key.shape[1],
        "heads": value.shape[1],
        "key_dim": key.shape[2],
        "value_dim": value.shape[2],
    }
    kernel = kernels.headstart_gated_delta_rule
    _run(kernel, DeltaCall, rows, weights._asdict(), states, recurrence, out, sizes)
    return out


def mamba2_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    weights: ScanWeights,
    states: Tensor,
    recurrence: Recurrence,
) -> Tensor:
    """Return Mamba-2's selective scan `[T, heads, head_dim]`, as Granite 4 H defines it.

    x: `[T, heads, head_dim]`.
    b, c: `[T, groups, state]`; head h reads group `h // (heads // groups)`.
    dt: `[T, heads]`, before the bias, softplus, and the limits.
    states: float32 `[slots, heads, head_dim, state]`.
    """
    kernels = _find_kernels(recurrence, x, b, c, dt)
    if kernels is None:
        return _scan((x, b, c, dt), weights, states, recurrence)
    out, rows = x.new_empty(x.shape), (x, b, c, dt)
    floats = {"a_log": weights.a_log, "d": weights.d, "dt_bias": weights.dt_bias}
    sizes = {
        "groups": b.shape[1],
        "heads": x.shape[1],
        "head_dim": x.shape[2],
        "state": b.shape[2],
        "shortest": weights.dt_limits[0],
        "longest": weights.dt_limits[1],
    }
    kernel = kernels.headstart_mamba2_scan
    _run(kernel, ScanCall, rows, floats, states, recurrence, out, sizes)
    return out


def _find_kernels(recurrence: Recurrence, *rows: Tensor) -> ctypes.CDLL | None:
    """Return the kernels if they can be used for these rows."""
    dtype = rows[0].dtype
    if dtype not in _DTYPES or not all(part.is_cpu and part.dtype == dtype for part in rows):
        return None
    return recurrence.kernels


def _run(
    kernel: Callable[..., None],
    struct: type[ctypes.Structure],
    rows: Iterable[Tensor],
    weights: Mapping[str, Tensor | None],
    states: Tensor,
    recurrence: Recurrence,
    out: Tensor,
    sizes: Mapping[str, float],
) -> None:
    """Call a kernel. weights, sizes: fields of its struct."""
    laid_out = [_lay_out(part) for part in rows]
    floats = {n: None if w is None else w.float().contiguous() for n, w in weights.items()}
    slots = states.view(len(states), -1)  # raises unless each slot is contiguous
    assert states.dtype == torch.float32 and slots.stride(1) == 1, "states are float32 in slots"
    call = struct(
        *(Strided(part.data_ptr(), part.stride(0)) for part in laid_out),
        out=out.data_ptr(),
        states=States(slots.data_ptr(), slots.stride(0)),
        bf16=out.dtype == torch.bfloat16,
        **{name: None if part is None else part.data_ptr() for name, part in floats.items()},
        **sizes,
    )
    kernel(ctypes.byref(recurrence.sequences), ctypes.byref(call), torch.get_num_threads())


def _lay_out(rows: Tensor) -> Tensor:
    """Return `[T, numbers]` with contiguous rows, a view if possible."""
    flat = rows.flatten(1)
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _convolve(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    recurrence: Recurrence,
    silu: bool,
) -> Tensor:
    before, num_rows = weight.shape[1] - 1, len(rows)
    # For each sequence: the inputs that its state stores, then its rows.
    counts = recurrence.starts.diff().tolist()
    parts = zip(_load(states, recurrence), torch.split(rows.float(), counts), strict=True)
    inputs = torch.cat([part for pair in parts for part in pair])
    numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    first = (torch.arange(num_rows) + numbers * before).to(rows.device)
    out = torch.zeros(rows.shape, device=rows.device)
    if bias is not None:
        out += bias.float()
    for tap, column in enumerate(weight.float().unbind(1)):
        out += inputs[first + tap] * column
    ends = recurrence.starts[1:] + before * torch.arange(1, len(counts) + 1)
    last = ends.unsqueeze(1) + torch.arange(-before, 0)
    _store(states, recurrence, inputs[last.to(rows.device)])
    if len(recurrence.saves):
        saved, slots = recurrence.saves.to(rows.device, torch.int64).unbind(1)
        last = first[saved].unsqueeze(1) + torch.arange(1, before + 1, device=rows.device)
        states[slots] = inputs[last]
    return (F.silu(out) if silu else out).to(rows.dtype)


def _delta_rule(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    weights: DeltaWeights,
    states: Tensor,
    recurrence: Recurrence,
) -> Tensor:
    query, key, value, a, b = rows
    group = value.shape[1] // key.shape[1]
    rate = -weights.a_log.float().exp()

    def chunk(indices: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = (
            (rate * F.softplus(_take(a, indices) + weights.dt_bias.float()))
            .transpose(1, 2)
            .cumsum(-1)
        )
        beta = torch.sigmoid(_take(b, indices)).transpose(1, 2).unsqueeze(-1)
        q, k = (
            _normalize(_take(part, indices)).repeat_interleave(group, 2) for part in (query, key)
        )
        q, k, v = (
            part.transpose(1, 2) for part in (q * q.shape[-1] ** -0.5, k, _take(value, indices))
        )
        # The state's output for key t is subtracted from value t before the value is written. The
        # state includes the chunk's earlier writes, so written values solve a triangular system.
        system = beta * (k @ k.mT) * _pairwise(decay)
        missing = beta * (v - decay.exp().unsqueeze(-1) * (k @ state))
        written = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
        return _read_chunk(q, k, written, decay, state)

    return _in_chunks(value, states, recurrence, chunk)


def _scan(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: ScanWeights,
    states: Tensor,
    recurrence: Recurrence,
) -> Tensor:
    x, b, c, dt = rows
    group = x.shape[1] // b.shape[1]
    rate = -weights.a_log.float().exp()

    def chunk(indices: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        steps = (
            F.softplus(_take(dt, indices) + weights.dt_bias.float())
            .clamp(*weights.dt_limits)
            .transpose(1, 2)
        )
        q, k = (_take(part, indices).repeat_interleave(group, 2).transpose(1, 2) for part in (c, b))
        v = _take(x, indices).transpose(1, 2)
        decay = (rate.unsqueeze(-1) * steps).cumsum(-1)
        out, state = _read_chunk(q, k, steps.unsqueeze(-1) * v, decay, state.mT)
        return out + weights.d.float().view(-1, 1, 1) * v, state.mT

    return _in_chunks(x, states, recurrence, chunk)


def _take(rows: Tensor, indices: Tensor) -> Tensor:
    return rows[indices].float()


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _pairwise(decay: Tensor) -> Tensor:
    """Return the factor by which row j has decayed at row i; 0 for later rows j."""
    length = decay.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1)
    between = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    return between.masked_fill(later, -torch.inf).exp()


def _read_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's output and the state after it.

    query, key: `[n, heads, rows, dk]`; value: `[n, heads, rows, dv]`.
    decay: `[n, heads, rows]`, the logarithm of the decay since the chunk's beginning.
    state: `[n, heads, dk, dv]`.
    """
    total = decay[..., -1:]
    out = (query * decay.exp().unsqueeze(-1)) @ state
    out += (query @ key.mT * _pairwise(decay)) @ value
    remaining = key * (total - decay).exp().unsqueeze(-1)
    return out, state * total.exp().unsqueeze(-1) + remaining.mT @ value


def _in_chunks(
    value: Tensor,
    states: Tensor,
    recurrence: Recurrence,
    chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the output of all rows, in the shape of `value`, and write the states.

    chunk: takes row indices `[n, rows]` and the states before these rows; returns the output
        `[n, heads, rows, dv]` and the states after these rows.
    """
    state, out = _load(states, recurrence), torch.empty_like(value)
    saves: dict[int, int] = dict(recurrence.saves.tolist())
    for sequences, rows in _cut(recurrence):
        ends = rows[:, -1].tolist()
        rows = rows.to(value.device)
        result, after = chunk(rows, state[sequences])
        out[rows] = result.transpose(1, 2).to(out.dtype)
        state[sequences] = after
        for number, row in enumerate(ends):
            if row in saves:
                states[saves[row]] = after[number]
    _store(states, recurrence, state)
    return out


def _cut(recurrence: Recurrence) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of sequences and the indices of their next rows `[n, rows]`.

    Sequences whose next chunks have the same length are yielded together.
    """
    rows, ends = recurrence.starts[:-1].tolist(), recurrence.starts[1:].tolist()
    positions = recurrence.positions.tolist()
    saved = [row + 1 for row in recurrence.saves[:, 0].tolist()]
    while True:
        lengths: dict[int, list[int]] = {}
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if row < end:
                length = min(end - row, CHUNK - positions[number] % CHUNK)
                if (next_save := bisect_right(saved, row)) < len(saved):
                    length = min(length, saved[next_save] - row)
                lengths.setdefault(length, []).append(number)
        if not lengths:
            return
        for length, sequences in lengths.items():
            first = torch.tensor([rows[number] for number in sequences])
            yield sequences, first.unsqueeze(1) + torch.arange(length)
            for number in sequences:
                rows[number] += length
                positions[number] += length


def _load(states: Tensor, recurrence: Recurrence) -> Tensor:
    """Return a copy of each sequence's state before its first row."""
    sources = recurrence.sources.to(states.device, torch.int64)
    copy = states[sources.clamp(min=0)]
    copy[sources < 0] = 0
    return copy


def _store(states: Tensor, recurrence: Recurrence, after: Tensor) -> None:
    states[recurrence.targets.to(states.device, torch.int64)] = after
