"""The runner, which turns batches into tensors, runs the model, and chooses tokens.

By default a step is one forward pass over all its tokens. With `deterministic` each pass computes
one whole block of one sequence, padded after its tokens. Then every matrix product has the same
shape. Neither other requests nor cached blocks change the shape, and it is the same for prompt
tokens and generated tokens. So results are equal bit for bit. When decoding fills a block, the last
pass over this block makes the same computation as a prefill of the block.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.attention import AttentionBackend, Recurrence, Span, StateMemory, StepPlan
from headstart.cache import StatePool, TokenSequence
from headstart.engine.adapter_store import AdapterStore
from headstart.engine.logits import TokenMask, allowed_tokens
from headstart.engine.parts import EngineParts
from headstart.engine.request import PromptExtras
from headstart.engine.sampling import (
    NOT_FINITE,
    SampledToken,
    Sampler,
    SamplingState,
    token_logprobs,
)
from headstart.engine.step import Batch
from headstart.errors import EngineError
from headstart.models.decoder import EmbeddingOverlay
from headstart.weights.greedy_head import greedy_tokens

PADDING_TOKEN = 0

Answer = TypeVar("Answer")


class _Rows(NamedTuple):
    """Rows of the flat batch that belong to one sequence: positions `start` to `stop - 1`.

    end: the position where padding begins. num_logits: number of rows, from the last, that need
    logits. extras: None if the prompt has only token ids.
    """

    sequence: TokenSequence
    start: int
    stop: int
    end: int
    num_logits: int
    extras: PromptExtras | None
    draft: tuple[int, ...] = ()

    def tokens(self) -> list[int]:
        """Return the tokens of the rows, including drafted tokens and padding."""
        tokens = self.sequence.token_ids[self.start : self.end]
        if self.draft:
            length = len(self.sequence.token_ids)
            tokens += self.draft[max(0, self.start - length) : max(0, self.end - length)]
        return tokens + [PADDING_TOKEN] * (self.stop - self.end)


class StepLogits(NamedTuple):
    """The logits float32 `[rows, vocab]` of a step, and the number of rows of each part.

    values: None if only each row's greedy token is needed. Then `greedy` has these tokens, with -1
    for a row whose logits are not finite, and `failed` has the errors of rows without a token.
    nonfinite: indices of parts with K or V that are not finite. bad_drafts: indices of parts with
    such K or V in drafted tokens only.
    """

    values: Tensor | None
    counts: list[int]
    nonfinite: Sequence[int] = ()
    greedy: Sequence[int] = ()
    failed: Mapping[int, EngineError] = {}
    bad_drafts: Collection[int] = ()


class Runner:
    """One model, its paged memory and its attention backend; computes batches."""

    def __init__(
        self,
        parts: EngineParts,
        backend: AttentionBackend,
        adapters: AdapterStore,
        *,
        deterministic: bool,
    ) -> None:
        self._model = parts.model
        self._device = parts.model.device  # the property is slow in transformers
        self._backend = backend
        self._memory = parts.memory
        self._adapters = adapters
        self._states: tuple[StateMemory, StatePool] | None = None
        if parts.states is not None and parts.manager.states is not None:
            self._states = parts.states, parts.manager.states
        self._deterministic = deterministic
        # The first position in the current step whose K or V are not finite, by sequence.
        self._nonfinite: dict[TokenSequence, int] = {}

    def run(self, batch: Batch) -> StepLogits:
        """Compute the batch.

        A part whose prompt log-probabilities are needed gets logits of all its rows. Any other part
        gets logits of its last row and its draft, but only if it samples.
        """
        self._nonfinite.clear()
        self._memory.copy_rows(batch.copies)
        parts: list[_Rows] = []
        masks: list[tuple[TokenMask, ...]] = []  # masks of each row with logits
        greedy_only = not self._deterministic
        for request, start, stop, samples, draft in batch.scheduled:
            group, needs_prompt = request.group, request.needs_prompt_logits
            num_logits = stop - start if needs_prompt else samples + len(draft)
            end = stop + len(draft)
            parts.append(_Rows(request.sequence, start, end, end, num_logits, group.extras, draft))
            if needs_prompt or (samples and not request.sampling.is_masked_argmax):
                greedy_only = False
            if draft and request.sampling.processors:  # each drafted token changes the next mask
                greedy_only = False
            masks += (request.sampling.masks,) * num_logits
        counts = [rows.num_logits for rows in parts]
        logits = StepLogits(None, counts)
        if self._deterministic:
            blocks = [block for rows in parts for block in self._forward_blocks(rows)]
            logits = logits._replace(values=torch.cat(blocks))
        elif greedy_only:
            allowed, failed = allowed_tokens(masks, self._model.vocab_size)
            greedy = self._forward(parts, functools.partial(self._model.choose, allowed=allowed))
            logits = logits._replace(greedy=greedy, failed=failed)
        else:
            logits = logits._replace(values=self._forward(parts, self._model.forward))
        if not self._nonfinite:
            return logits
        return logits._replace(
            nonfinite=self._nonfinite_parts(parts), bad_drafts=self._bad_drafts(parts)
        )

    def end_step(self) -> None:
        """Reset the state of the current pass, if any. May be called at any time."""
        self._backend.end_step()
        self._adapters.end_step()

    def close(self) -> None:
        """Free the K/V memory and the states. No step can run afterwards."""
        self._memory.release()
        if self._states is not None:
            self._states[0].release()

    def _forward_blocks(self, rows: _Rows) -> Iterator[Tensor]:
        """Compute each block of the rows from its first token; yield the rows' logits by block."""
        size = self._memory.block_size
        for start in range(rows.start // size * size, rows.stop, size):
            end = min(start + size, rows.stop)
            first = max(start, rows.stop - rows.num_logits)
            num_logits = size if first < end else 0  # the LM head gets a whole block or nothing
            block = rows._replace(start=start, stop=start + size, end=end, num_logits=num_logits)
            logits = self._forward([block], self._model.forward)
            yield logits[first - start : end - start] if num_logits else logits

    def _forward(self, parts: list[_Rows], compute: Callable[..., Answer]) -> Answer:
        """Run one pass of the model; `compute` is its `forward` or `choose`."""
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        slots: list[int] = []
        spans = []
        for rows in parts:
            sequence, start, stop, _, num_logits, _, draft = rows
            first = len(tokens)
            spans.append(Span(first, stop - start, stop, sequence.block_table()))
            slots += sequence.slots(start, stop, self._memory.block_size, self._memory.scratch_slot)
            if stop - start == 1 and not draft:  # the common case, decoding
                tokens.append(sequence.token_ids[start])
                positions.append(start)
                if num_logits:
                    logit_rows.append(first)
                continue
            tokens += rows.tokens()
            positions += range(start, stop)
            logit_rows += range(len(tokens) - num_logits, len(tokens))
        embeddings, position_ids = None, self._tensor(positions)
        if any(rows.extras is not None for rows in parts):
            embeddings = self._extras(parts)
            position_ids = self._position_ids(parts, position_ids)
        plan = StepPlan(
            self._tensor(slots),
            tuple(spans),
            self._deterministic,
            self._plan_windows(parts, spans),
            self._plan_recurrence(parts),
        )
        try:
            uses_adapters = any(rows.sequence.namespace.adapter for rows in parts)
            self._adapters.begin_step(
                [(r.sequence.namespace.adapter, r.stop - r.start, r.num_logits) for r in parts]
                if uses_adapters
                else []
            )
            self._backend.begin_step(plan)
            if self._states is not None:
                self._states[0].begin_step(plan)
            answer = compute(
                self._tensor(tokens), position_ids, self._tensor(logit_rows), embeddings
            )
            self._note_nonfinite(parts)
            if self._states is not None:
                self._check_states(parts, *self._states)
            return answer
        finally:
            self.end_step()

    def _plan_windows(self, parts: list[_Rows], spans: list[Span]) -> StepPlan | None:
        """Return the plan for the pool of window blocks; None if the memory has no such pool."""
        memory = self._memory
        if not memory.num_window_blocks:
            return None
        slots: list[int] = []
        window_spans = []
        for (sequence, start, stop, *_), span in zip(parts, spans, strict=True):
            window_spans.append(span._replace(block_ids=sequence.window_table()))
            slots += sequence.window_slots(
                start, stop, memory.block_size, memory.window_scratch_slot
            )
        return StepPlan(self._tensor(slots), tuple(window_spans), self._deterministic)

    def _plan_recurrence(self, parts: list[_Rows]) -> Recurrence | None:
        """Return the slots of states that a pass reads and writes; None without recurrent layers.

        With `deterministic`, a pass begins at a block border. If the block is not full yet, the
        state after the pass is discarded, since the next pass computes the block again.
        """
        if self._states is None:
            return None
        memory, pool = self._states
        sources, targets, saves = [], [], []
        first = 0
        for rows in parts:
            state = pool.of(rows.sequence)
            is_later_pass = rows.start > state.step_start
            source = state.slot if is_later_pass else state.read_slot
            sources.append(source if rows.start else -1)
            targets.append(state.slot if rows.end == rows.stop else memory.scratch_slot)
            for save in state.saves:
                if rows.start < save.position <= rows.end:
                    saves.append((first + save.position - rows.start - 1, save.slot))
            first += rows.stop - rows.start
        starts = np.cumsum([0, *(rows.stop - rows.start for rows in parts)])
        ordered = np.array(sorted(saves), dtype=np.int32).reshape(-1, 2)
        columns = (starts, sources, targets, [rows.start for rows in parts], ordered)
        return Recurrence(*(torch.from_numpy(np.array(c, dtype=np.int32)) for c in columns))

    def _note_nonfinite(self, parts: list[_Rows]) -> None:
        """Record the sequences whose K or V of this pass are not finite. Ignores padding."""
        bad = self._backend.nonfinite_rows()
        if not bad:
            return
        first = 0
        for rows in parts:
            unpadded = range(first, first + rows.end - rows.start)
            if (row := next((row for row in bad if row in unpadded), None)) is not None:
                self._nonfinite.setdefault(rows.sequence, rows.start + row - first)
            first += rows.stop - rows.start

    def _check_states(self, parts: list[_Rows], memory: StateMemory, pool: StatePool) -> None:
        """Record the sequences whose states after this pass are not finite.

        Checks the checkpoints of the pass, and the last state, which becomes a checkpoint if the
        request ends now. The last state of a part with logits is not checked: its logits show
        whether the state is finite.
        """
        for rows in parts:
            state = pool.of(rows.sequence)
            slots = [s.slot for s in state.saves if rows.start < s.position <= rows.end]
            if not rows.num_logits and rows.stop == rows.end:
                slots.append(state.slot)
            if not all(map(memory.is_finite, slots)):
                self._nonfinite.setdefault(rows.sequence, rows.start)

    def _nonfinite_parts(self, parts: list[_Rows]) -> list[int]:
        """Return the indices of parts whose blocks have rows that are not finite.

        Logits may be finite in spite of such rows. The rows with logits do not always attend to
        them, and a key of minus infinity only removes its position from the attention.
        """
        size = self._memory.block_size
        bad = {
            block_id
            for sequence, position in self._nonfinite.items()
            if position < len(sequence.token_ids)
            for block_id in sequence.block_table()[position // size :]
        }
        if not bad:
            return []
        return [i for i, r in enumerate(parts) if not bad.isdisjoint(r.sequence.block_table())]

    def _bad_drafts(self, parts: list[_Rows]) -> list[int]:
        """Return the indices of parts in which only rows of drafted tokens are not finite."""
        positions = [self._nonfinite.get(rows.sequence, 0) for rows in parts]
        return [i for i, r in enumerate(parts) if positions[i] >= len(r.sequence.token_ids)]

    def _extras(self, parts: list[_Rows]) -> EmbeddingOverlay | None:
        """Return the embeddings that prompts provide for rows of the pass."""
        row_ids: list[int] = []
        values: list[Tensor] = []
        first = 0
        for rows in parts:
            if rows.extras is not None and rows.extras.embeddings is not None:
                for position, part in rows.extras.embeddings.between(rows.start, rows.end):
                    row = first + position - rows.start
                    row_ids += range(row, row + len(part))
                    values.append(part.to(self._device))  # embeddings from a tier are on the CPU
            first += rows.stop - rows.start
        return EmbeddingOverlay(self._tensor(row_ids), torch.cat(values)) if values else None

    def _position_ids(self, parts: list[_Rows], plain: Tensor) -> Tensor:
        """Return position ids `[axes, tokens]` if a prompt has special positions, else `plain`."""
        special = [rows.extras.positions if rows.extras is not None else None for rows in parts]
        axes = max(
            (len(positions.table) for positions in special if positions is not None), default=0
        )
        if not axes:
            return plain
        position_ids = plain.repeat(axes, 1)
        first = 0
        for rows, positions in zip(parts, special, strict=True):
            count = rows.stop - rows.start
            if positions is not None:
                values = torch.from_numpy(positions.between(rows.start, rows.stop))
                position_ids[:, first : first + count] = values
            first += count
        return position_ids if axes > 1 else position_ids[0]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)


Choice = SampledToken | EngineError | None
"""The next token of a part, or its error; None for a part that does not sample."""


def choose_row(
    sampler: Sampler, logits: StepLogits, row: int, state: SamplingState
) -> SampledToken | EngineError:
    """Return the next token of a request from one row of the step's logits, or its error."""
    if logits.values is not None:
        [choice] = sampler.sample(logits.values[row : row + 1], [state])
        return choice
    return logits.failed.get(row) or sampler.accept(logits.greedy[row])


def choose_tokens(sampler: Sampler, batch: Batch, logits: StepLogits) -> list[Choice]:
    """Return the choice of each part. A part with K or V that are not finite gets an error."""
    errors: dict[int, EngineError] = {}
    if logits.values is None:
        firsts = accumulate(logits.counts, initial=0)
        tokens = iter(
            [
                logits.failed.get(row) or sampler.accept(logits.greedy[row])
                for part, row in zip(batch.scheduled, firsts, strict=False)
                if part.samples
            ]
        )
    else:
        values, stop = logits.values, 0
        rows = []
        for index, (part, count) in enumerate(zip(batch.scheduled, logits.counts, strict=True)):
            if part.request.needs_prompt_logits:
                choices = map(sampler.accept, greedy_tokens(values[stop : stop + count]))
                error = next((c for c in choices if isinstance(c, EngineError)), None)
                if error is not None:
                    errors[index] = error
                else:  # row i has the log-probabilities of the token after position start + i
                    group = part.request.group
                    following = group.prompt_token_ids[part.start + 1 : part.stop + 1]
                    entries = token_logprobs(
                        values[stop : stop + len(following)],
                        following,
                        group.params.prompt_logprobs or 0,
                    )
                    group.add_prompt_logprobs(part.start + 1, entries)
            stop += count
            if part.samples:
                rows.append(stop - 1 - len(part.draft))
        states = [part.request.sampling for part in batch.scheduled if part.samples]
        tokens = iter(sampler.sample(values if len(rows) == len(values) else values[rows], states))
    chosen: list[Choice] = [next(tokens) if part.samples else None for part in batch.scheduled]
    for index in logits.nonfinite:
        errors[index] = EngineError(f"K or V of the request's tokens {NOT_FINITE}")
    for index, error in errors.items():
        chosen[index] = error
    return chosen
