"""Greedy answers under masks: chosen in the model's pass, as from masked logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.errors import EngineError
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
    made = make_llm(save_smallest(folder, layers=1, tokenizer=TINY_TOKENIZERS["byte_level"]()))
    yield made
    made.close()


def ask(llm: LLM, *kinds: str, **options: Any) -> list[list[int]]:
    assert llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0, max_tokens=10, **MASKS[kind], **options) for kind in kinds
    ]
    outputs = llm.generate([PROMPT] * len(kinds), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kinds", [[kind] for kind in MASKS] + [list(MASKS)], ids=" ".join)
def test_the_answer_is_that_of_masked_logits(
    llm: LLM, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, which need all logits, say what the answer must be."""
    expected = ask(llm, *kinds, logprobs=0)
    choose, given = llm.engine.model.choose, []

    def spy(*arguments: Any, allowed: np.ndarray | None = None) -> list[int]:
        given.append(allowed)
        return choose(*arguments, allowed=allowed)

    monkeypatch.setattr(llm.engine.model, "choose", spy)
    assert ask(llm, *kinds) == expected
    assert len(given) >= 8  # every step, prefill included
    assert (given[0] is None) == (kinds == ["none"])


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {7: 1.0}}, {"min_tokens": 10}, {"logprobs": 1}, {"presence_penalty": 1.0}],
    ids=str,
)
def test_who_wants_more_gets_all_logits(
    llm: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.model, "choose", None)
    assert ask(llm, "bad words", **options)


def test_an_answer_without_an_allowed_token_ends_alone(llm: LLM) -> None:
    [word] = [i for i in range(382) if llm.get_tokenizer().decode([i]) == "a"]  # type: ignore[union-attr]
    banned = SamplingParams(temperature=0, allowed_token_ids=[word], bad_words=["a"])
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    runs = llm.engine
    groups = [runs.submit(runs.prepare(PROMPT, params)) for params in (banned, plain)]
    errors: list[EngineError | None] = []
    while runs.has_unfinished:
        errors += [result.error for result in runs.step() if result.group.finished]
        runs.manager.check()
    assert len(groups) == 2
    assert [str(error) for error in errors] == [
        "every token is banned, or a penalty overflows",
        "None",
    ]


def test_what_is_banned_may_be_no_number() -> None:
    """A hidden state that is not finite shows in every logit, so in an allowed one too."""
    from headstart.models.greedy_head import every_token, greedy_tokens, mask_logits

    logits = torch.tensor([[1.0, 2.0, float("inf"), -1.0], [float("nan"), 0.0, 3.0, 4.0]])
    allowed = np.stack([every_token(4)] * 2)
    allowed[0, 0] = 0b1001
    mask_logits(logits, allowed)
    assert logits[0].tolist() == [1.0, -float("inf"), -float("inf"), -1.0]
    assert greedy_tokens(logits) == [0, -1]
