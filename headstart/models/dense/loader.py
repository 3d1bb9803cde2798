"""Loading of a dense decoder from its files, without transformers' modelling code."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError

from headstart.errors import DamagedModelError, HeadstartError
from headstart.imports import load_module
from headstart.models.config_values import context_length
from headstart.models.dense.decoder import DenseDecoder, DenseModules, Description
from headstart.models.dense.modules import read_frequencies
from headstart.models.dtypes import auto_dtype, check_memory
from headstart.models.families import FAMILIES, NESTED, NestedFamily, UnknownFamilyError
from headstart.models.files import is_gguf, read_json, stamp_files, weight_files
from headstart.models.shapes import DecoderShape, Family, read_shape
from headstart.native.pages import ReadyMemory
from headstart.weights.checkpoint import FLOATS, Checkpoint, SafetensorsCheckpoint
from headstart.weights.format import WeightKind
from headstart.weights.gguf import GGUFCheckpoint
from headstart.weights.memory import move_to_huge_pages
from headstart.weights.prequantized import PrequantizedCheckpoint
from headstart.weights.reader import Outline, WeightReader
from headstart.weights.scheme import Scheme, UnsupportedLayerError, read_scheme

# Keys that may be null. A null window or cap means that there is none. For the other keys, null
# means that the value is derived from other keys or from the family.
_MAY_BE_NULL = frozenset(
    {
        *("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
        *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    }
)


# Keys that a config.json may have in addition to its family's defaults. Any other key requires
# transformers' configuration class.
_HARMLESS = frozenset(
    {
        *("architectures", "transformers_version", "dtype", "torch_dtype", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "use_mrope", "rope_scaling"),
        *("attention_dropout", "initializer_range", "pretraining_tp", "layer_types", "rope_theta"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "cache_implementation"),
        *("_sliding_window_pattern", "embd_pdrop", "resid_pdrop"),
    }
)
_THETA = 10_000.0  # default base of rotary positions


class DenseConfig(SimpleNamespace):
    """The keys of a config.json as attributes, like transformers' configurations."""

    def get_text_config(self) -> "DenseConfig":
        """Return this configuration, since a dense decoder has no other part."""
        return self


def read_config(family: Family, content: Mapping[str, Any]) -> Any:
    """Return a configuration with the keys of a config.json and the family's defaults.

    It is a `DenseConfig` if possible, since importing transformers takes seconds. Keys that only
    transformers reads require its configuration class. Raises `UnsupportedLayerError`.
    """
    for name, default in family.defaults.items():
        if name in content:
            _check_type(name, content[name], default)
    prepared = {name: value for name, value in content.items() if name != "model_type"}
    try:
        family.prepare(prepared)
        merged = {**family.defaults, **prepared}
        merged["head_dim"] = merged["head_dim"] or (
            merged["hidden_size"] // merged["num_attention_heads"]
        )
        if (plain := _read_plain(family, merged)) is not None:
            return plain
        return load_module("headstart.models.transformers_tools").RotaryConfig(**merged)
    except (UnsupportedLayerError, MemoryError):
        raise
    # Wrong values raise KeyError, TypeError, ValueError and errors of huggingface_hub.
    except Exception as error:
        raise UnsupportedLayerError(f"its configuration is not as expected: {error}") from error


def _read_plain(family: Family, merged: Mapping[str, Any]) -> DenseConfig | None:
    """Return the configuration; None if it has keys that only transformers reads."""
    if merged.keys() - family.defaults.keys() - _HARMLESS or merged.get("rope_scaling"):
        return None
    rope = _read_plain_rope(merged)
    if rope is None or merged.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    layers = merged.get("layer_types")
    if layers is not None and not (
        isinstance(layers, list)
        and len(layers) == merged["num_hidden_layers"]
        and all(isinstance(layer, str) and layer in family.kinds for layer in layers)
    ):
        return None
    stored = merged.get("dtype") or merged.get("torch_dtype")
    dtype = getattr(torch, stored, stored) if isinstance(stored, str) else stored
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return None
    derived = {"rope_parameters": rope, "layer_types": layers}
    return DenseConfig(**{**merged, **derived, "dtype": dtype})


def _read_plain_rope(merged: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return unscaled rotary parameters, by type of layer if they differ; None if scaled."""
    parameters = merged.get("rope_parameters") or {}
    if not parameters or not all(isinstance(part, dict) for part in parameters.values()):
        return _read_plain_rope_part({"rope_theta": merged.get("rope_theta", _THETA), **parameters})
    by_kind = {kind: _read_plain_rope_part(part) for kind, part in parameters.items()}
    return None if None in by_kind.values() else by_kind


def _read_plain_rope_part(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = {"rope_type": "default", "rope_theta": None, "partial_rotary_factor": 1.0}
    names, rope = rope.keys(), {**rope, **parameters}
    types = {type(rope["rope_theta"]), type(rope["partial_rotary_factor"])}
    is_plain = rope.keys() == names and rope["rope_type"] in ("default", "proportional")
    return rope if is_plain and not types - {int, float} else None


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise `UnsupportedLayerError` for a value whose type is not that of its default."""
    if name == "eos_token_id" or (value is None and name in _MAY_BE_NULL) or default is None:
        return
    types = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, types) or isinstance(value, bool) is not isinstance(default, bool):
        raise UnsupportedLayerError(f"its configuration has {name} {value!r}")


# Buffers that old versions of transformers stored. They follow from the configuration.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")
_BODY = "model.language_model"
"""The decoder's name in a model with other parts."""
_OLD_BODY = "language_model."  # prefix of the decoder's tensor names in files of Gemma 3
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_dense(
    folder: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    ready_memory: ReadyMemory | None = None,
    weights: WeightKind | None = None,
) -> DenseDecoder:
    """Load the decoder in `folder`, with packed weights in `ready_memory` if they fit.

    dtype: "auto" for the dtype of the checkpoint. weights: None for the formats of the checkpoint.
    Raises `UnsupportedLayerError` before reading weights if the configuration or the tensors are
    not those of a family in `headstart.models.families`. Raises `UnsupportedModelError` for weights
    that are not finite, `DamagedModelError` for files that change while they are read, and
    `OutOfMemoryError`.
    """
    files = stamp_files(folder)
    description, stored = describe_decoder(folder)
    scheme = read_scheme(read_json(folder / "config.json"))
    try:
        outline = Outline()
        DenseModules(description.shape, outline)
        with _open_checkpoint(folder, scheme, description.shape, outline) as checkpoint:
            check_tensors(checkpoint, outline, description.shape.tied, description.shape.ignored)
            matrix_dtypes = set(checkpoint.dtypes(outline.matrices))
            stored = stored or checkpoint.dtypes(outline.shapes)[0]
            if scheme is not None and stored == torch.float16 and device.type == "cpu":
                stored = torch.bfloat16  # there are no kernels for rows in float16
            rows_dtype = dtype
            if not isinstance(rows_dtype, torch.dtype):
                rows_dtype = auto_dtype(stored, matrix_dtypes, device)
            read = WeightReader(
                checkpoint,
                outline.matrices,
                rows_dtype,
                device,
                kind=weights,
                tied=description.shape.tied,
                ready_memory=ready_memory,
            )
            modules = DenseModules(description.shape, read)
            read.close()
    except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
        check_memory(error, f"for the model in {folder}")
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise DamagedModelError(f"the weights in {folder} cannot be read: {error}") from error
    decoder = DenseDecoder(description, modules.eval(), rows_dtype)
    decoder.files = files
    if not decoder.has_original_files:
        raise DamagedModelError(f"the files in {folder} changed while they were read")
    move_to_huge_pages(decoder.module)
    return decoder


def _open_checkpoint(
    folder: Path, scheme: Scheme | None, shape: DecoderShape, outline: Outline
) -> Checkpoint:
    """Open the checkpoint, and rename its tensors to Llama's names."""
    if is_gguf(folder):
        return GGUFCheckpoint(folder)
    files = weight_files(folder)
    checkpoint = (
        SafetensorsCheckpoint(files) if scheme is None else PrequantizedCheckpoint(files, scheme)
    )
    if shape.names:
        is_old = any(name.startswith(_OLD_BODY) for name in checkpoint.shapes)
        paths = {f"{_OLD_BODY}{n}" if is_old else shape.path(n): n for n in outline.shapes}
        checkpoint.rename(paths)
    return checkpoint


def describe_decoder(folder: Path) -> tuple[Description, torch.dtype | None]:
    """Return the description of a decoder, and the dtype in its config.json, which may be None."""
    content = read_json(folder / "config.json")
    kind = content.get("model_type")
    nested = NESTED.get(kind) if isinstance(kind, str) else None
    kind = kind if nested is None else nested.text
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnknownFamilyError(f"model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    if nested is not None:
        content = _read_text_config(content, nested)
    config = read_config(family, content)
    try:
        shape = read_shape(family, config)
        if nested is not None:
            shape = replace(shape, names={**shape.names, "model": _BODY})
            ignored = (*map(shape.path, shape.ignored), *nested.others)
            shape = replace(shape, ignored=ignored)
        kinds = {layer.angles for layer in shape.layers if layer.angles is not None}
        frequencies = {kind: read_frequencies(config, kind, shape) for kind in sorted(kinds)}
        path = folder / "generation_config.json"
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        eos = config.eos_token_id if eos is None else eos
        ends = frozenset(map(int, [eos] if isinstance(eos, int) else eos or ()))
        description = Description(folder, shape, frequencies, context_length(config), ends)
    except (HeadstartError, UnsupportedLayerError, MemoryError):
        raise
    # Wrong or missing values raise exceptions of any kind.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnsupportedLayerError(f"its configuration is not as expected: {reason}") from error
    stored = config.dtype
    if stored is not None and (not isinstance(stored, torch.dtype) or stored not in FLOATS):
        raise UnsupportedLayerError(f"its weights are {stored}")
    return description, stored


def _read_text_config(content: Mapping[str, Any], family: NestedFamily) -> dict[str, Any]:
    """Return the decoder's configuration in a model with several parts."""
    nested = content.get("text_config")
    if not isinstance(nested, dict):
        raise UnsupportedLayerError(f"its text_config is {nested!r}; allowed: a JSON object")
    shared = {name: content[name] for name in ("dtype", "torch_dtype") if name in content}
    tied = {"tie_word_embeddings": content.get("tie_word_embeddings", family.tied)}
    return {**shared, **nested, **tied}


def check_tensors(
    checkpoint: Checkpoint, outline: Outline, tied: bool, ignored: tuple[str, ...] = ()
) -> None:
    """Raise `UnsupportedLayerError` unless the checkpoint has exactly the outline's tensors.

    ignored: prefixes of names that may also occur.
    """
    stored, needed = checkpoint.shapes, outline.shapes
    stored = {name: shape for name, shape in stored.items() if not name.startswith(ignored)}
    checkpoint.dtypes(stored.keys() & needed.keys())
    for name, shape in needed.items():
        if name not in stored:
            raise UnsupportedLayerError(f"it has no {name}, which its configuration requires")
        if stored[name] != shape:
            raise UnsupportedLayerError(
                f"{name} has the shape {stored[name]}; its configuration requires {shape}"
            )
    surplus = {
        name
        for name in stored.keys() - needed.keys()
        # GPTQ's checkpoints have biases of zeros for layers without a bias.
        if not _COMPUTED.fullmatch(name)
        and not (name.endswith(".bias") and not checkpoint.tensor(name).any())
    }
    if tied and _HEAD in surplus:
        checkpoint.dtypes([_HEAD])
        if not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING)):
            raise UnsupportedLayerError("its LM head is tied, but differs from its embedding")
        surplus.discard(_HEAD)
        checkpoint.release()
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise UnsupportedLayerError(f"it has {min(surplus)}{more}, which its family does not have")
