"""Loading of models into transformers' modules.

Weights are compared with the configuration twice. Before a model is built, the shapes in the
headers of the files must include the configuration's hidden size and vocabulary size. Afterwards,
transformers' loading report must not list a parameter that was initialized randomly. It must not
list a weight of one of the model's layers as unused.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer

from headstart.errors import DamagedModelError, HeadstartError, UnsupportedModelError
from headstart.models.dtypes import check_memory
from headstart.models.files import OMNI_TYPES, read_json, stamp_files, tensor_shapes
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.image_encoder import VISION_MODELS
from headstart.models.transformers_backend.linears import pack_linears, quantize_linears
from headstart.models.transformers_backend.probe import check_config, probe_once
from headstart.models.transformers_tools import silence_transformers
from headstart.native.pages import ReadyMemory
from headstart.weights.format import WeightKind

# The key for the number of draft layers (multi-token prediction), which follow the last layer and
# are not loaded.
_DRAFT_LAYERS = "num_nextn_predict_layers"
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(.*(weight|bias))")


def check_decoder(folder: Path, config: PreTrainedConfig) -> None:
    """Raise `DamagedModelError` unless the weights in `folder` fit the decoder of `config`.

    Checks only safetensors files, which have headers.
    """
    shapes = tensor_shapes(folder)
    if not shapes or getattr(config, "quantization_config", None) is not None:
        return  # quantized tensors have other shapes
    _check_experts(folder, shapes)
    sides = {side for shape in shapes.values() for side in shape}
    for name in ("hidden_size", "vocab_size"):
        value = getattr(config.get_text_config(), name, None)
        if value is not None and value not in sides:
            raise DamagedModelError(
                f"{_unfit(folder)}: {name} is {value}, and no tensor has a dimension of this size"
            )


def check_speaker(folder: Path, config: Any) -> None:
    """Run `check_decoder` for the thinker and the talker of an omni model.

    Raises `UnsupportedModelError` for a model without a talker.
    """
    if not config.enable_audio_output:
        raise UnsupportedModelError(f"{folder} has no talker, so it cannot generate speech")
    for part in (config.thinker_config, config.talker_config):
        check_decoder(folder, part)


def _check_experts(folder: Path, names: Iterable[str]) -> None:
    """Raise an error unless all experts of a layer have the same parameters.

    transformers does not report missing experts.
    """
    numbers_by_parameter: dict[tuple[str, str], set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        numbers_by_parameter[match[1], match[3]].add(int(match[2]))
        counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    missing = (
        f"{experts}.{number}.{parameter}"
        for (experts, parameter), numbers in numbers_by_parameter.items()
        for number in range(counts[experts])
        if number not in numbers
    )
    if first := list(islice(missing, 4)):
        raise DamagedModelError(
            f"{_unfit(folder)}: parameters of experts are missing: {_some(first)}"
        )


def check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise `DamagedModelError` if a parameter or a needed weight was not loaded.

    report: transformers' loading info.
    """
    mismatched = [
        f"{name} is {list(shape)} and not {list(expected)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    for names, problem in (
        (sorted(report["missing_keys"]), "are missing"),
        (mismatched, "have another shape"),
        (_needed_weights(model, report["unexpected_keys"]), "do not belong to this model"),
    ):
        if names:
            raise DamagedModelError(
                f"{_unfit(folder)}: {len(names)} parameters {problem}: {_some(names)}"
            )


def _needed_weights(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of weights that were not loaded and would change the answers.

    A weight is needed if its module is in the model and has parameters, or if its name begins with
    the name of a list of layers. Three kinds of weights are not needed: draft layers, other parts
    (a vision tower, another head), and buffers of modules without parameters, which old versions of
    transformers stored.
    """
    modules = dict(model.named_modules())
    drafts = getattr(model.config.get_text_config(), _DRAFT_LAYERS, None) or 0
    counts: dict[str, int] = {}  # number of layers in each list
    for stack, layer in (_split_layer(name) for name, _ in model.named_parameters()):
        if layer is not None:
            counts[stack] = max(counts.get(stack, 0), layer + 1)
    missing = []
    for name in sorted(names):
        parent, _, leaf = name.rpartition(".")
        stack, layer = _split_layer(name)
        if leaf not in ("weight", "bias"):
            continue
        if parent in modules:
            is_needed = next(modules[parent].parameters(recurse=False), None) is not None
        elif layer is None or stack not in counts:
            is_needed = False
        else:
            is_needed = not counts[stack] <= layer < counts[stack] + drafts
        if is_needed:
            missing.append(name)
    return missing


def _split_layer(name: str) -> tuple[str, int | None]:
    """Return the name of a parameter's list of layers, and the number of its layer in the list.

    >>> _split_layer("model.layers.7.mlp.up_proj.weight")
    ('model.layers', 7)
    >>> _split_layer("model.norm.weight")
    ('', None)
    """
    match = re.match(r"(?:(.*?)\.)?(\d{1,9})(?:\.|$)", name)
    return (match[1] or "", int(match[2])) if match else ("", None)


def _unfit(folder: Path) -> str:
    return f"the weights in {folder} do not fit its config.json"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def load_config(folder: Path) -> PreTrainedConfig:
    """Return transformers' configuration of the model in `folder`.

    Raises `DamagedModelError`, `OutOfMemoryError`, or `UnsupportedModelError` for an architecture
    or a quantization method that transformers lacks.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise DamagedModelError(f"{folder / 'config.json'} has no model_type")
    if kind not in CONFIG_MAPPING:
        reason = "it needs custom code, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModelError(
            f"model_type {kind!r} is not one of transformers' architectures ({reason})"
        )
    with reading_config(folder, kind):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        assert isinstance(config, PreTrainedConfig)
        for part in (config, config.get_text_config(decoder=True)):
            # transformers would load integers of an unknown method without their scales.
            scheme = getattr(part, "quantization_config", None)
            method = scheme.get("quant_method") if isinstance(scheme, dict) else None
            if method is not None and not (
                isinstance(method, str) and AutoHfQuantizer.supports_quant_method(scheme)
            ):
                raise UnsupportedModelError(
                    f"the weights in {folder} are quantized by {method!r}, which neither "
                    "headstart nor transformers supports"
                )
    return config


@contextmanager
def reading_config(folder: Path, kind: str) -> Iterator[None]:
    """Convert errors of reading a configuration to `DamagedModelError`. kind: its model_type."""
    try:
        yield
    except HeadstartError:
        raise
    # Each architecture has its own checks, which raise exceptions of any type.
    except Exception as error:
        check_memory(error, f"to read {folder / 'config.json'}")
        raise DamagedModelError(
            f"{folder / 'config.json'} does not describe a {kind} model: {error}"
        ) from error


def load_weights(
    from_pretrained: Callable[..., Any], folder: Path, **options: Any
) -> PreTrainedModel:
    """Load a model with `from_pretrained` of a transformers class, and check the loading report.

    Raises `DamagedModelError` if weights and configuration differ, `UnsupportedModelError` if a
    package is missing, and `OutOfMemoryError`.
    """
    try:
        loaded: Any = from_pretrained(
            folder,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported by name and shape below
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise UnsupportedModelError(f"{folder} needs a package that is missing: {error}") from error
    # transformers raises OSError, RuntimeError, ValueError, KeyError; safetensors its own errors.
    except Exception as error:
        check_memory(error, f"for the model in {folder}")
        raise DamagedModelError(
            f"the model in {folder} cannot be built: {type(error).__name__}: {error}"
        ) from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    check_report(folder, model, report)
    return model


def load_transformers(
    folder: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    ready_memory: ReadyMemory | None = None,
    weights: WeightKind | None = None,
) -> TransformersDecoder:
    """Load the model in `folder` into transformers' modules, and check that it runs over paged K/V.

    Raises `DamagedModelError`, `UnsupportedModelError` or `OutOfMemoryError`.
    """
    files = stamp_files(folder)
    with silence_transformers():
        config = load_config(folder)
        with reading_config(folder, config.model_type):
            check_config(config)
        if config.model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODELS}:
            raise UnsupportedModelError(
                f"model_type {config.model_type!r} generates speech; use Omni or headstart serve"
                if config.model_type in OMNI_TYPES
                else f"model_type {config.model_type!r} is not a causal language model: "
                "transformers has no decoder for it that returns the next token's logits"
            )
        takes_images = config.model_type in VISION_MODELS
        auto: Any = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        with reading_config(folder, config.model_type):
            check_decoder(folder, config)
        eager = {"text_config": "eager"} if takes_images else "eager"
        loaded = load_weights(
            auto.from_pretrained, folder, config=config, dtype=dtype, attn_implementation=eager
        )
        loaded = loaded.to(device).eval()  # type: ignore[arg-type]
        if weights is None:
            pack_linears(loaded, ready_memory)
        else:
            quantize_linears(loaded, weights)
        layers = probe_once(loaded, files)
        decoder = TransformersDecoder(loaded, layers.layouts, folder, layers.mixers)
        decoder.files, decoder.takes_images = files, takes_images
    if not decoder.has_original_files:
        raise DamagedModelError(f"the files in {folder} changed while they were read")
    return decoder
