"""`weights="int8"`, "int5" and "int4": answers, adapters, and K/V of one model alone."""

import shutil
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart import LLM, LoRARequest, SamplingParams
from headstart.errors import UnsupportedAdapterError
from headstart.models.loader import load_model
from headstart.models.lora_files import read_weights
from headstart.weights.format import WeightKind
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.rounded_rows import round_inputs
from tests.tiny_adapters import make_adapter
from tests.tiny_models import VOCABULARY, save_tiny
from tests.weights.stored import quantized_matrices

KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


def save_unpacked(llm: LLM, folder: Path) -> Path:
    """Save the model of an engine as a checkpoint whose float weights are the unpacked ones."""
    assert llm.engine.model.folder is not None
    shutil.copytree(llm.engine.model.folder, folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, matrix in quantized_matrices(llm.engine.model.module).items():
        plain.get_submodule(name).weight = torch.nn.Parameter(matrix.unpack())
    plain.save_pretrained(folder)
    return folder


def generate(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Any]:
    dict_prompts = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(dict_prompts, GREEDY, use_tqdm=False, **options)
    llm.close()
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_unpacked_weights_with_and_without_an_adapter(
    kind: WeightKind, tmp_path: Path
) -> None:
    base = save_tiny("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    adapters = [None, LoRARequest("one", 1, str(adapter))] * 5
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (20, 33, 24, 17, 40)
        for _ in range(2)
    ]
    prompts[2] = prompts[1]
    quantized = make_llm(base, weights=kind)
    plain = make_llm(save_unpacked(quantized, tmp_path / "plain"))
    round_inputs(plain.engine.model.module, quantized.engine.model.module)
    answers = generate(quantized, prompts, lora_request=adapters)
    expected = generate(plain, prompts, lora_request=adapters)
    assert answers[1].token_ids != answers[2].token_ids, "the adapter changes nothing"
    apart: list[list[float]] = []
    for one, other in zip(answers, expected, strict=True):
        # The first token: later ones hang on it.
        rank_of = {token: logprob.logprob for token, logprob in one.logprobs[0].items()}
        steps = [rank_of[token] - logprob.logprob for token, logprob in other.logprobs[0].items()]
        apart.append([abs(step) for step in steps])
        assert max(apart[-1]) < (0.002 if kind == "int8" else 0.1)
    # A near tie of two whole numbers of a row, for which the wide limit is, is rare.
    for with_or_without in (apart[::2], apart[1::2]):
        assert median(step for steps in with_or_without for step in steps) < 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_may_bring_a_copy_of_a_weight_but_not_another(
    kind: WeightKind, tmp_path: Path
) -> None:
    """PEFT saves the LM head that it adapts, which a quantized model no longer has in floats."""
    base = save_tiny("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    model = load_model(base, weights=kind)
    assert read_weights(adapter, model, 64).pairs.keys() >= {"lm_head"}
    weights = load_file(adapter / "adapter_model.safetensors")
    weights["base_model.model.lm_head.base_layer.weight"][0, 0] += 0.1
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(UnsupportedAdapterError, match="nor a copy"):
        read_weights(adapter, model, 64)


def test_blocks_of_other_bits_are_not_hit(tmp_path: Path) -> None:
    """One folder of K/V serves one model whose weights are stored in four ways."""
    model, cache_dir = save_smallest(tmp_path / "model"), str(tmp_path / "kept")
    prompt = {"prompt_token_ids": list(range(3, 67))}
    names, hits = [], []
    for weights in ("auto", "int8", "int5", "int4", "int4", "int5", "int8", "auto"):
        llm = make_llm(model, cache_dir=cache_dir, weights=weights)
        names.append(llm.engine.manager.hasher.model)
        [output] = llm.generate(prompt, GREEDY)
        hits.append(output.num_cached_tokens)
        llm.close()
    assert hits == [0, 0, 0, 0, 48, 48, 48, 48]
    assert names[:4] == names[:3:-1] and len(set(names)) == 4
