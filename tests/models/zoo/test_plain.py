"""Decoders called part by part: of which models, and the same bits as through transformers."""

import logging
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.attention import Span, StepPlan
from headstart.models.compatibility.paged_kv import probe_model
from headstart.models.decoder import EmbeddingOverlay
from headstart.models.fused import FusedLayers
from headstart.models.greedy_head import greedy_tokens
from headstart.models.zoo.decoder import TransformersDecoder
from headstart.models.zoo.plain import AngleTable
from headstart.models.zoo.simplify import simplify
from headstart.models.zoo.swap import accelerate
from headstart.native import library
from tests.models.paged import Paged, Sequence
from tests.tiny_models import TINY, VOCABULARY, tiny_config

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

# Whose hidden rows come part by part, and whose from transformers' decoder; the logits of others
# are no plain products with the LM head, or its weight is not packed (Gemma scales embeddings).
STACKS = {"llama", "mistral", "qwen2", "qwen3"}
HEADS = {
    *("qwen3_moe", "phi3", "mixtral", "gpt_oss", "olmo2", "starcoder2", "gpt_neox"),
    *("opt", "gpt2", "smollm3", "glm4", "deepseek_v3"),
}


def paged(model: PreTrainedModel) -> Paged:
    made = Paged(model, fusion=accelerate(model))
    made.decoder.detach()
    simplify(made.decoder)
    made.decoder.attach(made.backend)
    return made


def step(
    engine: Paged, sequence: Sequence, count: int, rows: list[int]
) -> tuple[Tensor, list[int]]:
    """The next tokens of a sequence, twice: logits of some rows, then their likeliest tokens."""
    start, end = sequence.done, sequence.done + count
    sequence.done = end
    tokens, positions = torch.tensor(sequence.token_ids[start:end]), torch.arange(start, end)
    plan = StepPlan(
        torch.tensor(sequence.slots(start, end)), (Span(0, count, end, sequence.blocks),)
    )
    answers: list[Any] = []
    for compute in (engine.decoder.forward, engine.decoder.choose):
        engine.backend.begin_step(plan)
        answers.append(compute(tokens, positions, torch.tensor(rows, dtype=torch.int64)))
        engine.backend.end_step()
    return answers[0], answers[1]


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", TINY)
def test_part_by_part_has_the_same_bits_as_through_transformers(name: str) -> None:
    engine = paged(TINY[name]().to(torch.bfloat16))
    plain = engine.decoder.plain
    assert (plain is not None) == (name in STACKS | HEADS)
    assert (engine.decoder.fallback_reason is None) == (name in STACKS)
    if plain is None:
        return
    assert (plain._stack is not None) == (name in STACKS)
    mine, other = engine.add(prompt(30)), engine.add(prompt(30))
    for count, rows in ((13, [12]), (1, [0]), (7, []), (9, list(range(9)))):
        engine.decoder.plain = plain
        logits, chosen = step(engine, mine, count, rows)
        engine.decoder.plain = None
        expected, expected_chosen = step(engine, other, count, rows)
        assert torch.equal(logits, expected)
        assert chosen == expected_chosen == greedy_tokens(expected)


def test_angles_come_from_a_table_as_far_as_the_model_goes() -> None:
    module = LlamaRotaryEmbedding(tiny_config("llama"))
    asked: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[1].shape[1]))
    table = AngleTable(module, 3000, torch.empty(1, 1, 48, dtype=torch.bfloat16))
    for last in (3, 700, 1500, 2, 2999, 3000):
        positions = torch.tensor([last, 1, last // 2])
        for found, expected in zip(
            table(positions), module(table._like, positions.unsqueeze(0)), strict=True
        ):
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert [count for count in asked if count != 3] == [1024, 2048, 3000]
    assert asked.count(3) == 6 + 1  # the last time from the module, too


def test_angles_that_hang_on_other_rows_are_left_to_the_model() -> None:
    class Shrinking(LlamaRotaryEmbedding):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(x, position_ids)
            return cos / position_ids.max(), sin / position_ids.max()

    model = TINY["llama"]().to(torch.bfloat16)
    model.model.rotary_emb = Shrinking(model.config)
    decoder = paged(model).decoder
    assert decoder.plain is not None and decoder.plain._stack is None
    assert decoder.fallback_reason == (
        "its angles for a position depend on the other positions in the batch"
    )


@pytest.mark.parametrize("reason", ["adapters", "embeddings"])
def test_a_step_with_more_goes_through_the_whole_model(reason: str) -> None:
    engine = paged(TINY["llama"]().to(torch.bfloat16))
    sequence = engine.add(prompt(4))
    plan = StepPlan(torch.tensor(sequence.slots(0, 4)), (Span(0, 4, 4, sequence.blocks),))
    embeddings = EmbeddingOverlay(torch.tensor([1]), torch.ones(1, 48))
    engine.decoder.fusion.enabled = reason != "adapters"
    calls: list[int] = []
    engine.decoder.module.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.backend.begin_step(plan)
    engine.decoder.choose(
        torch.tensor(prompt(4)),
        torch.arange(4),
        torch.tensor([3]),
        embeddings if reason == "embeddings" else None,
    )
    engine.backend.end_step()
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["cap", "scale"])
def test_logits_that_are_more_than_products_are_left_to_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as are let through as they are up to some size, too."""
    forward = LlamaForCausalLM.forward

    @wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.clamp(-100, 100) if name == "cap" else output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    decoder = paged(TINY["llama"]().to(torch.bfloat16)).decoder
    assert decoder.plain is None
    assert decoder.fallback_reason == "its logits are more than products with the LM head"


def test_a_decoder_that_is_told_more_is_left_to_the_model() -> None:
    model = TINY["llama"]().to(torch.bfloat16)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "kind": 3}), with_kwargs=True
    )
    decoder = paged(model).decoder
    assert decoder.plain is None
    assert decoder.fallback_reason == "its decoder is called with input_ids, kind, position_ids"


def test_angles_that_need_more_are_left_to_the_model() -> None:
    """They cannot be called with positions alone, and are not tried."""

    class Scaled(LlamaRotaryEmbedding):
        def forward(
            self, x: Tensor, position_ids: Tensor, *, scale: float
        ) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(x, position_ids)
            return cos * scale, sin * scale

    model = TINY["llama"]().to(torch.bfloat16)
    model.model.rotary_emb = Scaled(model.config)
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "scale": 0.5}), with_kwargs=True
    )
    decoder = paged(model).decoder
    assert decoder.plain is not None and decoder.plain._stack is None
    assert decoder.fallback_reason == "its angles are computed from x, position_ids, scale"


def test_a_mistake_of_ours_is_no_other_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for one, and only speed was lost."""

    def broken(*args: object) -> None:
        raise IndexError("ours")

    monkeypatch.setattr(FusedLayers, "__call__", broken)
    with pytest.raises(IndexError, match="ours"):
        paged(TINY["llama"]().to(torch.bfloat16))


def test_why_it_is_left_to_the_model_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headstart"):
        paged(TINY["phi3"]().to(torch.bfloat16))
        paged(TINY["llama"]().to(torch.bfloat16))
    [message] = caplog.messages
    assert message == "Phi3ForCausalLM runs through transformers: 0 of its 3 layers are fused"


def test_a_head_with_a_bias_is_left_to_the_model() -> None:
    model = TINY["llama"]().to(torch.bfloat16)
    model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCABULARY, dtype=torch.bfloat16))
    decoder = paged(model).decoder
    assert decoder.plain is None and decoder.fallback_reason == "its LM head has a bias"


def test_other_dtypes_are_left_to_the_model() -> None:
    model = TINY["llama"]()
    decoder = TransformersDecoder(model, probe_model(model), fusion=accelerate(model))
    simplify(decoder)
    assert decoder.plain is None and decoder.fallback_reason == "its LM head is not packed"
