"""An engine whose model has a recurrent layer resumes exactly, whatever was cached.

The model is a fake whose state is a hash of every token so far, so an answer that was resumed from
the wrong state, or from none, differs from the answer that plain Python computes. Its V are token
ids, and its attention weighs all alike, so it notices a wrong block as well.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.attention import AttentionBackend, AttentionOptions, LayerLayout
from headstart.attention.backend import StateLayout
from headstart.attention.memory import StateMemory
from headstart.cache import MissReason, TokenSequence
from headstart.errors import OutOfMemoryError
from headstart.models.decoder import DecoderModel, EmbeddingOverlay, Widths
from tests.engine.core_harness import CoreHarness

VOCABULARY = 50
PRIME = 65521


def follow(state: int, token: int) -> int:
    return (state * 31 + token + 7) % PRIME


def expected_answer(prompt: list[int], count: int) -> list[int]:
    state = 0
    for token in prompt:
        state = follow(state, token)
    answer: list[int] = []
    for _ in range(count):
        answer.append(state % VOCABULARY)
        state = follow(state, answer[-1])
    return answer


class HashDecoder(DecoderModel):
    """A model that chooses the token that a hash of all tokens before it gives."""

    def __init__(self) -> None:
        layout = LayerLayout(kv_heads=1, key_dim=8, value_dim=8)
        super().__init__((layout,), None)
        self.state_layouts = (StateLayout(((2,), (1, 3))),)
        self.module = nn.Module()
        self.vocab_size, self.max_model_len = VOCABULARY, 4096
        self.eos_token_ids = frozenset()
        self.dtype, self.device, self.output_layer = torch.float32, torch.device("cpu"), None
        self.num_rows = 0
        self.overflows = False
        self._backend: AttentionBackend | None = None
        self._states: StateMemory | None = None
        self.recall_fingerprint("a hash chain")

    def linear_widths(self) -> dict[str, Widths]:
        return {}

    def attach(self, backend: AttentionBackend, states: StateMemory | None = None) -> None:
        self._backend, self._states = backend, states

    def detach(self) -> None:
        self._backend = self._states = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        assert self._backend is not None and self._states is not None
        step = self._states.recurrence
        assert step is not None
        hashes, lengths = (views.view(len(views), -1)[:, 0] for views in self._states.layers[0])
        sums = self._states.layers[0][0][:, 1]
        self.num_rows += len(token_ids)
        row = torch.zeros(len(token_ids), 1, 8)
        values = token_ids.float().view(-1, 1, 1).expand_as(row).contiguous()
        means = self._backend.attend(0, row, row, values, AttentionOptions(1.0)).flatten(1)[:, 0]
        starts, saves = step.starts.tolist(), dict(step.saves.tolist())
        logits = torch.zeros(len(token_ids), VOCABULARY)
        before = hashes.clone(), lengths.clone(), sums.clone()
        for i, (source, target) in enumerate(
            zip(step.sources.tolist(), step.targets.tolist(), strict=True)
        ):
            state, length, total = (int(part[source]) if source >= 0 else 0 for part in before)
            first = starts[i]
            assert length == int(positions[first]), "a state of another length"
            mean = (total + int(token_ids[first])) / (length + 1)
            assert abs(mean - float(means[first])) < 0.01, "K/V of other tokens"
            for at in range(first, starts[i + 1]):
                state, length = follow(state, int(token_ids[at])), length + 1
                total += int(token_ids[at])
                logits[at, state % VOCABULARY] = 1.0
                if at in saves:
                    hashes[saves[at]], lengths[saves[at]], sums[saves[at]] = state, length, total
            hashes[target] = float("inf") if self.overflows else state
            lengths[target], sums[target] = length, total
        return logits[logit_rows]


class Harness(CoreHarness):
    """An engine core with the fake model."""

    def __init__(self, **options: Any) -> None:
        self.model = HashDecoder()
        super().__init__(self.model, expected_answer, **{"num_blocks": 64, **options})


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    return request.param  # type: ignore[no-any-return]


def test_a_prompt_again_and_its_continuation(deterministic: bool) -> None:
    harness = Harness(deterministic=deterministic)
    prompt = [i * 7 % 50 for i in range(30)]
    assert harness.run(prompt) == 0
    assert harness.run(prompt) == (28 if deterministic else 29)
    longer = prompt + expected_answer(prompt, 5) + [1, 2, 3]
    assert harness.run(longer) == (32 if deterministic else 34)


def test_a_fork_is_hit_to_the_token_from_the_third_prompt_on() -> None:
    harness = Harness(max_num_batched_tokens=16)
    shared = [i * 3 % 50 for i in range(90)]
    assert harness.run([*shared, 1, 2, 3]) == 0
    explanation = harness.core.manager.explain(TokenSequence("probe", [*shared, 4, 5, 6]))
    assert explanation.reason is MissReason.STATE and explanation.known_tokens == 90
    harness.run([*shared, 4, 5, 6])
    assert harness.run([*shared, 7, 8, 9]) == 90


def test_prompts_that_arrive_together_compute_their_prefix_once() -> None:
    harness = Harness(num_blocks=400, num_states=40)
    shared = [i * 3 % 50 for i in range(200)]
    groups = [harness.submit([*shared, i, i + 1]) for i in range(8)]
    harness.finish()
    for group in groups:
        assert harness.answer(group) == expected_answer(group.prompt_token_ids, 5)
    assert harness.model.num_rows <= 202 + 7 * 4 + 8 * 5


def test_no_request_waits_for_one_that_is_not_stored() -> None:
    harness = Harness(num_blocks=400, num_states=40, max_num_batched_tokens=64)
    shared = [i * 3 % 50 for i in range(200)]
    harness.run([*shared, 1, 2, 3])
    private = harness.submit([*shared, 4, 5, 6], count=100)
    private.requests[0].sequence.is_stored = False
    other = harness.submit([*shared, 7, 8, 9])
    while not other.finished:
        harness.core.step()
    assert not private.finished


def test_a_single_state_serves_one_request_after_another() -> None:
    harness = Harness(num_states=1)
    prompt = [i * 7 % 50 for i in range(30)]
    for _ in range(3):
        assert harness.run(prompt) == 0
        prompt += [*expected_answer(prompt, 5), 1, 2]


def test_a_state_that_is_not_finite_is_not_cached() -> None:
    harness = Harness(max_num_batched_tokens=16)
    prompt = [i * 7 % 50 for i in range(40)]
    harness.model.overflows = True
    group = harness.submit(prompt)
    harness.core.step()
    harness.core.abort(group.request_id)
    harness.model.overflows = False
    assert harness.run(prompt) == 0


def test_preempted_requests_resume(deterministic: bool) -> None:
    harness = Harness(num_blocks=14, num_states=5, deterministic=deterministic)
    groups = [harness.submit([i, *range(10)], count=12) for i in range(5)]
    harness.finish()
    assert harness.core.num_preemptions
    for group in groups:
        assert harness.answer(group) == expected_answer(group.prompt_token_ids, 12)


def test_states_and_blocks_share_the_memory() -> None:
    config = Harness(num_blocks=None, kv_cache_memory=1_000_000).core.manager.config
    block, state = 4 * 2 * 8 * 4, 5 * 4  # tokens, K and V, elements, fp32
    used = config.num_blocks * block + config.num_states * state
    assert 1_000_000 - block < used <= 1_000_000
    assert config.num_states == config.num_blocks * config.block_size // 128


def test_states_that_do_not_fit_the_memory_are_refused() -> None:
    with pytest.raises(OutOfMemoryError, match=r"20,000,000,000,000 for states \(num_states\)"):
        Harness(num_states=10**12)
    with pytest.raises(OutOfMemoryError, match="at least 2,256, for one block and 100 states"):
        Harness(num_blocks=None, num_states=100, kv_cache_memory=2_000)


@pytest.mark.parametrize("seed", range(10))
def test_random_requests(seed: int) -> None:
    draw = random.Random(seed)
    harness = Harness(
        num_blocks=draw.choice([20, 40, 100]),
        num_states=draw.choice([2, 3, 6, 20]),
        deterministic=draw.random() < 0.3,
        partial_hits=draw.random() < 0.8,
        deduplicate=draw.random() < 0.8,
        max_num_batched_tokens=draw.choice([7, 16, 64]),
        max_num_seqs=draw.choice([2, 4, 16]),
    )
    harness.run_random(draw, length=60, most_tokens=9)
