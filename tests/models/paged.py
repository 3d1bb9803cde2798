"""The smallest engine: several sequences in one flat batch over scattered blocks."""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.attention import PagedKVMemory, Span, StepPlan, make_backend
from headstart.attention.memory import StateMemory
from headstart.attention.recurrent import Recurrence
from headstart.models.decoder import DecoderModel
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.probe import ProbedLayers, probe_model

BLOCK = 4


_passed: dict[Hashable, ProbedLayers] = {}


def _layers(model: PreTrainedModel) -> ProbedLayers:
    """Return `probe_model` of the model, or its result for equal modules, settings and weights."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    key = (type(model), tuple(map(type, model.modules())), digest.digest())
    if key not in _passed:
        _passed[key] = probe_model(model)
    return _passed[key]


def make_recurrence(
    sequences: list[tuple[int, int, int, int]], saves: tuple[tuple[int, int], ...] = ()
) -> Recurrence:
    """Return a step's recurrence of rows, source, target and first position per sequence."""
    counts, sources, targets, positions = zip(*sequences, strict=True)
    starts = [0, *accumulate(counts)]
    tensors = (
        torch.tensor(values, dtype=torch.int32) for values in (starts, sources, targets, positions)
    )
    return Recurrence(*tensors, saves=torch.tensor(saves, dtype=torch.int32).view(-1, 2))


@dataclass
class Sequence:
    """Token ids so far, how many of them are in memory, and where."""

    token_ids: list[int]
    blocks: list[int]
    slot: int = 0
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]


class Paged:
    """A model with a backend and a pool of blocks handed out in a random order."""

    def __init__(
        self,
        model: PreTrainedModel | DecoderModel,
        num_blocks: int = 64,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(model, DecoderModel):
            self.decoder = model
        else:
            layers = _layers(model)
            self.decoder = TransformersDecoder(model, layers.layouts, mixers=layers.mixers)
        dtype = kv_dtype or self.decoder.dtype
        self.memory = PagedKVMemory(
            self.decoder.layouts, num_blocks, BLOCK, dtype, self.decoder.device
        )
        self.backend = make_backend(self.memory)
        self.states = StateMemory(self.decoder.state_layouts, num_blocks, self.decoder.device)
        self.decoder.attach(self.backend, self.states if self.decoder.state_layouts else None)
        self.added = 0
        generator = torch.Generator().manual_seed(seed)
        self.free: list[int] = torch.randperm(num_blocks, generator=generator).tolist()

    def add(self, token_ids: list[int], room: int = 0) -> Sequence:
        count = -(-(len(token_ids) + room) // BLOCK)
        self.added += 1
        return Sequence(list(token_ids), [self.free.pop() for _ in range(count)], self.added - 1)

    def step(self, work: list[tuple[Sequence, int]], contiguous_gather: bool = False) -> None:
        """Compute the next rows of each sequence; their logits are appended to it."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        recurrent: list[tuple[int, int, int, int]] = []
        for sequence, count in work:
            start, end = sequence.done, sequence.done + count
            recurrent.append((count, sequence.slot if start else -1, sequence.slot, start))
            spans.append(Span(len(tokens), count, end, sequence.blocks))
            tokens += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += sequence.slots(start, end)
            sequence.done = end
        self.states.recurrence = make_recurrence(recurrent)
        self.backend.begin_step(StepPlan(torch.tensor(slots), tuple(spans), contiguous_gather))
        logits = self.decoder.forward(
            torch.tensor(tokens), torch.tensor(positions), torch.arange(len(tokens))
        )
        self.backend.end_step()
        for (sequence, count), part in zip(
            work, logits.split([count for _, count in work]), strict=True
        ):
            assert part.shape == (count, self.decoder.vocab_size)
            sequence.logits.extend(part)

    def last(self, sequence: Sequence, count: int) -> Tensor:
        """Compute the next rows of a sequence; return the logits of the last one alone."""
        rows = torch.arange(sequence.done, sequence.done + count)
        sequence.done += count
        slots = torch.tensor(sequence.slots(int(rows[0]), sequence.done))
        span = Span(0, count, sequence.done, sequence.blocks)
        self.backend.begin_step(StepPlan(slots, (span,)))
        tokens = torch.tensor(sequence.token_ids)[rows]
        logits = self.decoder.forward(tokens, rows, torch.tensor([count - 1]))
        self.backend.end_step()
        return logits[0]
