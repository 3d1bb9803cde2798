"""Gemma 4, whose layers differ in the width of their heads, compared with `generate`."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from headstart import LLM, SamplingParams
from headstart.errors import DamagedModelError
from headstart.models.loader import load_model
from headstart.models.transformers_backend import loader

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "shared K and V": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "experts": {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}


def save_gemma4(folder: Path, kind: str, has_vision: bool = False) -> Any:
    config = Gemma4TextConfig(
        vocab_size=131,
        vocab_size_per_layer_input=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **KINDS[kind],
    )
    torch.manual_seed(0)
    model: Any = Gemma4ForCausalLM(config).eval()
    if has_vision:
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        whole = Gemma4Config(text_config=config, vision_config=vision, audio_config=None)
        model = Gemma4ForConditionalGeneration(whole).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.3 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("has_vision", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gemma4_answers_as_transformers_does(tmp_path: Path, kind: str, has_vision: bool) -> None:
    """Regression: no checkpoint could be loaded since a check read a single width of its heads.

    With a vision part, a checkpoint with experts failed for lack of an image processor.
    """
    model = save_gemma4(tmp_path, kind, has_vision)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (5, 19, 40)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    with closing(LLM(tmp_path, dtype="float32", num_blocks=64)) as llm:
        assert not llm.takes_images
        assert (llm.engine.model.fallback_reason is None) is not (kind == "experts")
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=6,
            eos_token_id=200,  # none of the tokens
            output_logits=True,
            return_dict_in_generate=True,
        )
        [answer] = output.outputs
        assert list(answer.token_ids) == wanted.sequences[0, len(prompt) :].tolist()
        likeliest = [row[0].log_softmax(-1).max() for row in wanted.logits]
        logprobs = [next(iter(entry.values())).logprob for entry in answer.logprobs or ()]
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.stack(likeliest), rtol=0, atol=1e-4
        )


def test_an_error_of_a_configuration_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gemma4(tmp_path, "experts")

    def read_width(folder: Path, config: Any) -> None:
        _ = config.head_dim

    monkeypatch.setattr(loader, "check_decoder", read_width)
    wrong = rf"{tmp_path}/config.json does not describe a gemma4_text model: 'head_dim'"
    with pytest.raises(DamagedModelError, match=wrong):
        load_model(tmp_path)
