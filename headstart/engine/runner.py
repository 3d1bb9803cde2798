"""Runs a batch: from requests and block tables to tensors, through the model, to logits.

By default a step is one forward pass over all its tokens. With `deterministic` a pass is always
one whole block of one sequence, at its absolute place, filled up behind the known tokens: every
matrix product then has the same shape whoever else is there, whatever was cached, and whether a
token came from a prompt or was generated, so its result is the same bit for bit. A block that
decoding fills is thereby last computed exactly as a prefill computes it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.attention import AttentionBackend, PagedKVMemory, Span, StepPlan
from headstart.cache import TokenSequence
from headstart.engine.batch import Batch
from headstart.engine.logits.protocol import allowed_tokens
from headstart.engine.prompt import PromptExtras
from headstart.errors import EngineError
from headstart.models.decoder import EmbeddingOverlay

PADDING_TOKEN = 0

Answer = TypeVar("Answer")


class ForwardModel(Protocol):
    """A model whose attention goes through the backend."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        """Logits float32 `[logit_rows, vocab]` of a flat batch of tokens `[tokens]`.

        `positions` is `[tokens]`, or `[axes, tokens]` if a prompt in the batch has its own.
        """
        ...

    def choose(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
        allowed: np.ndarray | None = None,
    ) -> list[int]:
        """The first of the largest of each row of what `forward` would give; -1 if not finite.

        Among tokens with a bit in `allowed` uint8 `[rows, bytes]`, if that is given.
        """
        ...


class StepAdapters(Protocol):
    """Adds adapters to the model's layers, for one pass at a time."""

    def begin_step(self, runs: Iterable[tuple[str | None, int, int]]) -> None:
        """The pass has these rows: (an adapter's digest or None, rows, of which with logits)."""

    def begin_plain_step(self) -> None:
        """The pass has no row with an adapter."""

    def end_step(self) -> None:
        """The pass is over."""


class Rows(NamedTuple):
    """Rows of the flat batch that belong to one sequence.

    Positions `start` to `stop - 1`, of which those from `known` on are padding. Logits are wanted
    of the last `wanted` rows. `extras` is None where token ids say everything.
    """

    sequence: TokenSequence
    start: int
    stop: int
    known: int
    wanted: int
    extras: PromptExtras | None


class StepLogits(NamedTuple):
    """Logits float32 `[rows, vocab]` of a step, and how many of the rows each part has.

    `values` is None where each row's greedy token is all that is wanted: `greedy` then has them, -1
    for logits that are not finite, and `failed` the errors of rows without a token, by row.
    `nonfinite` are the parts that have K or V which are not finite.
    """

    values: Tensor | None
    counts: list[int]
    nonfinite: Sequence[int] = ()
    greedy: Sequence[int] = ()
    failed: Mapping[int, EngineError] = {}


class Runner:
    """Executes batches against one model and its paged memory."""

    def __init__(
        self,
        model: ForwardModel,
        backend: AttentionBackend,
        memory: PagedKVMemory,
        adapters: StepAdapters,
        *,
        deterministic: bool,
    ) -> None:
        self._model = model
        self._device = model.device  # transformers looks for a parameter each time
        self._backend = backend
        self._memory = memory
        self._adapters = adapters
        self._deterministic = deterministic
        # Of the step under way, by sequence: the first position whose K or V are not finite.
        self._nonfinite: dict[TokenSequence, int] = {}

    def run(self, batch: Batch) -> StepLogits:
        """Compute the batch.

        A part's logits are those of all its rows when its prompt's log-probabilities are asked
        for, otherwise of its last row if it samples, else none.
        """
        self._nonfinite.clear()
        self._memory.copy_rows(batch.copies)
        parts: list[Rows] = []
        greedy_only = not self._deterministic
        for request, start, stop, samples in batch.scheduled:
            group, needs_prompt = request.group, request.needs_prompt_logits
            wanted = stop - start if needs_prompt else int(samples)
            parts.append(Rows(request.sequence, start, stop, stop, wanted, group.extras))
            if needs_prompt or (samples and not request.sampling.is_masked_argmax):
                greedy_only = False
        counts = [rows.wanted for rows in parts]
        if self._deterministic:
            blocks = (block for rows in parts for block in self._blocks(rows))
            values = torch.cat([self._forward_block(block) for block in blocks])
        elif greedy_only:
            masks = [part.request.sampling.masks for part in batch.scheduled if part.samples]
            allowed, failed = allowed_tokens(masks, self._model.vocab_size)
            greedy = self._forward(parts, functools.partial(self._model.choose, allowed=allowed))
            return StepLogits(None, counts, self._nonfinite_parts(parts), greedy, failed)
        else:
            values = self._forward(parts, self._model.forward)
        return StepLogits(values, counts, self._nonfinite_parts(parts))

    def end_step(self) -> None:
        """End a pass, wherever it was. May be called at any time."""
        self._backend.end_step()
        self._adapters.end_step()

    def close(self) -> None:
        """Free the K/V memory; there are no steps afterwards."""
        self._memory.release()

    def _blocks(self, rows: Rows) -> Iterator[Rows]:
        """The same rows as whole blocks, recomputed from their first token."""
        size = self._memory.block_size
        for start in range(rows.start // size * size, rows.stop, size):
            known = min(start + size, rows.stop)
            first = max(start, rows.stop - rows.wanted)
            wanted = start + size - first if first < known else 0
            yield Rows(rows.sequence, start, start + size, known, wanted, rows.extras)

    def _forward_block(self, rows: Rows) -> Tensor:
        """One whole block; the LM head, too, always gets all of its rows or none."""
        if not rows.wanted:
            return self._forward([rows], self._model.forward)
        count = rows.stop - rows.start
        logits = self._forward([rows._replace(wanted=count)], self._model.forward)
        return logits[count - rows.wanted : rows.known - rows.start]

    def _forward(self, parts: list[Rows], compute: Callable[..., Answer]) -> Answer:
        """One pass of the model: what `compute`, its `forward` or `choose`, says of the rows."""
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        slots: list[int] = []
        spans = []
        for sequence, start, stop, known, wanted, _ in parts:
            first = len(tokens)
            spans.append(Span(first, stop - start, stop, sequence.block_table()))
            slots += sequence.slots(start, stop, self._memory.block_size, self._memory.scratch_slot)
            if stop - start == 1:  # most are: requests that decode
                tokens.append(sequence.token_ids[start])
                positions.append(start)
                if wanted:
                    logit_rows.append(first)
                continue
            tokens += sequence.token_ids[start:known]
            if known < stop:
                tokens += [PADDING_TOKEN] * (stop - known)
            positions += range(start, stop)
            logit_rows += range(len(tokens) - wanted, len(tokens))
        embeddings, places = None, self._tensor(positions)
        if any(rows.extras is not None for rows in parts):
            embeddings, places = self._extras(parts), self._places(parts, places)
        plan = StepPlan(self._tensor(slots), tuple(spans), contiguous_gather=self._deterministic)
        try:
            self._begin_adapters(parts)
            self._backend.begin_step(plan)
            answer = compute(self._tensor(tokens), places, self._tensor(logit_rows), embeddings)
            self._note_nonfinite(parts)
            return answer
        finally:
            self.end_step()

    def _note_nonfinite(self, parts: list[Rows]) -> None:
        """Remember whose K or V were not finite in this pass; what padding has is of no account."""
        bad = self._backend.nonfinite_rows()
        if not bad:
            return
        first = 0
        for rows in parts:
            known = range(first, first + rows.known - rows.start)
            found = next((row for row in bad if row in known), None)
            if found is not None:
                self._nonfinite.setdefault(rows.sequence, rows.start + found - first)
            first += rows.stop - rows.start

    def _nonfinite_parts(self, parts: list[Rows]) -> list[int]:
        """The parts with a row that is not finite in their block tables, also if another wrote it.

        Such a row may show in nobody's logits: not before the last layer's K and V are attended
        to, and a key of minus infinity only hides its position.
        """
        size = self._memory.block_size
        bad = {
            block_id
            for sequence, position in self._nonfinite.items()
            for block_id in sequence.block_table()[position // size :]
        }
        if not bad:
            return []
        return [at for at, r in enumerate(parts) if not bad.isdisjoint(r.sequence.block_table())]

    def _begin_adapters(self, parts: list[Rows]) -> None:
        if not any(rows.sequence.namespace.adapter for rows in parts):
            self._adapters.begin_plain_step()
            return
        self._adapters.begin_step(
            (rows.sequence.namespace.adapter, rows.stop - rows.start, rows.wanted) for rows in parts
        )

    def _extras(self, parts: list[Rows]) -> EmbeddingOverlay | None:
        """The embeddings that prompts of the pass bring along for its rows."""
        at: list[int] = []
        values: list[Tensor] = []
        first = 0
        for rows in parts:
            if rows.extras is not None and rows.extras.embeddings is not None:
                for position, given in rows.extras.embeddings.between(rows.start, rows.known):
                    row = first + position - rows.start
                    at += range(row, row + len(given))
                    values.append(given)
            first += rows.stop - rows.start
        return EmbeddingOverlay(self._tensor(at), torch.cat(values)) if values else None

    def _places(self, parts: list[Rows], plain: Tensor) -> Tensor:
        """Position ids `[axes, tokens]` if a prompt has its own, else `plain`, `[tokens]`."""
        own = [rows.extras.positions if rows.extras is not None else None for rows in parts]
        axes = max((len(positions.table) for positions in own if positions is not None), default=0)
        if not axes:
            return plain
        places = plain.repeat(axes, 1)
        first = 0
        for rows, positions in zip(parts, own, strict=True):
            count = rows.stop - rows.start
            if positions is not None:
                values = torch.from_numpy(positions.between(rows.start, rows.stop))
                places[:, first : first + count] = values
            first += count
        return places if axes > 1 else places[0]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)
