"""Greedy answers under masks, selected in the model's pass, match those of masked logits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MoshiConfig, MoshiForCausalLM

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.errors import EngineError
from headstart.weights.greedy_head import every_token, mask_logits
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

PROMPT = list(range(3, 40))
FORM = StructuredOutputsParams(regex="(ab|ba){2}[0-9]{3}x")
MASKS: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": FORM},
    "allowed": {"allowed_token_ids": [5, 9, 70, 71, 200]},
    "bad words": {"bad_words": ["the", "a b"]},
    "all": {
        "structured_outputs": FORM,
        "allowed_token_ids": list(range(10, 383)),
        "bad_words": ["ab7"],
    },
    "none": {},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    model = save_smallest(folder, layers=1, tokenizer=TINY_TOKENIZERS["byte_level"]())
    llm = make_llm(model, speculation="off")  # so that each step chooses one token
    yield llm
    llm.close()


def ask(llm: LLM, *kinds: str, **options: Any) -> list[list[int]]:
    assert llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0, max_tokens=10, **MASKS[kind], **options) for kind in kinds
    ]
    outputs = llm.generate([PROMPT] * len(kinds), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kinds", [[kind] for kind in MASKS] + [list(MASKS)], ids=" ".join)
def test_the_answer_matches_masked_logits(
    llm: LLM, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected answer comes from a request with log-probabilities, which needs all logits."""
    expected = ask(llm, *kinds, logprobs=0)
    choose, masks = llm.engine.model.choose, []

    def spy(*arguments: Any, allowed: np.ndarray | None = None) -> list[int]:
        masks.append(allowed)
        return choose(*arguments, allowed=allowed)

    monkeypatch.setattr(llm.engine.model, "choose", spy)
    assert ask(llm, *kinds) == expected
    assert len(masks) >= 8  # every step, prefill included
    assert (masks[0] is None) == (kinds == ["none"])


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {7: 1.0}}, {"min_tokens": 10}, {"logprobs": 1}, {"presence_penalty": 1.0}],
    ids=str,
)
def test_other_options_use_all_logits(
    llm: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.model, "choose", None)
    assert ask(llm, "bad words", **options)


def test_an_answer_without_allowed_tokens_fails_alone(llm: LLM) -> None:
    words = [i for i in range(382) if llm.get_tokenizer().decode([i]) in "ab"]  # type: ignore[union-attr]
    banned = SamplingParams(
        temperature=0, max_tokens=9, allowed_token_ids=words, bad_words=["aa", "ab", "ba", "bb"]
    )
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    runs = llm.engine
    groups = [runs.submit(llm.frontend.prepare(PROMPT, params)) for params in (banned, plain)]
    errors: list[EngineError | None] = []
    while runs.has_unfinished:
        errors += [result.error for result in runs.step() if result.group.finished]
        runs.manager.check()
    assert len(groups) == 2
    assert [str(error) for error in errors] == [
        "every token is banned, or a penalty overflows",
        "None",
    ]


SIZE = 600


@settings(max_examples=50)
@given(st.sampled_from([0, 3, 40, 300, 580, 597, 600]), st.integers(0, 2**31), st.booleans())
def test_logits_are_masked_where_a_bit_is_clear(count: int, seed: int, odd: bool) -> None:
    """Masks with few, half and nearly all bits; banned logits have any value."""
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.standard_normal((3, SIZE), dtype=np.float32))
    if odd:
        logits[torch.from_numpy(draw.random((3, SIZE)) < 0.1)] = float("nan")
        logits[torch.from_numpy(draw.random((3, SIZE)) < 0.1)] = float("inf")
    bits = np.zeros((3, SIZE), dtype=bool)
    for row in bits:
        row[draw.permutation(SIZE)[:count]] = True
    bits[1] = True
    expected = torch.where(torch.from_numpy(bits), logits, float("-inf"))
    allowed = np.stack([every_token(SIZE)] * 3)
    allowed[:, : SIZE // 8] = np.packbits(bits, axis=1, bitorder="little")
    mask_logits(logits, allowed)
    assert torch.equal(logits.nan_to_num(7), expected.nan_to_num(7))


def test_a_head_may_be_narrower_than_the_embedding(tmp_path: Path) -> None:
    """Regression: masks had 385 tokens of 384, as Moshi's embedding has a row for padding."""
    config = MoshiConfig(
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        ffn_dim=64,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    MoshiForCausalLM(config).save_pretrained(tmp_path)
    moshi = make_llm(tmp_path)
    assert moshi.engine.model.vocab_size == 384
    for options in ({"allowed_token_ids": [5, 6]}, {"presence_penalty": 1.0}):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **options)
        [output] = moshi.generate([[1, 2, 3]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert "presence_penalty" in options or set(output.outputs[0].token_ids) <= {5, 6}
    moshi.close()
