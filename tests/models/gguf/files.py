"""Tiny models as GGUF files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
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

gguf: Any = pytest.importorskip("gguf")

VOCABULARY = 160
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**BASE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**BASE, tie_word_embeddings=False),
    # The file has no scale of queries: it is the head's width.
    "gemma2": Gemma2Config(**BASE, query_pre_attn_scalar=16, sliding_window=8),
    "gemma3": Gemma3TextConfig(
        **BASE | {"num_hidden_layers": 7},
        query_pre_attn_scalar=16,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4": Gemma4TextConfig(
        **BASE | {"num_hidden_layers": 6},
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=8,
        final_logit_softcapping=3.0,
        pad_token_id=0,
    ),
    "phi3": Phi3Config(**BASE, pad_token_id=0, sliding_window=8),
    "granite": GraniteConfig(
        **{name: value for name, value in BASE.items() if name != "head_dim"},
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "olmo2": Olmo2Config(
        **{name: value for name, value in BASE.items() if name != "head_dim"}, pad_token_id=0
    ),
    "smollm3": SmolLM3Config(**BASE | {"num_hidden_layers": 5}, pad_token_id=0),
    "mistral3": MistralConfig(**BASE, sliding_window=None),
    "lfm2": Lfm2Config(
        **{name: value for name, value in BASE.items() if name != "rms_norm_eps"},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "granitehybrid": GraniteMoeHybridConfig(
        **{name: value for name, value in BASE.items() if name != "head_dim"},
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=96,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=8,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "qwen35": Qwen3_5TextConfig(
        **BASE | {"rms_norm_eps": 0.01},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
}
_HALVED = (
    "llama",
    "granite",
    "granitehybrid",
    "smollm3",
    "mistral3",
)  # LlamaModel of the converter, permute()
_SMALL = ("mamba.A_log", "mamba.D", "mamba.norm.weight")
TOKENS = torch.arange(3, 23)


def make_model(architecture: str, config: PreTrainedConfig | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = config or (LlamaConfig(**BASE | changes) if changes else CONFIGS[architecture])
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 0.5 * ("norm" in name), max(weight.shape[-1], 16) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def write_gguf(
    file: Path,
    architecture: str,
    model: Any,
    kind: str,
    scaling: str | None = None,
    factors: torch.Tensor | None = None,
    files: int | None = None,
    pre: str = "default",
    words: tuple[list[str], list[str]] | None = None,
    methods: Mapping[str, Any] = {},
) -> Path:
    """Write the model as llama.cpp converts it, with its matrices in one format.

    factors: what it divides the frequencies of rotary positions by. files: the number of files of
    which it is one. pre: the split of texts. words: tokens in bytes' letters, after 3 control
    tokens, and merges. methods: replacements for methods of the writer, for a file that no
    converter writes.
    """
    config = model.config
    writer = type("Writer", (gguf.GGUFWriter,), {**methods})(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = config.intermediate_size
    if architecture == "gemma4":  # by layer
        inner = [inner] * 4 + [2 * inner] * 2
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    config.allow_global_per_layer_attribute_access = True
    kv_heads = config.num_key_value_heads
    if architecture == "gemma4":
        kv_heads = [part.num_key_value_heads for part in config.per_layer_config]
    if architecture in ("lfm2", "granitehybrid"):  # by layer
        kv_heads = [kv_heads * (kind == "full_attention") for kind in config.layer_types]
    writer.add_head_count_kv(kv_heads)
    head_dim = config.hidden_size // config.num_attention_heads
    if architecture not in ("granite", "granitehybrid", "phi3", "olmo2", "gemma4"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    angles = config.rope_parameters
    if not architecture.startswith("gemma"):
        writer.add_rope_dimension_count(int(head_dim * angles.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(angles.get("full_attention", angles)["rope_theta"])
    _add_own_keys(writer, architecture, config)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(8.0)
    if files is not None:
        writer.add_uint16("split.count", files)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = [chr(30 + at) for at in range(3, VOCABULARY - 1)]
    tokens, merges = words or ([*letters, "ab"], ["a b"])
    writer.add_token_list(["<0>", "<1>", "<2>", *tokens])
    writer.add_token_types([3] * 3 + [1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[kind]
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    tensors = model.state_dict()
    if architecture == "granitehybrid":
        tensors = _convert_granite(tensors, config)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        named, data = name + ".weight" * name.endswith("layer_scalar"), tensor.numpy()
        if data.ndim == 3:  # of a convolution
            data = data.squeeze(1)
        if architecture == "qwen35":
            named, data = _convert_qwen35(name, data, config)
        theirs = names.get_name(named, try_suffixes=(".weight", ".bias"))
        theirs = name if name.startswith("blk.") else theirs
        assert theirs is not None, name
        if architecture in _HALVED and ("q_proj." in name or "k_proj." in name):
            data = data.reshape(-1, 2, head_dim // 2, *data.shape[1:])
            data = data.swapaxes(1, 2).reshape(tensor.shape)
        if architecture in ("gemma2", "gemma3") and "norm" in name:
            data = data + 1
        if data.ndim == 1 or tensor.ndim == 3 or name.endswith(_SMALL):
            writer.add_tensor(theirs, data)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(data, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _convert_granite(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the tensors of Granite 4 H as the converter changes them."""
    converted = {}
    for name, tensor in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("input_linear.weight"):
            gate, up = tensor.chunk(2)
            converted |= {f"{layer}.ffn_gate.weight": gate, f"{layer}.ffn_up.weight": up}
        elif name.endswith("output_linear.weight"):
            converted[f"{layer}.ffn_down.weight"] = tensor
        elif name.endswith("A_log"):
            converted[name] = -tensor.exp().unsqueeze(1)
        elif name.endswith("mamba.D"):
            converted[name] = tensor.unsqueeze(1)
        elif name.endswith("mamba.norm.weight"):
            converted[name] = tensor.view(config.mamba_n_groups, -1)
        else:
            converted[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return converted


def _convert_qwen35(name: str, data: Any, config: Any) -> tuple[str, Any]:
    """Return the name and numbers of a tensor of Qwen3.5 as the converter changes them."""
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    per_key = heads // config.linear_num_key_heads

    def tile(rows: Any, size: int) -> Any:
        parts = rows.reshape(-1, per_key, size, *rows.shape[1:])
        return parts.swapaxes(0, 1).reshape(rows.shape)

    part = name.partition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        first = len(data) - heads * width
        data = torch.cat(
            (torch.tensor(data[:first]), torch.tensor(tile(data[first:], width)))
        ).numpy()
    elif part == "in_proj_z.weight":
        data = tile(data, width)
    elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        data = tile(data, 1)
    elif part == "out_proj.weight":
        data = tile(data.T, width).T.copy()
    elif not part and "norm" in name:
        data = data + 1
    if part == "A_log":
        return name, -torch.tensor(data).exp().numpy()
    return name.replace("dt_bias", "dt_proj.bias"), data


def _add_own_keys(writer: Any, architecture: str, config: Any) -> None:
    """Add the other keys that the converter's class of an architecture writes."""
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    if architecture == "gemma4":
        _add_gemma4_keys(writer, config)
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_rope_scaling_finetuned(False)
    if architecture in ("granite", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "qwen35":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        inner = config.linear_num_value_heads * config.linear_value_head_dim
        writer.add_ssm_inner_size(inner)
    if architecture == "phi3":
        angles = config.rope_parameters
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if "long_factor" in angles:
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            original = config.original_max_position_embeddings
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original))
            )
            for kind in ("long", "short"):
                factors = torch.tensor(angles[f"{kind}_factor"], dtype=torch.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())


def _add_gemma4_keys(writer: Any, config: Any) -> None:
    full = config.per_layer_config[1].head_dim
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turns = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = torch.tensor([1.0] * turns + [1e30] * (full // 2 - turns))
    writer.add_tensor("rope_freqs.weight", factors.numpy())
