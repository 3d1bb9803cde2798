"""A model's folder for a GGUF file: its configuration and tokenizer, and a link to the file.

Everything that headstart reads of a model is in a folder. Configuration and tokenizer are made of
the file's metadata, which takes seconds to minutes; so both are stored in the user's cache, and
made again only if the file is another one. The counts in the metadata are checked first: the
package `gguf`, and so transformers, reads an array of 2^60 numbers past the end of the file, one at
a time, until memory is full. ggml's docs/gguf.md has the layout.
"""

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.errors import DamagedModelError, ModelError, OutOfMemoryError, UnsupportedModelError
from headstart.models.dtypes import is_out_of_memory
from headstart.models.files import read_json
from headstart.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from headstart.models.transformers_tools import silence_transformers
from headstart.weights.gguf import ROPE_FACTORS, Metadata, import_gguf, read_architecture
from headstart.weights.scheme import UnsupportedLayerError

__all__ = ["CUT_OFF", "check_header", "gguf_folder", "make_config"]


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


CUT_OFF = "; was it downloaded or copied only in part?"

# Bytes of a number, by the number of its type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # the first one has counts of 32 bits
_MOST_ELEMENTS = 1 << 22  # of an array: 16 times as many as the largest vocabularies have


def check_header(file: Path) -> None:
    """Raise `ValueError` for what is no GGUF file, is big-endian, or ends within its metadata."""
    with file.open("rb") as opened:
        magic = opened.read(4)
    if not magic:
        raise ValueError("it is empty")
    if magic != b"GGUF":
        raise ValueError(f"it is no GGUF file: it begins with {magic!r}")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        try:
            _magic, version, _tensors, keys = cursor.read("<IIQQ")
            if not version & 0xFFFF:
                raise ValueError("its numbers are big-endian, which is not supported")
            if version not in _VERSIONS:
                raise ValueError(f"it has version {version} of the format, which is not supported")
            for _ in range(keys):
                cursor.skip_value(_STRING)
                cursor.skip_value(*cursor.read("<I"))
        except struct.error as error:
            raise ValueError(f"it ends within its metadata{CUT_OFF}") from error
        except RecursionError as error:
            raise ValueError("its arrays lie too deep in one another") from error


class _Cursor:
    """Goes through a file's metadata; raises `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def skip_value(self, kind: int) -> None:
        """Skip a value of this type."""
        if kind == _STRING:
            self._skip(*self.read("<Q"))
        elif kind == _ARRAY:
            inner, count = self.read("<IQ")
            if count > _MOST_ELEMENTS:
                raise ValueError(f"an array has {count} elements, more than {_MOST_ELEMENTS}")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
            else:
                for _ in range(count):
                    self.skip_value(inner)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value has the type {kind}, which is unknown")

    def _skip(self, size: int) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise ValueError(f"a value of {size} bytes stands {left} bytes before its end")
        self._at += size


_NEEDED = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
_OF_TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
# What numpy says of a slice beyond the end of a file.
_BEYOND = ("cannot reshape", "must be a divisor of the total size", "is out of bounds")
_FORMAT = 5  # of what is written here; another number makes every folder anew


def gguf_folder(file: Path) -> Path:
    """The folder for a GGUF file; made on the first call, whole or not at all.

    It is below `$HEADSTART_GGUF_DIR`, or the user's cache folder. Raises `UnsupportedModelError`
    (an architecture that is not read, or the package is missing),
    `DamagedModelError`, `OutOfMemoryError` or, where the cache cannot be written to, `ModelError`.
    """
    gguf = import_gguf(file)
    file, stat = file.absolute(), file.stat()  # the hub's cache has names for links alone
    version = repr((_FORMAT, str(file.resolve()), *_stamp(stat))).encode()
    folder = _cache_folder() / f"{file.stem[:80]}-{hashlib.sha256(version).hexdigest()[:12]}"
    if _is_whole(folder):
        return folder
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder.parent) as made:
            unfinished = Path(made) / folder.name  # readable by all who read the cache
            unfinished.mkdir()
            _write(gguf, file, unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was first
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot write to {folder.parent}: {error.strerror}; set HEADSTART_GGUF_DIR to a "
            "folder that can be written to"
        ) from error
    return folder


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _is_whole(folder: Path) -> bool:
    """True for a folder whose link leads to a file and whose configuration can be read."""
    try:
        read_json(folder / "config.json")
    except DamagedModelError:
        return False
    return (folder / "model.gguf").is_file()


def _write(gguf: Any, file: Path, folder: Path) -> None:
    try:
        check_header(file)
        reader = _open(gguf, file)
        _check_whole(file, reader)
        content = make_config(reader, _check_keys(reader))
        with silence_transformers():
            tokenizer = _read_tokenizer(file, reader)
    except UnsupportedLayerError as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from error
    except UnsupportedModelError:
        raise
    # transformers raises KeyError, TypeError, ValueError, OSError; the tokenizers a bare Exception.
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"no memory to read the metadata of {file}") from error
        reason = " ".join(str(error).split())
        kind = UnsupportedModelError if "not supported" in reason else DamagedModelError
        named = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise kind(f"{file} cannot be read: {named}{reason}") from error
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "model.gguf").symlink_to(file)


def _open(gguf: Any, file: Path) -> Any:
    """The package's reader; raises `ValueError` for a file that ends within its tensors."""
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError) as error:
        if not any(said in str(error) for said in _BEYOND):
            raise
        raise ValueError(
            f"it ends within its tensors, after {file.stat().st_size:,} bytes{CUT_OFF}"
        ) from error


def _check_keys(reader: Any) -> str:
    """Return the architecture; raises `ValueError` for metadata without what llama.cpp needs, too.

    Raises `UnsupportedLayerError` for an architecture that is not read.
    """
    architecture = read_architecture(reader)
    needed = [f"{architecture}.{name}" for name in _NEEDED] + list(_OF_TOKENIZER)
    kind = reader.fields.get(_OF_TOKENIZER[0])
    if kind is not None:
        needed += ["tokenizer.ggml." + ("merges" if kind.contents() == "gpt2" else "scores")]
    for name in needed:
        if name not in reader.fields:
            raise ValueError(f"its metadata has no {name}; convert the model again")
    return architecture


def _check_whole(file: Path, reader: Any) -> None:
    """Raise `UnsupportedModelError` for one of several files that hold a model together."""
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise UnsupportedModelError(
            f"{file} is one of {count} files of a model; allowed: one file, as llama.cpp's "
            "`llama-gguf-split --merge` makes it of them"
        )


def _read_tokenizer(file: Path, reader: Any) -> Any:
    """Return the tokenizer of a file, with the split that the file names.

    Raises `UnsupportedModelError` for a name that is not in `PRE_TOKENIZERS`.
    """
    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    metadata = Metadata(reader, "tokenizer.ggml")
    if metadata.get("model") != "gpt2":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, **given)
        pieces = tokenizer.backend_tokenizer
        if metadata.get("add_space_prefix") is False and isinstance(
            pieces.pre_tokenizer, pre_tokenizers.Metaspace
        ):
            pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        return tokenizer
    name = metadata.get("pre", "default")
    chosen = PRE_TOKENIZERS.get(name)
    if chosen is None:
        raise UnsupportedModelError(
            f"{file} cannot be read: its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; allowed: "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        file.parent, **given, add_bos_token=chosen.add_bos
    )
    backend = tokenizer.backend_tokenizer
    backend.model.ignore_merges = chosen.ignore_merges
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in chosen.regexes]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _cache_folder() -> Path:
    if chosen := os.environ.get("HEADSTART_GGUF_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headstart" / "gguf"
