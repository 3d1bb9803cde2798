"""The smallest engine: a model with two layers of width 32, in float32 on one thread."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from headstart import LLM, AsyncLLM
from headstart.engine.drafts.drafting import RowCost

__all__ = ["VOCABULARY", "draft_always", "make_llm", "save_smallest"]

AnyLLM = TypeVar("AnyLLM", LLM, AsyncLLM)
VOCABULARY = 151


def save_smallest(
    folder: Path,
    poison: int | None = None,
    positions: int = 256,
    layers: int = 2,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Save the model, with the same weights each time; return the folder.

    poison: a token whose embedding is infinite. layers: with one layer a step takes half the time,
    for tests that do not depend on the model. tokenizer: saved too; the vocabulary then has five
    tokens more than the tokenizer, like models that are padded to a round number.
    """
    torch.manual_seed(0)
    ending: dict[str, int] = {}
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        ending = {"eos_token_id": tokenizer.convert_tokens_to_ids(tokenizer.eos_token)}
    config = LlamaConfig(
        vocab_size=VOCABULARY if tokenizer is None else len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        **ending,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, weight.shape[-1] ** -0.5)
    if poison is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[poison] = float("inf")
    model.save_pretrained(folder)
    return folder


def make_llm(folder: Path, **options: Any) -> LLM:
    """Return an engine for the saved model, by default with 24 blocks of 16 tokens."""
    return LLM(folder, **{"dtype": "float32", "num_blocks": 24, "num_threads": 1, **options})


class _FreeRows(RowCost):
    """Costs by which the longest draft always pays, however busy the machine is."""

    def seconds(self, rows: int) -> float:
        return 1.0


def draft_always(llm: AnyLLM) -> AnyLLM:
    """Let an engine draft as many tokens as it may, whatever its steps cost; return it."""
    if llm.engine.drafting is not None:
        llm.engine.drafting.row_cost = _FreeRows()
    return llm
