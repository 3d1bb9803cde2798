"""The config.json of a GGUF file's model, made of the file's metadata and tensors."""

import math
from typing import Any

from headstart.weights.gguf import ROPE_FACTORS, Metadata
from headstart.weights.scheme import UnsupportedLayerError

__all__ = ["make_config"]

# transformers' model_type where it is another name.
_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Texts of tokens that end a reply, as llama.cpp lists them (special_eog_ids).
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>"),
        *("<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|file_sep|>"),
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROWS = "token_embd.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def make_config(reader: Any, architecture: str) -> dict[str, Any]:
    """Return the content of config.json, in transformers' names.

    Raises `UnsupportedLayerError` for what is not read, `ValueError` for impossible values.
    """
    known = Metadata(reader, architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, width = known.count("attention.head_count"), known.count("embedding_length")
    tokens = Metadata(reader, "tokenizer.ggml")
    content = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": _rows(tensors, tokens),
        "hidden_size": width,
        "intermediate_size": known.count("feed_forward_length"),
        "num_hidden_layers": _at_most(known, "block_count", len(tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": known.count("attention.head_count_kv", heads),
        "head_dim": known.count("attention.key_length", width // max(heads, 1)),
        "max_position_embeddings": known.count("context_length"),
        "rms_norm_eps": known.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": tokens.get("bos_token_id"),
        "pad_token_id": tokens.get("padding_token_id"),
        "eos_token_id": _find_ends(tokens),
        "dtype": "bfloat16",  # of the rows between layers: the file's weights say nothing of it
    }
    content["rope_parameters"] = _read_angles(known, tensors, content)
    special = {
        "gemma2": _gemma,
        "gemma3": _gemma3,
        "granite": _granite,
        "phi3": _phi3,
        "olmo2": _olmo2,
        "mistral3": _mistral3,
    }
    if architecture in special:
        content |= special[architecture](known, content)
    return content


def _at_most(known: Metadata, name: str, most: int) -> int:
    """Return a whole number; raises `ValueError` for a larger one, which would take all memory."""
    found = known.count(name)
    if not 0 < found <= most:
        raise ValueError(f"its {name} is {found:,}; allowed: 1 to {most:,}")
    return found


def _rows(tensors: dict[str, Any], tokens: Metadata) -> int:
    if _ROWS in tensors:
        return int(tensors[_ROWS].shape[-1])
    return len(tokens.get("tokens"))


def _find_ends(tokens: Metadata) -> list[int] | int | None:
    """Return the ids of all tokens that end a reply, alone where there is only one."""
    texts = tokens.get("tokens")
    found = {text: at for at, text in enumerate(texts) if text in _ENDS}
    if found.keys() >= {"<|return|>", "<|call|>"} or found.keys() >= {"<|flush|>", "<|calls|>"}:
        found.pop("<|end|>", None)  # a message's end, and not a turn's
    if "<|tool_response>" in found:
        found.pop("</s>", None)
    named = [tokens.get(key) for key in _END_KEYS]
    ends = sorted({*found.values(), *(at for at in named if at is not None and at < len(texts))})
    return ends if len(ends) > 1 else next(iter(ends), None)


def _read_angles(
    known: Metadata, tensors: dict[str, Any], content: dict[str, Any]
) -> dict[str, Any]:
    """Return the rotary parameters.

    Factors by which a file divides the frequencies are put in the words of the only type that has a
    factor for each pair, `longrope`. llama.cpp's converter makes them of what Llama 3.1 and later
    have in their configuration (alike for all lengths), and Phi-3 has two sets of its own.
    """
    angles: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(known.get("rope.freq_base", 10_000.0)),
    }
    short, long = (tensors.get(name) for name in (_SHORT, _LONG))
    if ROPE_FACTORS in tensors:
        short = long = tensors[ROPE_FACTORS]
    if short is None or long is None:
        return angles
    original = known.count(
        "rope.scaling.original_context_length", content["max_position_embeddings"]
    )
    return angles | {
        "rope_type": "longrope",
        "short_factor": _factors(short),
        "long_factor": _factors(long),
        "factor": 1.0,
        "attention_factor": float(known.get("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": original,
    }


def _factors(tensor: Any) -> list[float]:
    factors: list[float] = tensor.data.reshape(-1).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ValueError(f"{tensor.name} has factors from {min(factors)} to {max(factors)}")
    return factors


def _gemma(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    """Return the scale of queries, caps and window of Gemma 2.

    The file does not hold the scale: as in llama.cpp, the number of layers says which it is.
    """
    caps = {
        name: float(value)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if (value := known.get(name)) is not None
    }
    is_27b = content["num_hidden_layers"] in (46, 62)
    shared = content["hidden_size"] // content["num_attention_heads"]
    window = known.get("attention.sliding_window")
    return {
        "query_pre_attn_scalar": shared if is_27b else content["head_dim"],
        **({} if window is None else {"sliding_window": window}),
        **caps,
    }


def _gemma3(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    full = content["rope_parameters"]
    if known.get("rope.freq_base") is None:
        full["rope_theta"] = 1_000_000.0
    if known.get("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": float(known.get("rope.scaling.factor", 1.0))}
    near = {"rope_type": "default", "rope_theta": known.get("rope.freq_base_swa", 10_000.0)}
    pattern = known.get("attention.sliding_window_pattern", 6)
    if type(pattern) is int:
        pattern = [bool((at + 1) % pattern) for at in range(content["num_hidden_layers"])]
    return _gemma(known, content) | {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
    }


def _granite(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    scale = known.get("attention.scale")
    return {
        "attention_multiplier": content["head_dim"] ** -0.5 if scale is None else scale,
        "embedding_multiplier": known.get("embedding_scale", 1.0),
        "residual_multiplier": known.get("residual_scale", 1.0),
        "logits_scaling": known.get("logit_scale", 1.0),
    }


def _phi3(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a head that is rotated, and the window; 0 stands for none."""
    rotated = content["head_dim"]
    if known.get("rope.dimension_count") is not None:
        rotated = _at_most(known, "rope.dimension_count", content["head_dim"])
    if rotated != content["head_dim"]:
        content["rope_parameters"]["partial_rotary_factor"] = rotated / content["head_dim"]
    return {
        "sliding_window": known.get("attention.sliding_window") or None,
        "original_max_position_embeddings": known.count(
            "rope.scaling.original_context_length", content["max_position_embeddings"]
        ),
    }


def _olmo2(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    if known.get("attention.sliding_window"):
        raise UnsupportedLayerError("it has layers with a window, as OLMo 3")
    return {}


def _mistral3(known: Metadata, content: dict[str, Any]) -> dict[str, Any]:
    if known.get("attention.temperature_scale"):
        raise UnsupportedLayerError(
            "its queries are scaled by their position (attention.temperature_scale)"
        )
    return {"sliding_window": None}
