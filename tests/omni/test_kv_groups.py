"""Stages with sliding-window layers and full-attention layers.

Each kind is a separate KV group in the reference, whose store supports only one group.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import UnsupportedModelError
from headstart.omni.engine_stage import EngineStage, Feed, PromptFeed, StagePrompt
from headstart.omni.output_cache import OutputCache
from headstart.omni.pipeline import Pipeline, Progress
from headstart.omni.stage import TOKENS, Input, OmniRequest, Output, StageSpec
from headstart.omni.stage_decoder import StageDecoder, StageParts
from tests.omni.pipelines import start
from tests.tiny_models import HYBRIDS, tiny_config, tiny_model

WINDOW, WORDS, BLOCK = 8, 5, 4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attn_implementation": "eager",
}
CONTEXT = [7 * n % 64 for n in range(24)]  # three windows long
PROMPTS = [[*CONTEXT, 1, 2], [*CONTEXT, 3, 4, 5], [*CONTEXT[:14], 9, 9, 9], [*CONTEXT, 1, 2]]


def model(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).eval()
    return GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    ).eval()


@cache
def wanted(kind: str, prompt: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """Return greedy tokens and the last hidden rows by full passes of transformers' model."""
    whole: Any = model(kind)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(WORDS):
            output = whole(torch.tensor([ids]), output_hidden_states=True)
            ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt) :], output.hidden_states[-1][0]


class Writer:
    """One stage that outputs its hidden rows, and checks every answer against transformers."""

    def __init__(self, kind: str, *, enable_prefix_caching: bool = True, **options: Any) -> None:
        self.kind = kind
        whole: Any = model(kind)
        parts = StageParts(
            text_model=whole.model,
            head=whole.lm_head,
            give=lambda tensors: {"hidden": tensors.hidden},
        )
        config = {"num_blocks": 64, "block_size": BLOCK, "partial_hits": False, "debug": True}
        config["enable_prefix_caching"] = enable_prefix_caching
        self.cache = OutputCache(1 << 20)
        self.stage = EngineStage(
            StageSpec(
                name="writer",
                gives=(Output("hidden"),),
                enable_prefix_caching=enable_prefix_caching,
            ),
            StageDecoder(parts),
            self._feed,
            EngineConfig(**(config | options)),
            self.cache,
        )
        self.pipeline = Pipeline([self.stage], [Input("writer", "hidden"), Input("writer", TOKENS)])
        self.num_requests = 0

    @staticmethod
    def _feed(request: OmniRequest) -> Feed:
        params = SamplingParams(temperature=0, max_tokens=WORDS, ignore_eos=True)
        return PromptFeed(StagePrompt(request.prompt, params, None))

    def run(self, *prompts: list[int]) -> list[int]:
        """Run all prompts together, and return the number of stored rows that each used."""
        running: list[tuple[list[int], Progress]] = []
        for prompt in prompts:
            self.num_requests += 1
            request = OmniRequest(request_id=f"{self.num_requests}", prompt=prompt)
            running.append((prompt, start(self.pipeline, request)))
        while self.pipeline.has_unfinished:
            self.pipeline.step()
            self.cache.check()
        for prompt, progress in running:
            assert progress.error is None, progress.error
            text, rows = wanted(self.kind, tuple(prompt))
            tokens, hidden = (
                torch.cat([chunk.rows for chunk in progress.chunks[Input("writer", output)]])
                for output in (TOKENS, "hidden")
            )
            assert tokens.tolist() == text
            assert torch.allclose(hidden, rows, atol=1e-4)
        metrics = [progress.metrics["writer"] for _, progress in running]
        assert all(f.hit_rows.get("hidden", 0) == f.cached_tokens for f in metrics)
        return [f.cached_tokens for f in metrics]


KINDS = pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])


@KINDS
def test_rows_of_layers_with_and_without_a_window(kind: str) -> None:
    writer = Writer(kind)
    assert [writer.run(prompt) for prompt in PROMPTS] == [[0], [24], [12], [24]]
    writer.pipeline.close()


@KINDS
def test_results_without_caching_are_the_same(kind: str) -> None:
    writer = Writer(kind, enable_prefix_caching=False)
    assert [writer.run(prompt) for prompt in PROMPTS] == [[0]] * 4
    assert writer.cache.stats.entries == 0
    writer.pipeline.close()


@KINDS
def test_concurrent_preempted_prompts_in_chunks_shorter_than_a_window(kind: str) -> None:
    writer = Writer(kind, max_num_batched_tokens=6, num_blocks=10)
    for _ in range(2):
        writer.run(*PROMPTS)
    assert writer.stage.engine.num_preemptions > 0
    writer.pipeline.close()


def test_eviction_of_only_rows_or_only_both_kv_groups() -> None:
    """Here all layers of a block are evicted together, so their hits have the same length."""
    writer = Writer("gemma3", num_blocks=9)
    writer.run(PROMPTS[0])
    writer.cache.clear()
    assert writer.run(PROMPTS[1]) == [0]
    assert writer.run(PROMPTS[0]) == [24]
    writer.run([50] * 31)
    written = writer.cache.stats.written
    assert writer.run(PROMPTS[0]) == [0]
    assert writer.cache.stats.written == written
    assert writer.run(PROMPTS[0]) == [24]
    writer.pipeline.close()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_stage_with_recurrent_layers_is_refused(name: str) -> None:
    whole: Any = tiny_model(tiny_config(name))
    parts = StageParts(text_model=whole.model, head=whole.lm_head, give=lambda tensors: {})
    with pytest.raises(UnsupportedModelError, match="has recurrent layers"):
        StageDecoder(parts)
