"""A model over states in slots, step by step, and the logits that transformers expects."""

from functools import cache

import torch
from torch import Tensor

from headstart.attention import PagedKVMemory, Span, StepPlan, make_backend
from headstart.attention.memory import StateMemory
from headstart.models.decoder import DecoderModel
from tests.models.paged import make_recurrence
from tests.tiny_models import VOCABULARY, tiny_config, tiny_model

BLOCK = 16
SLOTS = 8
LENGTH = 24


class Part:
    """The next rows of a sequence: its tokens from `start` on, and slots of its state."""

    def __init__(self, tokens: Tensor, start: int, source: int, target: int) -> None:
        self.tokens, self.start, self.source, self.target = tokens, start, source, target


class Stepper:
    """A model over states in slots, and sequences with separate blocks."""

    def __init__(self, model: DecoderModel, sequences: int = 1, length: int = LENGTH) -> None:
        self.model, self.per_sequence = model, -(-length // BLOCK)
        layouts, device = model.layouts, model.device
        memory = PagedKVMemory(layouts, sequences * self.per_sequence, BLOCK, model.dtype, device)
        self.backend = make_backend(memory)
        self.states = StateMemory(model.state_layouts, SLOTS, device)
        self.states.rows.fill_(torch.nan)  # an unwritten state makes its reader's rows NaN
        model.attach(self.backend, self.states)

    def step(
        self, parts: dict[int, Part], saves: tuple[tuple[int, int], ...] = (), last: bool = False
    ) -> Tensor:
        """Return the logits of all rows of these sequences, or of each one's last row."""
        spans, slots, positions, tokens, recurrent = [], [], [], [], []
        for number, part in parts.items():
            count = len(part.tokens)
            blocks = range(number * self.per_sequence, (number + 1) * self.per_sequence)
            spans.append(Span(sum(map(len, tokens)), count, part.start + count, list(blocks)))
            places = torch.arange(part.start, part.start + count)
            slots.append(number * self.per_sequence * BLOCK + places)
            positions.append(places)
            tokens.append(part.tokens)
            recurrent.append((count, part.source, part.target, part.start))
        self.states.recurrence = make_recurrence(recurrent, saves)
        self.backend.begin_step(StepPlan(torch.cat(slots), tuple(spans)))
        ends = torch.tensor([span.first_row + span.num_rows - 1 for span in spans])
        rows = ends if last else torch.arange(sum(map(len, tokens)))
        try:
            return self.model.forward(torch.cat(tokens), torch.cat(positions), rows)
        finally:
            self.backend.end_step()


def random_tokens(count: int, seed: int = 5) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def expected_logits(name: str, tokens: Tensor) -> Tensor:
    return _logits(name, tuple(tokens.tolist()))


@cache
def _logits(name: str, tokens: tuple[int, ...]) -> Tensor:
    reference = tiny_model(tiny_config(name))
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        return reference(torch.tensor([tokens]), use_cache=False).logits[0]


def check(actual: Tensor, expected: Tensor) -> None:
    """Compare float32 logits; transformers' own differ from float64 by 2e-5 of the largest."""
    size = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4 * size)
