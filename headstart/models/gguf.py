"""A model's folder for a GGUF file: its configuration and tokenizer, and a link to the file.

Making configuration and tokenizer from the file's metadata takes seconds to minutes. They stay in a
folder in the user's cache, and are made again only if the file changes. The counts in the metadata
are checked first. With a damaged count, the package `gguf` would read beyond the end of the file
until memory is full. ggml's docs/gguf.md specifies the format.
"""

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.dtypes import check_memory
from headstart.models.files import cache_folder, make_folder, read_json
from headstart.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from headstart.models.transformers_tools import silence_transformers
from headstart.weights.gguf import ROPE_FACTORS, Metadata, import_gguf, read_architecture
from headstart.weights.scheme import UnsupportedLayerError

# transformers' model_type, where it differs from the architecture.
_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen35": "qwen3_5_text"}
_MODEL_TYPES |= {"granitehybrid": "granitemoehybrid", "gemma4": "gemma4_text"}
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
_STILL = 1e20  # a pair whose angle is divided by more than this does not rotate
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_EMBEDDING = "token_embd.weight"


def make_config(reader: Any, architecture: str) -> dict[str, Any]:
    """Return the content of config.json, with transformers' names.

    Raises `UnsupportedLayerError` for unsupported features, `ValueError` for impossible values.
    """
    metadata = Metadata(reader, architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, width = metadata.count("attention.head_count"), metadata.count("embedding_length")
    tokens = Metadata(reader, "tokenizer.ggml")
    if _EMBEDDING in tensors:
        vocab_size = tensors[_EMBEDDING].shape[-1]
    else:
        vocab_size = len(tokens.get("tokens"))
    is_varied = architecture == "gemma4"  # its layers differ in width
    content = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": int(vocab_size),
        "hidden_size": width,
        "intermediate_size": None if is_varied else metadata.count("feed_forward_length"),
        "num_hidden_layers": _at_most(metadata, "block_count", len(tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": None if is_varied else metadata.kv_heads(heads),
        "head_dim": metadata.count("attention.key_length", width // max(heads, 1)),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": tokens.get("bos_token_id"),
        "pad_token_id": tokens.get("padding_token_id"),
        "eos_token_id": _find_ends(tokens),
        "dtype": "bfloat16",  # of rows between layers; GGUF files have no such setting
    }
    content["rope_parameters"] = _read_rope(metadata, tensors, content)
    content |= _read_architecture_keys(architecture, metadata, content)
    if architecture == "gemma4":
        content |= _read_gemma4_keys(metadata, content, tensors)
    if architecture in _RECURRENT:
        content |= _read_recurrent_keys(architecture, metadata, content, tensors)
    return content


def _at_most(metadata: Metadata, name: str, maximum: int) -> int:
    """Return a count. Raise `ValueError` unless it is from 1 to `maximum`.

    A damaged count could fill memory.
    """
    count = metadata.count(name)
    if not 0 < count <= maximum:
        raise ValueError(f"its {name} is {count:,}; allowed: 1 to {maximum:,}")
    return count


def _find_ends(tokens: Metadata) -> list[int] | int | None:
    """Return the ids of all tokens that end a reply: a list, or an int if there is only one."""
    texts = tokens.get("tokens")
    ids = {text: token for token, text in enumerate(texts) if text in _ENDS}
    if ids.keys() >= {"<|return|>", "<|call|>"} or ids.keys() >= {"<|flush|>", "<|calls|>"}:
        ids.pop("<|end|>", None)  # this token ends a message, not a turn
    if "<|tool_response>" in ids:
        ids.pop("</s>", None)
    named = [tokens.get(key) for key in _END_KEYS]
    ends = sorted({*ids.values(), *(i for i in named if i is not None and i < len(texts))})
    return ends if len(ends) > 1 else next(iter(ends), None)


def _read_rope(
    metadata: Metadata, tensors: dict[str, Any], content: dict[str, Any]
) -> dict[str, Any]:
    """Return the rotary parameters.

    If a file has factors that divide the frequencies, the type is `longrope`, the only type with a
    factor for each pair. Files of Llama 3.1 and later have one set of factors for all lengths.
    Files of Phi-3 have a set for short and a set for long texts.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(metadata.get("rope.freq_base", 10_000.0)),
    }
    short, long = (tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    if ROPE_FACTORS in tensors:
        short = long = tensors[ROPE_FACTORS]
    if short is None or long is None:
        return rope
    for tensor in (short, long):
        factors = tensor.data.reshape(-1)
        if not ((factors > 0) & (factors < math.inf)).all():
            raise ValueError(f"{tensor.name} has factors from {factors.min()} to {factors.max()}")
    return rope | {
        "rope_type": "longrope",
        "short_factor": short.data.reshape(-1).tolist(),
        "long_factor": long.data.reshape(-1).tolist(),
        "factor": 1.0,
        "attention_factor": float(metadata.get("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": metadata.count(
            "rope.scaling.original_context_length", content["max_position_embeddings"]
        ),
    }


def _read_architecture_keys(
    architecture: str, metadata: Metadata, content: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys that only some architectures have. May change `rope_parameters` in place."""
    get, head_dim, rope = metadata.get, content["head_dim"], content["rope_parameters"]
    keys: dict[str, Any] = {}
    match architecture:
        case "gemma2" | "gemma3":
            # The file lacks the scale of queries. As in llama.cpp, it follows from the number of
            # layers.
            is_27b = content["num_hidden_layers"] in (46, 62)
            shared = content["hidden_size"] // content["num_attention_heads"]
            keys["query_pre_attn_scalar"] = shared if is_27b else head_dim
            if (window := get("attention.sliding_window")) is not None:
                keys["sliding_window"] = window
            for name in ("attn_logit_softcapping", "final_logit_softcapping"):
                if (cap := get(name)) is not None:
                    keys[name] = float(cap)
        case "granite" | "granitehybrid":
            scale = get("attention.scale")
            keys["attention_multiplier"] = head_dim**-0.5 if scale is None else scale
            keys["embedding_multiplier"] = get("embedding_scale", 1.0)
            keys["residual_multiplier"] = get("residual_scale", 1.0)
            keys["logits_scaling"] = get("logit_scale", 1.0)
        case "phi3":
            if get("rope.dimension_count") is not None:
                rotated = _at_most(metadata, "rope.dimension_count", head_dim)
                if rotated != head_dim:
                    rope["partial_rotary_factor"] = rotated / head_dim
            keys["sliding_window"] = get("attention.sliding_window") or None  # 0 means none
            keys["original_max_position_embeddings"] = metadata.count(
                "rope.scaling.original_context_length", content["max_position_embeddings"]
            )
        case "olmo2" if get("attention.sliding_window"):
            raise UnsupportedLayerError("it has sliding-window layers, like OLMo 3")
        case "mistral3":
            if get("attention.temperature_scale"):
                raise UnsupportedLayerError(
                    "its queries are scaled by position (attention.temperature_scale)"
                )
            keys["sliding_window"] = None
    if architecture == "gemma3":
        if get("rope.freq_base") is None:
            rope["rope_theta"] = 1_000_000.0
        if get("rope.scaling.type") == "linear":
            rope |= {"rope_type": "linear", "factor": float(get("rope.scaling.factor", 1.0))}
        sliding = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10_000.0)}
        keys["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
        keys["layer_types"] = _read_layer_types(metadata, content)
    return keys


def _read_layer_types(metadata: Metadata, content: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer.

    The metadata has a list, or a number n (6 by default): every n-th layer has full attention.
    """
    slides = metadata.get("attention.sliding_window_pattern", 6)
    if type(slides) is int:
        slides = [bool(layer % slides) for layer in range(1, content["num_hidden_layers"] + 1)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _read_gemma4_keys(
    metadata: Metadata, content: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of Gemma 4, whose layers differ in the widths of heads and MLPs."""
    kinds = _read_layer_types(metadata, content)
    kv_heads = metadata.by_layer("attention.head_count_kv", len(kinds))
    inner = metadata.by_layer("feed_forward_length", len(kinds))
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    sliding = [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
    if not full or not sliding or not len({kv_heads[layer] for layer in full}) == 1:
        raise UnsupportedLayerError(f"its layers are {kinds}, with {kv_heads} heads of K and V")
    head_dim = metadata.count("attention.key_length_swa")
    if metadata.count("rope.dimension_count_swa", head_dim) != head_dim:
        raise UnsupportedLayerError("only a part of a head is rotated in sliding-window layers")
    part = 1.0
    if ROPE_FACTORS in tensors:  # 1 for pairs that rotate, nearly infinite for other pairs
        factors = tensors[ROPE_FACTORS].data.reshape(-1)
        part = int((factors == 1.0).sum()) / len(factors)
        if not (factors[int(part * len(factors)) :] > _STILL).all():
            raise UnsupportedLayerError(f"its {ROPE_FACTORS} are {sorted(set(factors.tolist()))}")
    width = metadata.count("embedding_length_per_layer_input", 0)
    keys = {
        "layer_types": kinds,
        "num_key_value_heads": kv_heads[sliding[0]],
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "head_dim": head_dim,
        "per_layer_config": {
            str(layer): {"head_dim": content["head_dim"], "num_key_value_heads": kv_heads[layer]}
            for layer in full
        },
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": metadata.count("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": content["vocab_size"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": metadata.count("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": part,
                "rope_theta": float(metadata.get("rope.freq_base", 1_000_000.0)),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(metadata.get("rope.freq_base_swa", 10_000.0)),
            },
        },
    }
    if experts := metadata.count("expert_count", 0):
        keys |= {"enable_moe_block": True, "num_experts": experts}
    return keys


_RECURRENT = {
    "lfm2": "conv",
    "qwen35": "linear_attention",
    "granitehybrid": "linear_attention",
}
"""The type of layers without attention, by architecture."""


def _read_recurrent_keys(
    architecture: str, metadata: Metadata, content: dict[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of architectures with recurrent layers. May change `rope_parameters`."""
    kinds = {True: "full_attention", False: _RECURRENT[architecture]}
    count = content["num_hidden_layers"] - metadata.count("nextn_predict_layers", 0)
    layers = range(count)
    keys: dict[str, Any] = {
        "num_hidden_layers": count,
        "layer_types": [kinds[f"blk.{layer}.attn_q.weight" in tensors] for layer in layers],
    }
    if architecture == "lfm2":
        return keys | {
            "norm_eps": content["rms_norm_eps"],
            "conv_L_cache": metadata.count("shortconv.l_cache"),
            "conv_bias": "blk.0.shortconv.in_proj.bias" in tensors,
            "block_auto_adjust_ff_dim": False,
        }
    heads, inner = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
    if architecture == "granitehybrid":
        if metadata.get("rope.scaling.finetuned"):
            raise UnsupportedLayerError("it has rotary positions, like Bamba")
        recurrent = keys["layer_types"].index("linear_attention")
        return keys | {
            "num_local_experts": metadata.count("expert_count", 0),
            "shared_intermediate_size": int(tensors["blk.0.ffn_gate.weight"].shape[-1]),
            "split_mlp": True,
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_expand": inner // content["hidden_size"],
            "mamba_n_groups": metadata.count("ssm.group_count"),
            "mamba_d_state": metadata.count("ssm.state_size"),
            "mamba_d_conv": metadata.count("ssm.conv_kernel"),
            "mamba_conv_bias": f"blk.{recurrent}.ssm_conv1d.bias" in tensors,
            "mamba_proj_bias": f"blk.{recurrent}.ssm_in.bias" in tensors,
        }
    rotated = metadata.count("rope.dimension_count", content["head_dim"])
    content["rope_parameters"]["partial_rotary_factor"] = rotated / content["head_dim"]
    return keys | {
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": metadata.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


CUT_OFF = "; was it downloaded or copied only in part?"

# The size of a number in bytes, by the id of its GGUF type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # version 1 has counts of 32 bits
_MAX_ELEMENTS = 1 << 22  # in an array; 16 times the size of the largest vocabularies


def _check_header(file: Path) -> None:
    """Raise `ValueError` unless this is a little-endian GGUF file with complete metadata."""
    with file.open("rb") as data:
        magic = data.read(4)
        if not magic:
            raise ValueError("it is empty")
        if magic != b"GGUF":
            raise ValueError(f"it is not a GGUF file, as it begins with {magic!r}")
        try:
            version, _tensors, keys = _read_numbers(data, "<IQQ")
            if not version & 0xFFFF:
                raise ValueError("its numbers are big-endian, which is not supported")
            if version not in _VERSIONS:
                raise ValueError(f"it has version {version} of the format, which is not supported")
            size = file.stat().st_size
            for _ in range(keys):
                _skip_value(data, size, _STRING)
                _skip_value(data, size, *_read_numbers(data, "<I"))
        except struct.error as error:
            raise ValueError(f"it ends within its metadata{CUT_OFF}") from error
        except RecursionError as error:
            raise ValueError("its arrays are nested too deeply") from error


def _read_numbers(data: BinaryIO, form: str) -> tuple[int, ...]:
    """Read numbers of the `struct` format `form`; raises `struct.error` at the end of the file."""
    return struct.unpack(form, data.read(struct.calcsize(form)))


def _skip_value(data: BinaryIO, size: int, kind: int) -> None:
    """Skip a value of this type in a file of `size` bytes."""
    if kind == _ARRAY:
        kind, count = _read_numbers(data, "<IQ")
        if count > _MAX_ELEMENTS:
            raise ValueError(f"an array has {count} elements, more than {_MAX_ELEMENTS}")
        if kind not in _SIZES:
            for _ in range(count):
                _skip_value(data, size, kind)
            return
        length = count * _SIZES[kind]
    elif kind == _STRING:
        [length] = _read_numbers(data, "<Q")
    elif kind in _SIZES:
        length = _SIZES[kind]
    else:
        raise ValueError(f"a value has the type {kind}, which is unknown")
    remaining = size - data.tell()
    if length > remaining:
        raise ValueError(
            f"a value of {length} bytes starts {remaining} bytes before the file's end"
        )
    data.seek(length, os.SEEK_CUR)


_NEEDED = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
_TOKENIZER_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
# Texts of numpy's errors for a slice beyond the end of a file.
_BEYOND = ("cannot reshape", "must be a divisor of the total size", "is out of bounds")
_VARIABLE = "HEADSTART_GGUF_DIR"
_FORMAT = 5  # version of the written folders; a new number rebuilds all folders


def gguf_folder(file: Path) -> Path:
    """Return the folder for a GGUF file, made atomically at the first call.

    It is below `$HEADSTART_GGUF_DIR` or the user's cache folder. Raises `UnsupportedModelError` for
    an unsupported architecture or a missing package, `DamagedModelError`, `OutOfMemoryError`, or
    `ModelError` if the cache cannot be written.
    """
    gguf = import_gguf(file)
    # The folder is named after the link: in the hub's cache, its target is named by a digest.
    file = file.absolute()
    stat = file.stat()
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    version = repr((_FORMAT, str(file.resolve()), *stamp)).encode()
    name = f"{file.stem[:80]}-{hashlib.sha256(version).hexdigest()[:12]}"
    folder = cache_folder(_VARIABLE, "gguf") / name
    try:
        read_json(folder / "config.json")
        is_whole = (folder / "model.gguf").is_file()
    except DamagedModelError:
        is_whole = False
    if folder.exists() and not is_whole:
        shutil.rmtree(folder)
    return make_folder(folder, _VARIABLE, lambda target: _write(gguf, file, target))


def _write(gguf: Any, file: Path, folder: Path) -> None:
    try:
        _check_header(file)
        try:
            reader = gguf.GGUFReader(file)
        except (ValueError, IndexError) as error:
            if not any(text in str(error) for text in _BEYOND):
                raise
            size = file.stat().st_size
            raise ValueError(
                f"it ends within its tensors, after {size:,} bytes{CUT_OFF}"
            ) from error
        split = reader.fields.get("split.count")
        if split is not None and split.contents() > 1:
            raise UnsupportedModelError(
                f"{file} is one of {split.contents()} files of a model; merge them with "
                "llama.cpp's `llama-gguf-split --merge`"
            )
        content = make_config(reader, _read_architecture(reader))
        with silence_transformers():
            tokenizer = _read_tokenizer(file, reader)
    except UnsupportedLayerError as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from error
    except UnsupportedModelError:
        raise
    # transformers raises KeyError, TypeError, ValueError, OSError; tokenizers a bare Exception.
    except Exception as error:
        check_memory(error, f"to read the metadata of {file}")
        reason = " ".join(str(error).split())
        kind = UnsupportedModelError if "not supported" in reason else DamagedModelError
        prefix = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise kind(f"{file} cannot be read: {prefix}{reason}") from error
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "model.gguf").symlink_to(file)


def _read_architecture(reader: Any) -> str:
    """Return the architecture. Raise `UnsupportedLayerError` if it is not supported.

    Raises `ValueError` if the metadata lacks keys that llama.cpp needs.
    """
    architecture = read_architecture(reader)
    keys = [f"{architecture}.{name}" for name in _NEEDED] + list(_TOKENIZER_KEYS)
    kind = reader.fields.get(_TOKENIZER_KEYS[0])
    if kind is not None:
        keys += ["tokenizer.ggml." + ("merges" if kind.contents() == "gpt2" else "scores")]
    for name in keys:
        if name not in reader.fields:
            raise ValueError(f"its metadata has no {name}; convert the model again")
    return architecture


def _read_tokenizer(file: Path, reader: Any) -> Any:
    """Return the tokenizer of a file, with the pre-tokenizer that the file names.

    Raises `UnsupportedModelError` for a name that is not in `PRE_TOKENIZERS`.
    """
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    metadata = Metadata(reader, "tokenizer.ggml")
    if metadata.get("model") != "gpt2":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, **options)
        pieces = tokenizer.backend_tokenizer
        if metadata.get("add_space_prefix") is False and isinstance(
            pieces.pre_tokenizer, pre_tokenizers.Metaspace
        ):
            pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        return tokenizer
    name = metadata.get("pre", "default")
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise UnsupportedModelError(
            f"{file} cannot be read: its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; allowed: "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        file.parent, **options, add_bos_token=pre_tokenizer.add_bos
    )
    backend = tokenizer.backend_tokenizer
    backend.model.ignore_merges = pre_tokenizer.ignore_merges
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre_tokenizer.regexes]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer
