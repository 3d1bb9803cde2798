"""LoRA adapters for the tiny models, saved and run by PEFT as the reference."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

__all__ = ["Oracle", "attach_adapter", "make_adapter"]


@contextmanager
def _of_peft() -> Iterator[Any]:
    """Import PEFT without warnings, as it uses deprecated names of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        from peft.tuners.lora import torchao

        # It would look there for classes that torchao 0.18 has no more; no layer here is torchao's.
        torchao.is_torchao_available = lambda: False
        yield peft


def make_adapter(
    base: Path, folder: Path, seed: int = 0, kind: Any = AutoModelForCausalLM, **options: Any
) -> Path:
    """Write an adapter with random A and B for the model in `base`; options of `LoraConfig`."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options
    with _of_peft() as peft, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        peft.get_peft_model(kind.from_pretrained(base), config).save_pretrained(folder)
    return folder


def attach_adapter(model: Any, adapter: Path) -> Any:
    """Return the model with an unmerged adapter."""
    with _of_peft() as peft:
        return peft.PeftModel.from_pretrained(model, adapter)


class Oracle:
    """The model in `base` with an adapter (or none), run by PEFT and transformers."""

    def __init__(self, base: Path, adapter: Path | None, *, merged: bool = False) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        if adapter is not None:
            model = attach_adapter(model, adapter)
            model = model.merge_and_unload() if merged else model
        self._model = model

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Generate `count` tokens after the prompt."""
        ids = torch.tensor([list(prompt)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result: Tensor = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = result[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits `[tokens, vocab]` after each token."""
        with torch.no_grad():
            result: Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return result
