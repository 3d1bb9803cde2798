"""An engine whose model has layers with and without a sliding window, in two pools of blocks.

The model is a fake. A token's V is a hash of the token and its position, and attention is uniform,
so a row's outputs count exactly the tokens that it saw. An answer that read a block of another
sequence or position, or one token more or less, differs from the answer that plain Python computes.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.attention import AttentionBackend, AttentionOptions, LayerLayout, PagedKVMemory
from headstart.attention.memory import StateMemory
from headstart.engine.config import EngineConfig
from headstart.engine.parts import plan_memory
from headstart.errors import ConfigError, OutOfMemoryError
from headstart.models.decoder import DecoderModel, EmbeddingOverlay, Widths
from tests.engine.core_harness import CoreHarness

VOCABULARY = 50
WINDOWS = (9, None, 5)


def mark(token: int, position: int) -> int:
    return (token * 37 + position * 11 + token * position) % 97


def expected_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        marks = [mark(token, position) for position, token in enumerate(tokens)]
        sums = [sum(marks[-window:] if window else marks) for window in WINDOWS]
        tokens.append(sum((i + 1) * total for i, total in enumerate(sums)) % VOCABULARY)
    return tokens[len(prompt) :]


class WindowDecoder(DecoderModel):
    """A model that chooses the token that the sums of the marks in each window give."""

    def __init__(self, windows: tuple[int | None, ...] = WINDOWS) -> None:
        layouts = (LayerLayout(kv_heads=1, key_dim=8, value_dim=8, window=w) for w in windows)
        super().__init__(tuple(layouts), None)
        self.module = nn.Module()
        self.vocab_size, self.max_model_len = VOCABULARY, 4096
        self.eos_token_ids = frozenset()
        self.dtype, self.device, self.output_layer = torch.float32, torch.device("cpu"), None
        self.num_rows = 0
        self._backend: AttentionBackend | None = None

    def linear_widths(self) -> dict[str, Widths]:
        return {}

    def attach(self, backend: AttentionBackend, states: StateMemory | None = None) -> None:
        self._backend = backend

    def detach(self) -> None:
        self._backend = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        assert self._backend is not None
        self.num_rows += len(token_ids)
        zeros = torch.zeros(len(token_ids), 1, 8)
        marks = mark(token_ids, positions).float()  # type: ignore[arg-type, attr-defined]
        chosen = torch.zeros(len(token_ids))
        for layer, layout in enumerate(self.layouts):
            options = AttentionOptions(1.0, layout.window)
            value = marks.view(-1, 1, 1).expand(-1, 1, 8)
            means = self._backend.attend(layer, zeros, zeros, value, options)[:, 0, 0]
            seen = (positions + 1).clamp(max=layout.window or 10**6)
            chosen += (layer + 1) * (means * seen).round()
        logits = torch.nn.functional.one_hot(chosen.long() % VOCABULARY, VOCABULARY)
        return logits.float()[logit_rows]


class Harness(CoreHarness):
    """An engine core with the fake model."""

    def __init__(self, **options: Any) -> None:
        self.model = WindowDecoder()
        super().__init__(
            self.model,
            expected_answer,
            **{"num_blocks": 100, "max_num_batched_tokens": 16, **options},
        )


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    return request.param  # type: ignore[no-any-return]


TEXT = [i * i * 7 % 50 for i in range(200)]


def test_blocks_behind_the_window_are_released(deterministic: bool) -> None:
    """The window pool is an eighth of the prompt."""
    harness = Harness(num_window_blocks=9, deterministic=deterministic)
    assert harness.memory.num_window_blocks == 9
    assert harness.run(TEXT, 40) == 0
    assert harness.run([*TEXT, *expected_answer(TEXT, 40), 3], 40) >= 232


@pytest.mark.parametrize("caching", [True, False])
def test_mixed_lengths(caching: bool, deterministic: bool) -> None:
    harness = Harness(enable_prefix_caching=caching, deterministic=deterministic)
    for _ in range(2):
        groups = [harness.submit(TEXT[:n], n % 13 + 1) for n in (1, 3, 9, 33, 70, 120)]
        harness.finish()
        for group, n in zip(groups, (1, 3, 9, 33, 70, 120), strict=True):
            assert harness.answer(group) == expected_answer(TEXT[:n], n % 13 + 1)


def test_forks_within_and_behind_the_window(deterministic: bool) -> None:
    harness = Harness(num_window_blocks=40, deterministic=deterministic)
    harness.run(TEXT)
    for n in (199, 196, 192, 191, 150, 100, 12, 3, 150, 199):
        harness.run([*TEXT[:n], 1, 2])


def test_no_rows_are_copied_before_the_step_that_writes_them() -> None:
    """Regression: a step recomputed a block without a cached window, and copied from it."""
    harness = Harness(num_window_blocks=20, max_num_batched_tokens=40)
    harness.run(TEXT[:30])
    harness.run(TEXT[100:190])
    prompts = [[*TEXT[:18], 1], [*TEXT[:14], 1, 2]]
    groups = [harness.submit(prompt) for prompt in prompts]
    harness.finish()
    for group, prompt in zip(groups, prompts, strict=True):
        assert harness.answer(group) == expected_answer(prompt, 5)


def test_preempted_requests_resume(deterministic: bool) -> None:
    harness = Harness(num_blocks=40, num_window_blocks=12, deterministic=deterministic)
    groups = [harness.submit(TEXT[i : i + 30], 30) for i in range(6)]
    harness.finish()
    assert harness.core.num_preemptions
    for i, group in enumerate(groups):
        assert harness.answer(group) == expected_answer(TEXT[i : i + 30], 30)


def test_steps_may_be_shorter_than_the_window(deterministic: bool) -> None:
    """Regression: a request that resumed behind a window needed two windows to be admitted."""
    options = {"num_window_blocks": 15, "block_size": 1, "max_num_batched_tokens": 4}
    harness = Harness(num_blocks=150, deterministic=deterministic, **options)
    harness.run(TEXT[:30])
    assert harness.run([*TEXT[:30], *TEXT[100:140]]) == 30


def test_owners_do_not_wait_for_requests_that_lack_window_blocks() -> None:
    """Regression: a running prompt was preempted for a request that could not be admitted."""
    options = {"num_window_blocks": 16, "block_size": 1, "max_num_batched_tokens": 5}
    harness = Harness(num_blocks=200, max_num_seqs=2, **options)
    for owner in ("a", "b"):
        harness.core.manager.shares.set(owner, 1.0)
        harness.submit(TEXT[:30], salt=owner)
        harness.finish()
    prompts = [("a", TEXT[60:110]), ("b", [*TEXT[:30], *TEXT[50:90]])]
    groups = [harness.submit(prompt, salt=owner) for owner, prompt in prompts]
    harness.finish()
    for group in groups:
        assert harness.answer(group) == expected_answer(group.prompt_token_ids, 5)
    assert harness.core.num_preemptions <= 2


def test_a_prompt_advances_after_it_preempted_a_request_of_another_owner() -> None:
    """Regression: the preempted request ran first again, and was preempted again, for ever."""
    options = {"num_window_blocks": 7, "max_num_batched_tokens": 7, "max_num_seqs": 2}
    harness = Harness(num_blocks=24, enable_prefix_caching=False, **options)
    harness.core.manager.shares.set("a", 1.0)
    harness.core.manager.shares.set("b", 1.0)
    groups = [harness.submit(TEXT[8:78], 1, salt="b"), harness.submit(TEXT[39:51], 5, salt="a")]
    for _ in range(60):
        harness.core.step()
    for group, prompt, count in zip(groups, (TEXT[8:78], TEXT[39:51]), (1, 5), strict=True):
        assert harness.answer(group) == expected_answer(prompt, count)


@pytest.mark.parametrize("seed", range(10))
def test_random_requests(seed: int) -> None:
    draw = random.Random(seed)
    tokens = draw.choice([7, 16, 40])
    least = -(-(tokens + 9) // 4) + 2
    harness = Harness(
        num_blocks=draw.choice([40, 60, 100]),
        num_window_blocks=least + draw.choice([0, 1, 5, 12]),
        deterministic=draw.random() < 0.3,
        partial_hits=draw.random() < 0.8,
        deduplicate=draw.random() < 0.8,
        enable_prefix_caching=draw.random() < 0.9,
        max_num_batched_tokens=tokens,
        max_num_seqs=draw.choice([2, 4, 16]),
        speculation=draw.choice([0, 0, 3]),
    )
    assert harness.memory.num_window_blocks
    harness.run_random(draw, length=80, most_tokens=20)


GEMMA_3_1B = tuple(LayerLayout(1, 256, 256, None if layer % 6 == 5 else 512) for layer in range(26))
BLOCK = 1 * 512 * 2 * 16  # K/V heads, elements, bf16, tokens: of a layer


def gemma() -> WindowDecoder:
    decoder = WindowDecoder()
    decoder.layouts, decoder.dtype = GEMMA_3_1B, torch.bfloat16
    return decoder


def test_windows_take_a_quarter_of_the_memory_of_a_long_context() -> None:
    config = EngineConfig(num_blocks=2000, cache_dir="off")
    plan = plan_memory(config, gemma(), 0)
    assert plan.num_blocks * config.block_size == 32_000
    sizes = (config.block_size, torch.bfloat16, "meta")
    grouped = PagedKVMemory(GEMMA_3_1B, plan.num_blocks, *sizes, plan.num_window_blocks)
    assert grouped.nbytes <= PagedKVMemory(GEMMA_3_1B, plan.num_blocks, *sizes).nbytes / 4


@pytest.mark.parametrize("budget", [100_000_000, 1_000_000_000])
def test_blocks_and_window_blocks_share_the_memory(budget: int) -> None:
    plan = plan_memory(EngineConfig(kv_cache_memory=budget), gemma(), 0)
    assert plan.num_window_blocks == max(162, -(-plan.num_blocks // 10))
    used = (plan.num_blocks * 4 + plan.num_window_blocks * 22) * BLOCK
    assert budget - 48 * BLOCK < used <= budget
    fixed = EngineConfig(kv_cache_memory=budget, num_window_blocks=200)
    plan = plan_memory(fixed, gemma(), 0)
    used = (plan.num_blocks * 4 + 200 * 22) * BLOCK
    assert plan.num_window_blocks == 200
    assert budget - 4 * BLOCK < used <= budget


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 162},
        {"num_blocks": 1000, "cache_dir": "/tmp/never made"},
        {"num_blocks": 1000, "remote_cache": "redis://localhost:1/0"},
        {"num_blocks": 300, "num_window_blocks": 300},
    ],
    ids=str,
)
def test_all_layers_share_one_pool(options: dict[str, Any]) -> None:
    plan = plan_memory(EngineConfig(**options), gemma(), 0)
    assert (plan.num_blocks, plan.num_window_blocks) == (options["num_blocks"], 0)


@pytest.mark.parametrize("windows", [(None, None), (512, 512)], ids=str)
def test_layers_of_one_kind_share_one_pool(windows: tuple[int | None, ...]) -> None:
    assert plan_memory(EngineConfig(num_blocks=1000), WindowDecoder(windows), 0).window == 0


def test_numbers_of_window_blocks_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_window_blocks is 161; allowed: at least 162, for"):
        plan_memory(EngineConfig(num_blocks=1000, num_window_blocks=161), gemma(), 0)
    with pytest.raises(OutOfMemoryError, match="10,000,000,000 KV blocks and 1,000,000,000 window"):
        plan_memory(EngineConfig(num_blocks=10**10), gemma(), 0)
