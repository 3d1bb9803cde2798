"""Prompts with embeddings and position ids, compared with a forward pass of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.cache import MultiModalItem
from headstart.engine.request import (
    PlacedRows,
    PrecomputedEmbeddings,
    PreparedPrompt,
    PromptExtras,
    RotaryPositions,
)
from tests.tiny_models import VOCABULARY, save_tiny

PLACEHOLDER = 5
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


def rows_of(seed: int, count: int = 21) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed))


def make_prompt(seed: int, *, gap: int = 0, start: int = 9) -> PreparedPrompt:
    """Return tokens, 21 embedding rows from `start` on, and tokens; positions jump by `gap`."""
    tokens = torch.randint(6, VOCABULARY, (50,), generator=torch.Generator().manual_seed(1))
    rows = rows_of(seed)
    token_ids = tokens.tolist()
    token_ids[start : start + len(rows)] = [PLACEHOLDER] * len(rows)
    places = np.arange(len(token_ids))
    places[start + len(rows) :] += gap
    extras = PromptExtras(
        (MultiModalItem(b"rows %d gap %d" % (seed, gap), start, len(rows)),),
        PrecomputedEmbeddings([PlacedRows(start, rows)]),
        RotaryPositions(places[np.newaxis], gap),
    )
    return PreparedPrompt(token_ids, extras=extras)


def expect(oracle: PreTrainedModel, prompt: PreparedPrompt) -> list[int]:
    """Return greedy tokens of whole forward passes over the embeddings and positions."""
    extras = prompt.extras
    assert extras is not None and extras.embeddings is not None and extras.positions is not None
    token_ids = list(prompt.token_ids)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            embedded = oracle.get_input_embeddings()(torch.tensor(token_ids))
            for position, rows in extras.embeddings.between(0, len(prompt.token_ids)):
                embedded[position : position + len(rows)] = rows
            places = torch.from_numpy(extras.positions.between(0, len(token_ids)))
            logits = oracle(inputs_embeds=embedded[None], position_ids=places).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt.token_ids) :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 14, "block_size": 8},  # two at a time, the second is preempted
        {"deterministic": True, "block_size": 8},
    ],
)
def test_rows_and_positions_of_the_caller(
    folder: Path, oracle: PreTrainedModel, options: dict[str, Any]
) -> None:
    llm = LLM(folder, debug=True, **({"num_blocks": 64} | options))
    plain = PreparedPrompt([7] * 30)
    prompts = [make_prompt(2), make_prompt(3, gap=40), make_prompt(2), plain, make_prompt(4)]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt is not plain:
                assert output.outputs[0].token_ids == expect(oracle, prompt)
    assert (llm.engine.num_preemptions > 0) == (options.get("num_blocks") == 14)
    llm.close()


def test_positions_continue_after_the_prompt() -> None:
    positions = RotaryPositions(np.array([[0, 1, 1, 2], [0, 1, 2, 2]]), -1)
    assert positions.between(2, 6).tolist() == [[1, 2, 3, 4], [2, 2, 3, 4]]
    assert positions.between(5, 7).tolist() == [[4, 5], [4, 5]]


def test_other_rows_never_hit(folder: Path) -> None:
    llm = LLM(folder, num_blocks=64, block_size=8, debug=True)
    llm.generate(make_prompt(2), GREEDY)
    [other] = llm.generate(make_prompt(3), GREEDY)
    [same] = llm.generate(make_prompt(2), GREEDY)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (9, 49)
    llm.close()
