"""Every family in headstart's own modules, against transformers' eager models."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from headstart.attention import PagedKVMemory, Span, StepPlan, make_backend
from headstart.attention.memory import StateMemory
from headstart.engine.config import BLOCK_SIZES
from headstart.models.decoder import DecoderModel, EmbeddingOverlay
from headstart.models.dense import modules
from headstart.models.dense.loader import load_dense
from headstart.models.families import FAMILIES
from headstart.models.loader import load_model
from headstart.models.transformers_backend.probe import probe_model
from tests.models.paged import make_recurrence
from tests.tiny_models import VOCABULARY, save_tiny, tiny_config, tiny_model
from tests.tiny_tokenizers import TINY_TOKENIZERS

CPU = torch.device("cpu")
NAMES = {"gemma3": "gemma3_text"}  # of tests/tiny_models, where they are not the model types
TINY_FAMILIES = [name for name in ("gemma3", *FAMILIES) if name != "gemma3_text"]
PIECES = (7, 1, 12, 1, 9)  # rows of each step
BLOCK = 4
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEAR = {"original_max_position_embeddings": 16, "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **NEAR}
LONG = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0] * 4, "rope_theta": 1e4}

GEMMA4 = BASE | {"head_dim": 12, "global_head_dim": 20, "sliding_window": 5}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0}

VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, biases everywhere": lambda: LlamaConfig(**BASE, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama, one K/V head": lambda: LlamaConfig(**BASE | {"num_key_value_heads": 1}),
    "llama, wide heads": lambda: LlamaConfig(**BASE, head_dim=20),
    "llama, gelu": lambda: LlamaConfig(**BASE, hidden_act="gelu"),
    "llama 3 positions": lambda: LlamaConfig(**BASE, rope_parameters=dict(LLAMA3)),
    "linear positions": lambda: LlamaConfig(
        **BASE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "yarn positions": lambda: LlamaConfig(**BASE, rope_parameters={"rope_type": "yarn", **NEAR}),
    "dynamic positions": lambda: LlamaConfig(
        **BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "another base": lambda: Qwen2Config(
        **BASE, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "qwen2, windows in the last layers": lambda: Qwen2Config(
        **BASE, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "qwen3, tied, biases": lambda: Qwen3Config(
        **BASE, head_dim=10, attention_bias=True, tie_word_embeddings=True
    ),
    "mistral, no window": lambda: MistralConfig(**BASE, sliding_window=None),
    "smollm3, windows": lambda: SmolLM3Config(**BASE, use_sliding_window=True, sliding_window=5),
    "smollm3, every second": lambda: SmolLM3Config(**BASE, no_rope_layer_interval=2),
    "gemma2, no caps": lambda: Gemma2Config(
        **BASE, head_dim=12, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3, scaled far positions": lambda: Gemma3TextConfig(
        **BASE,
        head_dim=12,
        sliding_window=5,
        sliding_window_pattern=2,
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "gemma4, nothing shared": lambda: Gemma4TextConfig(**GEMMA4),
    "gemma4, keys are values, biases": lambda: Gemma4TextConfig(
        **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, attention_bias=True
    ),
    "gemma4, keys are values where heads are alike": lambda: Gemma4TextConfig(
        **GEMMA4 | {"global_head_dim": 12}, attention_k_eq_v=True, tie_word_embeddings=False
    ),
    "gemma4, shared K and V": lambda: Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 6},
        num_kv_shared_layers=1,
        final_logit_softcapping=2.0,
    ),
    "gemma4, inputs of layers": lambda: Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 140},
        rms_norm_eps=0.01,
    ),
    "gemma4, all of a head": lambda: Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 6},
        num_kv_shared_layers=2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "proportional", "rope_theta": 1e3, "factor": 2.0},
        },
    ),
    "gemma4 unified, shared K and V, wide MLPs": lambda: Gemma4UnifiedTextConfig(
        **{name: value for name, value in GEMMA4.items() if "per_layer" not in name},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "phi3, part of a head": lambda: Phi3Config(
        **BASE, rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e4}
    ),
    "phi3, long": lambda: Phi3Config(
        **BASE | {"original_max_position_embeddings": 128},
        rope_parameters={"rope_type": "longrope", **LONG},
    ),
    "granite, tied": lambda: GraniteConfig(
        **BASE, tie_word_embeddings=True, logits_scaling=3, embedding_multiplier=2, mlp_bias=True
    ),
    "olmo2, biases": lambda: Olmo2Config(**BASE, attention_bias=True),
    "lfm2, biases, not tied": lambda: Lfm2Config(
        **BASE, full_attn_idxs=[1, 3], conv_bias=True, conv_L_cache=4, tie_word_embeddings=False
    ),
    "lfm2, an MLP of the width it says": lambda: Lfm2Config(
        **BASE, full_attn_idxs=[2], block_auto_adjust_ff_dim=False
    ),
    "qwen3.5, tied, biases, wide heads": lambda: Qwen3_5TextConfig(
        **BASE,
        head_dim=16,
        tie_word_embeddings=True,
        attention_bias=True,
        rms_norm_eps=0.01,
        linear_conv_kernel_dim=3,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
    ),
    "granite hybrid, rotary positions": lambda: GraniteMoeHybridConfig(
        **BASE,
        layer_types=["attention", "mamba", "mamba", "attention"],
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=72,
        mamba_n_heads=8,
        mamba_d_state=10,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=(0.3, 1.5),
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "granite hybrid without a recurrent layer": lambda: GraniteMoeHybridConfig(
        **BASE, layer_types=["attention"] * 4, num_local_experts=0, mamba_n_heads=8
    ),
}


def save(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(config).to(dtype).save_pretrained(folder)
    return folder


def expected_logits(config: PreTrainedConfig, tokens: Tensor, first: int = 0) -> Tensor:
    reference = tiny_model(config)
    reference.set_attn_implementation("eager")
    places = torch.arange(first, first + len(tokens)).unsqueeze(0)
    with torch.no_grad():
        return reference(tokens.unsqueeze(0), position_ids=places, use_cache=False).logits[0]


def run(model: DecoderModel, tokens: Tensor, first: int = 0) -> Tensor:
    """Return the logits of all rows, computed in pieces, over blocks in any order."""
    blocks = torch.randperm(-(-len(tokens) // BLOCK), generator=torch.Generator().manual_seed(1))
    memory = PagedKVMemory(model.layouts, len(blocks), BLOCK, model.dtype, model.device)
    backend = make_backend(memory)
    states = StateMemory(model.state_layouts, 2, model.device)
    model.attach(backend, states)
    logits: list[Tensor] = []
    start = 0
    for number, count in enumerate(PIECES):
        source = (number - 1) % 2 if number else -1
        states.recurrence = make_recurrence([(count, source, number % 2, start)])
        places = torch.arange(start, start + count)
        slots = blocks[places // BLOCK] * BLOCK + places % BLOCK
        span = Span(0, count, start + count, blocks.tolist())
        backend.begin_step(StepPlan(slots, (span,)))
        rows = torch.arange(count)
        logits.append(model.forward(tokens[places], places + first, rows))
        # A prompt needs only the last row, which is equal but for rounding.
        last = model.forward(tokens[places], places + first, rows[-1:])
        torch.testing.assert_close(last, logits[-1][-1:], rtol=0.02, atol=0.02)
        assert model.choose(tokens[places], places + first, rows) == logits[-1].argmax(-1).tolist()
        backend.end_step()
        start += count
    model.detach()
    return torch.cat(logits)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (sum(PIECES),), generator=generator)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    model = load_model(save_tiny(name, tmp_path), "float32")
    assert model.fallback_reason is None
    expected = expected_logits(tiny_config(name), tokens())
    size = float(expected.abs().max())
    torch.testing.assert_close(run(model, tokens()), expected, rtol=0.0, atol=1e-5 * size)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gemma4_unified_text"])
def test_layouts_and_windows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    layouts = load_model(save_tiny(name, tmp_path), "float32").layouts
    assert layouts == probe_model(tiny_model(tiny_config(name))).layouts


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]()
    model = load_model(save(config, tmp_path), "float32")
    assert model.fallback_reason is None
    # Far from 0 the kinds of positions differ most; the rows still see one another alone.
    first = min(model.max_model_len, 256) - sum(PIECES) if "dynamic" not in name else 0
    expected = expected_logits(config, tokens(), first)
    size = float(expected.abs().max())
    torch.testing.assert_close(run(model, tokens(), first), expected, rtol=0.0, atol=1e-5 * size)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_an_mlp_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(save_tiny(name, tmp_path), "float32")
    layer = model.module.get_submodule("model.layers.0.mlp.down_proj")
    monkeypatch.setattr(modules, "_PIECE", 5 * layer.in_features)
    monkeypatch.setattr(modules, "_BLOCK", 1)
    seen: list[int] = []
    hook = layer.register_forward_hook(lambda _, inputs, out: seen.append(len(inputs[0])))
    expected = expected_logits(tiny_config(name), tokens())
    size = float(expected.abs().max())
    torch.testing.assert_close(run(model, tokens()), expected, rtol=0.0, atol=1e-5 * size)
    pieces = [2, 2, 2, 1] if hasattr(model.layer("model.layers.0.mlp"), "gate_up_proj") else [4, 3]
    assert seen[: len(pieces)] == pieces and max(seen) <= 5
    seen.clear()
    model.calls_each_layer = True  # a hook waits for all rows
    torch.testing.assert_close(run(model, tokens()), expected, rtol=0.0, atol=1e-5 * size)
    assert set(seen) == set(PIECES)
    hook.remove()


def test_no_block_is_computed_in_pieces() -> None:
    """In deterministic mode a block's rows are one product, with any hooks."""
    assert max(BLOCK_SIZES) <= modules._BLOCK


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_mlp_of_quantized_weights_rounds_rows_in_bfloat16_once(
    weights: str, tmp_path: Path
) -> None:
    model = load_model(save_tiny("qwen2", tmp_path), "bfloat16", weights=weights)
    mlp = model.module.get_submodule("model.layers.1.mlp")
    rows = torch.randn(9, mlp.down_proj.out_features, generator=torch.Generator().manual_seed(2))
    rows = rows.bfloat16()
    once, each_time = mlp(rows, hooked=False), mlp(rows)
    assert once.dtype == each_time.dtype == torch.bfloat16
    if mlp.down_proj.matrix.computes_float32:  # or its product takes bfloat16
        assert torch.equal(once, mlp(rows.float()).bfloat16())
        assert not torch.equal(once, each_time)
    torch.testing.assert_close(once, each_time, rtol=0.0, atol=0.02 * float(once.abs().max()))


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_weights_in_bfloat16_under_float32(name: str, tmp_path: Path) -> None:
    tiny_model(tiny_config(name)).to(torch.bfloat16).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = reference(tokens().unsqueeze(0), use_cache=False).logits[0]
    actual = run(load_model(tmp_path, "float32"), tokens())
    size = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5 * size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_half_precision_stays_near_full(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(save_tiny(name, tmp_path), str(dtype).removeprefix("torch."))
    expected = expected_logits(tiny_config(name), tokens())
    actual = run(model, tokens())
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["granite", "gemma2", "gemma3"])
def test_embeddings_are_scaled_as_in_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Gemma rounds the factor to the dtype first, Granite does not.

    Regression: Granite's was rounded too: every embedding was up to 0.2 % too large or too small.
    """
    config = tiny_config(name)
    if name == "granite":
        config.embedding_multiplier = 3.7
    save(config, tmp_path, dtype)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model, norm = load_dense(tmp_path, dtype, CPU), "model.layers.0.input_layernorm"
    seen: list[Tensor] = []
    for module in (reference.get_submodule(norm), model.layer(norm)):
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].view(-1, 48)))
    model.calls_each_layer = True  # hooks are called
    with torch.no_grad():
        reference(tokens().unsqueeze(0), use_cache=False)
    run(model, tokens())
    assert torch.equal(torch.cat(seen[1::3]), seen[0])  # `run` computes thrice


OLD_STYLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a separate base": ("llama", {"rope_parameters": None, "rope_theta": 500.0}),
    "a kind called type": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "two bases": ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 77.0}),
    "a kind called longrope": (
        "phi3",
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "longrope"} | {k: v for k, v in LONG.items() if "factor" in k},
            "original_max_position_embeddings": 128,
        },
    ),
    "torch_dtype": ("qwen2", {"dtype": None, "torch_dtype": "float32"}),
}


@pytest.mark.parametrize("name", OLD_STYLE)
def test_configurations_of_old_versions(name: str, tmp_path: Path) -> None:
    family, changes = OLD_STYLE[name]
    save_tiny(family, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    config = type(tiny_config(family)).from_pretrained(tmp_path)
    expected = expected_logits(config, tokens(), 60)
    assert not torch.allclose(expected, expected_logits(tiny_config(family), tokens(), 60)) or (
        name == "torch_dtype"
    )
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None
    size = float(expected.abs().max())
    torch.testing.assert_close(run(model, tokens(), 60), expected, rtol=0.0, atol=1e-5 * size)


def test_embeddings_of_the_caller_replace_those_of_tokens(tmp_path: Path) -> None:
    model = load_dense(save_tiny("llama", tmp_path), torch.float32, CPU)
    memory = PagedKVMemory(model.layouts, 2, BLOCK, model.dtype, model.device)
    backend = make_backend(memory)
    model.attach(backend)
    ids, rows = torch.tensor([5, 9, 7, 11]), torch.arange(4)
    overlay = EmbeddingOverlay(torch.tensor([1]), model.weight("model.embed_tokens")[3:4])

    def logits(embeddings: Tensor, overlay: EmbeddingOverlay | None) -> Tensor:
        backend.begin_step(StepPlan(rows, (Span(0, 4, 4, [0, 1]),)))
        try:
            return model.forward(embeddings, rows, rows, overlay)
        finally:
            backend.end_step()

    assert torch.equal(logits(ids, overlay), logits(torch.tensor([5, 3, 7, 11]), None))


PROGRAM = """
import sys
from headstart import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=16, cache_dir="off")
params = SamplingParams(max_tokens=2, detokenize=False, top_k=5, top_p=0.9, min_p=0.01,
                        repetition_penalty=1.1)
assert len(llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].token_ids) > 0
print([name for name in sys.argv[2:] if name in sys.modules])
"""
HEAVY = ("transformers.modeling_utils", "transformers.activations", "torch._dynamo")
HEAVY += ("transformers.image_processing_utils", "transformers.models.qwen2.modeling_qwen2")
HEAVY += ("rich",)  # which bars of several prompts need


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_modules_that_are_not_imported(has_tokenizer: bool, tmp_path: Path) -> None:
    """No modelling code of transformers, and without a tokenizer nothing of it (1 s).

    A sampled prompt does not import it either.
    """
    folder = save_tiny("qwen2", tmp_path)
    if has_tokenizer:
        TINY_TOKENIZERS["byte_level"]().save_pretrained(folder)
    unwanted = HEAVY if has_tokenizer else (*HEAVY, "transformers", "tokenizers", "PIL")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *unwanted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
