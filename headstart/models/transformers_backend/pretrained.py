"""Loads transformers' models from files, for decoders and pipelines alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from headstart.errors import (
    DamagedModelError,
    HeadstartError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from headstart.models.files import read_json
from headstart.models.out_of_memory import is_out_of_memory
from headstart.models.transformers_backend.checkpoint import check_report

__all__ = ["load_config", "load_weights", "reading_config"]


def load_config(folder: Path) -> PreTrainedConfig:
    """transformers' configuration of the model in `folder`.

    Raises `DamagedModelError`, `UnsupportedModelError` for an architecture, or a way to quantise
    weights, that transformers does not have, and `OutOfMemoryError`.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise DamagedModelError(f"{folder / 'config.json'} names no model_type")
    if kind not in CONFIG_MAPPING:
        reason = "it brings code of its own, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModelError(
            f"model_type {kind!r} is not one of transformers' architectures ({reason})"
        )
    with reading_config(folder, kind):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        assert isinstance(config, PreTrainedConfig)
        for part in (config, config.get_text_config(decoder=True)):
            _check_method(folder, getattr(part, "quantization_config", None))
    return config


@contextmanager
def reading_config(folder: Path, kind: str) -> Iterator[None]:
    """Report an error of transformers' configuration of this kind as `DamagedModelError`."""
    try:
        yield
    except HeadstartError:
        raise
    # The exception for a wrong value depends on the architecture's own checks.
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"no memory to read {folder / 'config.json'}") from error
        raise DamagedModelError(
            f"{folder / 'config.json'} does not describe a {kind} model: {error}"
        ) from error


def _check_method(folder: Path, quantised: object) -> None:
    """Check that transformers reads weights of this `quantization_config`.

    It loads others as they are, without their scales, and logs a warning.
    """
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method is None:
        return
    if not isinstance(method, str) or not AutoHfQuantizer.supports_quant_method(quantised):
        raise UnsupportedModelError(
            f"the weights in {folder} are quantised by {method!r}, in a way that neither headstart "
            "nor transformers reads"
        )


def load_weights(
    from_pretrained: Callable[..., Any], folder: Path, **options: Any
) -> PreTrainedModel:
    """Load a model of a transformers class with `from_pretrained`; no parameter stays random.

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
    # transformers raises OSError, RuntimeError, ValueError, KeyError, and safetensors its own.
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"memory does not hold the model in {folder}: {type(error).__name__}: {error}"
            ) from error
        raise DamagedModelError(
            f"the model in {folder} cannot be built: {type(error).__name__}: {error}"
        ) from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    check_report(folder, model, report)
    return model
