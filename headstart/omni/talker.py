"""A talker's inputs: a constant codec prompt, and the thinker's rows, which carry the content.

    position   0 ......... T-1   T         T+1       T+2       T+3  ...
    token      mask ..... mask   lead[0]   lead[1]   code 0    code 1
    row        thinker's prompt  bos       reply 0   reply 1   reply 2 ... eos  pad  pad ...

If a token has an embedding of its own (from T on), it is added to the row. The prompt is complete
with the thinker's first reply row; from there on, the talker runs one row behind the thinker.

Source: `Qwen2_5OmniForConditionalGeneration.generate` in transformers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.cache import TokenSequence
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt, PromptExtras, RotaryPositions
from headstart.errors import EngineError
from headstart.omni.feeds import Conditions, StagePrompt
from headstart.omni.stage import Input, OmniRequest, OutputEvent, StageStarted

__all__ = ["TalkerFeed", "TalkerPlan"]


@dataclass(frozen=True, kw_only=True)
class TalkerPlan:
    """The parts of one request's talker prompt.

    rows: the thinker's output that feeds it. mask_id, lead_ids: its token ids. bos, eos, pad: rows
    `[width]`, the only rows besides the thinker's. embed: token ids int64 `[n]` to embeddings
    `[n, width]`. voice: part of the identity; talkers of different voices share no block.
    positions: of the thinker's prompt and the lead, None for 0, 1, 2, ... limit: maximum number of
    tokens.
    """

    rows: Input
    block_size: int
    mask_id: int
    lead_ids: tuple[int, int]
    bos: Tensor
    eos: Tensor
    pad: Tensor
    embed: Callable[[Tensor], Tensor]
    params: SamplingParams
    voice: str
    limit: int
    positions: RotaryPositions | None = None
    anonymous: bool = False


class TalkerFeed:
    """One request's feed; it is ready when the thinker is one row ahead."""

    def __init__(self, request: OmniRequest, plan: TalkerPlan) -> None:
        self._request = request
        self._plan = plan
        self._prompt_tokens: int | None = None
        self._num_rows = 0
        self._conditions = Conditions(plan.block_size, self._combine, anonymous=plan.anonymous)

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        if source != self._plan.rows.stage:
            return
        if isinstance(event, StageStarted):
            self._prompt_tokens = event.prompt_tokens
            if event.block_size == self._plan.block_size:
                self._conditions.name(event.names)
        elif event.chunk.output == self._plan.rows.output:
            self._add(event.chunk.rows)

    def _add(self, rows: Tensor) -> None:
        """Take the thinker's next rows; the bos row goes between its prompt's and its reply's."""
        assert self._prompt_tokens is not None
        left = self._prompt_tokens - self._num_rows
        self._num_rows += len(rows)
        if left > 0:
            self._conditions.add(rows[:left])
            if len(rows) >= left:
                self._conditions.add(self._plan.bos[None].to(rows))
            rows = rows[left:]
        if len(rows):
            self._conditions.add(rows)

    def end(self, source: str) -> None:
        if source == self._plan.rows.stage:
            if self._prompt_tokens is None or self._num_rows < self._prompt_tokens:
                raise EngineError(
                    f"{source!r} ended with {self._num_rows} rows of {self._plan.rows.output!r} "
                    f"for a prompt of {self._prompt_tokens} tokens"
                )
            self._conditions.close(self._plan.eos[None], self._plan.pad, self._plan.limit)

    def prompt(self) -> StagePrompt | None:
        length = self._prompt_tokens
        if length is None or self._conditions.count < length + len(self._plan.lead_ids):
            return None
        token_ids = [self._plan.mask_id] * length + list(self._plan.lead_ids)
        self._conditions.attach(token_ids)
        size = self._plan.block_size
        items = self._conditions.items[: len(token_ids) // size]
        extras = PromptExtras(items, self._conditions, self._plan.positions)
        salt = json.dumps([self._request.salt, self._plan.voice])
        return StagePrompt(PreparedPrompt(token_ids, extras=extras), self._plan.params, salt)

    def begin(self, sequence: TokenSequence) -> None:
        self._conditions.begin(sequence)

    def is_ready(self, num_tokens: int) -> bool:
        return num_tokens <= self._conditions.count

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """The rows, plus the embeddings of the token ids from the lead on."""
        assert self._prompt_tokens is not None
        first = max(0, self._prompt_tokens - position)
        if first >= len(rows):
            return rows
        own = self._plan.embed(torch.tensor(token_ids[first:]))
        return torch.cat([rows[:first].to(own), rows[first:].to(own) + own])
