"""Loading of a model into headstart's own modules or transformers' modules."""

import logging
from pathlib import Path

import torch

from headstart.errors import UnsupportedModelError
from headstart.imports import load_module
from headstart.models.decoder import DecoderModel
from headstart.models.dense.loader import load_dense
from headstart.models.dtypes import computes_wider, fast_dtype, find_device, find_dtype
from headstart.models.families import UnknownFamilyError
from headstart.models.files import check_files, find_folder, is_gguf
from headstart.native import release_threads
from headstart.native.pages import ReadyMemory
from headstart.weights.format import find_kind
from headstart.weights.scheme import UnsupportedLayerError

_log = logging.getLogger(__name__)


def load_model(
    model: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    ready_memory: ReadyMemory | None = None,
    weights: str = "auto",
) -> DecoderModel:
    """Load a model by local path or hub name, and check it.

    dtype: auto (see `computes_wider`, `fast_dtype`), float32, bfloat16 or float16. weights: auto
    (as in the checkpoint), int8, int5 or int4. ready_memory: memory for packed weights, used if it
    is large enough. Raises `ConfigError`, `ModelNotFoundError`, `DamagedModelError`,
    `UnsupportedModelError` or `OutOfMemoryError`.
    """
    try:
        weights_dtype, torch_device = find_dtype(dtype), find_device(device)
        kind = find_kind(weights)
        folder = find_folder(model)
        check_files(folder)
        wider = computes_wider(weights_dtype, folder, torch_device)
        module_dtype = torch.float32 if wider else fast_dtype(weights_dtype, folder, torch_device)
        try:
            return load_dense(folder, module_dtype, torch_device, ready_memory, kind)
        except UnsupportedLayerError as error:
            reason = str(error)
            level = logging.INFO if isinstance(error, UnknownFamilyError) else logging.WARNING
        if is_gguf(folder):
            raise UnsupportedModelError(f"headstart cannot run the GGUF file {model}: {reason}")
        # transformers' modelling code takes seconds to import.
        loader = load_module("headstart.models.transformers_backend.loader")
        if wider:  # transformers' modules compute in the dtype of the weights
            module_dtype = fast_dtype(weights_dtype, folder, torch_device)
        try:
            loaded: DecoderModel = loader.load_transformers(
                folder, module_dtype, torch_device, ready_memory, kind
            )
        except UnsupportedModelError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            message = f"{error}; headstart's own modules do not support it: {reason}"
            raise UnsupportedModelError(message) from error
        loaded.fallback_reason = reason
        # Warn for a known family, since its users expect the speed of headstart's modules.
        _log.log(level, "%s runs in transformers' modules, not in headstart's: %s", folder, reason)
        return loaded
    finally:
        # The calling thread's OpenMP workers are not needed again: another thread runs the model.
        release_threads()
