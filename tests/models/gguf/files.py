"""Tiny models as GGUF files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headstart.models.gguf.checkpoint import ARCHITECTURES

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
    "gemma2": Gemma2Config(**BASE, query_pre_attn_scalar=16, sliding_window=64),
}
TOKENS = torch.arange(3, 23)


def make_model(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[architecture] if not changes else LlamaConfig(**BASE | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 0.5 * ("norm" in name), max(weight.shape[-1], 16) ** -0.5)
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
) -> Path:
    """The model as llama.cpp converts it, its matrices in one format.

    factors: what it divides the frequencies of rotary positions by. files: of how many it is one.
    pre: the split of texts. words: tokens in bytes' letters, behind 3 control tokens, and merges.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(8.0)
    if files is not None:
        writer.add_uint16("split.count", files)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = [chr(30 + at) for at in range(3, VOCABULARY - 1)]
    tokens, merges = words or ([*letters, "ab"], ["a b"])
    writer.add_token_list(["<0>", "<1>", "<2>", *tokens])
    writer.add_token_types([3] * 3 + [1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    theirs = {ours: name for name, ours in ARCHITECTURES[architecture].items()}
    wanted = gguf.GGMLQuantizationType[kind]
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part, _, suffix = name.rpartition(".")
        prefix, number = "", part.split(".")[2:3]
        if part.startswith("model.layers."):
            prefix, part = f"blk.{number[0]}.", part.split(".", 3)[3]
        data = tensor.numpy()
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            data = data.reshape(-1, 2, config.head_dim // 2, data.shape[-1])
            data = data.swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gemma2" and "norm" in part:
            data = data + 1
        if data.ndim == 1:
            writer.add_tensor(f"{prefix}{theirs[part]}.{suffix}", data)
        else:
            packed = gguf.quants.quantize(data, wanted)
            writer.add_tensor(f"{prefix}{theirs[part]}.{suffix}", packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
