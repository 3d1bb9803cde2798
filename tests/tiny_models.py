"""Tiny models of every supported architecture, with random weights.

They are created in milliseconds and deterministic. Their weights are much larger than a new
model's. Otherwise attention would add so little to the residual stream that rounding would hide
a wrong mask.
"""

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    BambaConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Starcoder2Config,
    Zamba2Config,
    ZambaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.tiny_tokenizers import TINY_TOKENIZERS

__all__ = [
    "EACH_MIXER",
    "HYBRIDS",
    "RECURRENT",
    "TINY",
    "VOCABULARY",
    "save_chatting",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "write_once",
]

VOCABULARY = 131
_WINDOW = 6

# Widths that differ from one another wherever they can, so that a mixed-up axis cannot fit.
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_THREE = ["sliding_attention", "sliding_attention", "full_attention"]
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 8}
_PURE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}

_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_BASE),
    "mistral": lambda: MistralConfig(**_BASE, sliding_window=_WINDOW),
    "qwen2": lambda: Qwen2Config(**_BASE),
    "qwen3": lambda: Qwen3Config(**_BASE, **_HEAD),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_BASE, **_HEAD, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "gemma2": lambda: Gemma2Config(
        **_BASE,
        **_HEAD,
        **_MIXED,
        sliding_window=_WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_BASE, **_HEAD, **_MIXED, sliding_window=_WINDOW, query_pre_attn_scalar=20
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        **_BASE | {"num_hidden_layers": 6},
        **_HEAD,
        global_head_dim=24,
        num_global_key_value_heads=3,
        attention_k_eq_v=True,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=10,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=_WINDOW,
        final_logit_softcapping=3.0,
    ),
    "gemma4_unified_text": lambda: Gemma4UnifiedTextConfig(
        **_BASE, **_HEAD, global_head_dim=24, layer_types=_THREE, sliding_window=_WINDOW
    ),
    "phi3": lambda: Phi3Config(**_BASE, sliding_window=_WINDOW),
    "mixtral": lambda: MixtralConfig(**_BASE, **_EXPERTS),
    "gpt_oss": lambda: GptOssConfig(
        **_BASE,
        **_HEAD,
        **_MIXED,
        **_EXPERTS,
        sliding_window=_WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "olmo2": lambda: Olmo2Config(**_BASE),
    "granite": lambda: GraniteConfig(
        **_BASE,
        attention_multiplier=1.1,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    "cohere2": lambda: Cohere2Config(**_BASE, **_MIXED, sliding_window=_WINDOW, logit_scale=0.5),
    "starcoder2": lambda: Starcoder2Config(**_BASE, sliding_window=_WINDOW),
    "gpt_neox": lambda: GPTNeoXConfig(**{**_BASE, "num_key_value_heads": 6}),
    "opt": lambda: OPTConfig(
        **{**_BASE, "num_key_value_heads": 6, "ffn_dim": 80, "word_embed_proj_dim": 32}
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=48,
        n_layer=3,
        n_head=6,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "lfm2": lambda: Lfm2Config(
        **_BASE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(
        **_BASE,
        **_HEAD,
        **_LINEAR,
        rms_norm_eps=0.01,  # otherwise norms of outputs near zero amplify rounding
        **_DELTA,
        **_MROPE,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_BASE,
        **_LINEAR,
        num_local_experts=0,
        shared_intermediate_size=72,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=10,
        attention_multiplier=1.1,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    "smollm3": lambda: SmolLM3Config(**_BASE, no_rope_layers=[1, 0, 1]),
    "glm4": lambda: Glm4Config(**_BASE, **_HEAD),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_BASE, "num_key_value_heads": 6},
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=14,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_BASE, **_HEAD, **_LINEAR, **_DELTA, **_QWEN_EXPERTS, rms_norm_eps=0.01
    ),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **_BASE, **_HEAD, **_LINEAR, **_DELTA, **_QWEN_EXPERTS, rms_norm_eps=0.01, **_MROPE
    ),
    "granitemoehybrid_moe": lambda: GraniteMoeHybridConfig(
        **_BASE, **_LINEAR, **_EXPERTS, **_MAMBA, shared_intermediate_size=64
    ),
    "bamba": lambda: BambaConfig(**_BASE, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: FalconH1Config(**_BASE, **_MAMBA, mamba_d_ssm=96, mamba_d_head=12),
    "nemotron_h": lambda: NemotronHConfig(
        **_BASE,
        **_HEAD,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=12,
        n_groups=2,
        ssm_state_size=10,
        chunk_size=8,
        time_step_min=0.6,  # more than many steps would have without it
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
    ),
    "jamba": lambda: JambaConfig(
        **_BASE,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=6,
        mamba_dt_rank=5,
    ),
    "zamba2": lambda: Zamba2Config(
        **{**_BASE, "num_hidden_layers": 5},
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_d_state=10,
        chunk_size=8,
        time_step_min=0.6,
        num_mem_blocks=2,
        adapter_rank=4,
        use_mem_rope=True,
    ),
    "zamba": lambda: ZambaConfig(
        **{**_BASE, "num_hidden_layers": 4, "num_key_value_heads": 6},
        layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=2,
        mamba_d_state=6,
        mamba_dt_rank=5,
        attention_head_dim=16,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(**_BASE, **_LINEAR, **_DELTA, rms_norm_eps=0.01),
    "kimi_linear": lambda: KimiLinearConfig(
        **{**_BASE, "num_key_value_heads": 6},
        **_LINEAR,
        q_lora_rank=None,
        kv_lora_rank=12,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=14,
        moe_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_token=2,
        linear_attn_config={"head_dim": 8, "num_heads": 6, "short_conv_kernel_size": 4},
        rms_norm_eps=0.01,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **_BASE,
        layer_types=["conv", "full_attention", "conv"],
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
    ),
    "mamba": lambda: MambaConfig(**_PURE, state_size=6),
    "mamba2": lambda: Mamba2Config(
        **_PURE, state_size=10, num_heads=8, head_dim=12, n_groups=2, chunk_size=8
    ),
    "falcon_mamba": lambda: FalconMambaConfig(**_PURE, state_size=6),
}


def tiny_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model."""
    return _CONFIGS[name]()


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of this configuration with deterministic random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
                elif parameter_name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.3)
                elif config.model_type in _NORMED and "norm" in parameter_name:
                    parameter.add_(torch.randn(parameter.shape) * 0.3)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
    return model.eval()


def _builder(name: str) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_model(tiny_config(name))


HYBRIDS = ("lfm2", "qwen3_5_text", "granitemoehybrid")
"""Models with recurrent layers in headstart's modules."""

RECURRENT = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "granitemoehybrid_moe",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "jamba",
    "zamba",
    "zamba2",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "falcon_mamba",
)
"""Models with recurrent layers in transformers' modules."""

EACH_MIXER = ("mamba", "falcon_h1", "zamba2", "olmo_hybrid", "kimi_linear", "lfm2_moe")
"""Each kind of recurrent layer in transformers, and a model whose layers share weights."""

_NORMED = (
    *HYBRIDS,
    *RECURRENT,
    "gemma4_text",
    "gemma4_unified_text",
)  # whose norms differ

TINY: dict[str, Callable[[], PreTrainedModel]] = {
    name: _builder(name) for name in _CONFIGS if name not in {*HYBRIDS, *RECURRENT}
}
"""Models with attention in every layer."""


def save_tiny(name: str, folder: str | Path) -> Path:
    """Write a tiny model (no tokenizer) into `folder`, as a checkpoint to load."""
    return write_once(_save_tiny, Path(folder), name)


def _save_tiny(folder: Path, name: str) -> None:
    tiny_model(tiny_config(name)).save_pretrained(folder)


def save_chatting(name: str, folder: str | Path) -> Path:
    """Write a tiny model with a tokenizer and a chat template into `folder`."""
    return write_once(_save_chatting, Path(folder), name)


def _save_chatting(folder: Path, name: str) -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    config = tiny_config(name)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 2048
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_once(save: Callable[..., object], folder: Path, *options: Hashable) -> Path:
    """Write the files of `save(folder, *options)`, which runs only once."""
    for name, content in _files(save, *options).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@cache
def _files(save: Callable[..., object], *options: Hashable) -> dict[Path, bytes]:
    with TemporaryDirectory() as name:
        save(Path(name), *options)
        written = [path for path in Path(name).rglob("*") if path.is_file()]
        return {path.relative_to(name): path.read_bytes() for path in written}
