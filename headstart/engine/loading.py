"""An engine for a model in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.engine.config import make_config
from headstart.engine.engine import EngineCore
from headstart.engine.parts import make_parts
from headstart.engine.threads import count_cores
from headstart.errors import ConfigError
from headstart.models.loader import load_model
from headstart.models.prefetch import ReadyMemory
from headstart.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_engine"]


def load_engine(
    model: str | Path,
    *,
    tokenizer_folder: Path | None = None,
    ready_memory: ReadyMemory | None = None,
    is_observed: bool = False,
    **options: Any,
) -> tuple[EngineCore, PreTrainedTokenizerBase | None]:
    """Load a model by path or name, and its tokenizer; `options` are those of `EngineConfig`.

    The tokenizer is the model's own unless another folder is given. Packed weights lie in
    `ready_memory` if that is given and fits them. is_observed: see `make_parts`.
    Raises ConfigError, ModelError or OutOfMemoryError; nothing is left behind.
    """
    config = make_config(options)
    # Nothing else computes yet, and getting memory for the weights keeps every core busy.
    torch.set_num_threads(max(config.threads, count_cores()))
    try:
        tokenizer = load_tokenizer(tokenizer_folder or model)
        if tokenizer is None and tokenizer_folder is not None:
            raise ConfigError(f"tokenizer is {tokenizer_folder}, a folder without one")
        decoder = load_model(
            model, config.dtype, config.device, ready_memory, weights=config.weights
        )
    finally:
        torch.set_num_threads(config.threads)
    parts = make_parts(decoder, tokenizer, config, is_observed=is_observed)
    return EngineCore(parts, config), tokenizer
