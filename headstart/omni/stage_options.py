"""The engine options that a stage may have.

A stage runs an engine, but in a pipeline some fields of `EngineConfig` belong to the process or the
whole model. An option without effect is refused; the error names the place where it belongs.
"""

from collections.abc import Mapping
from typing import Any

from headstart.engine.config import EngineConfig, make_config
from headstart.errors import ConfigError
from headstart.omni.graph import Graph, StageNode

__all__ = ["check_graph", "check_options", "no_options", "stage_config"]

_REFUSED = {
    "dtype": "it is of the whole model: Omni(model, dtype=...)",
    "device": "it is of the whole model: Omni(model, device=...)",
    "weights": "an omni model keeps its weights as the checkpoint has them",
    "encoder_cache_rows": "what was heard and seen is kept in cache_bytes",
    "max_images": "an omni model reads images by its own processor",
    "max_image_pixels": "an omni model reads images by its own processor",
    "enable_lora": "an omni model takes no adapters",
    "max_loras": "an omni model takes no adapters",
    "max_lora_rank": "an omni model takes no adapters",
}
_OF_ALL = {
    "enable_prefix_caching": "it stands beside a stage's options, or among those of all stages",
    "num_threads": "it is of the process: among the options of all stages",
}
_OF_STORES = dict.fromkeys(
    ("cache_dir", "cache_dir_bytes", "cache_words", "remote_cache"),
    "blocks are named by those of the stage before: among the options of all stages",
)
_ALWAYS = {"partial_hits": False}
"""Rows are kept by whole blocks."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if one of the options for all stages would have no effect."""
    _refuse(options, _REFUSED)
    config = make_config({**_ALWAYS, **options})
    for name, wanted in _ALWAYS.items():
        if getattr(config, name) != wanted:
            raise ConfigError(f"{name} is {options[name]!r}; in a stage it must be {wanted}")


def check_graph(graph: Graph) -> None:
    """Raise ConfigError if a graph gives one stage an option of all stages."""
    for node in graph.nodes:
        _refuse(node.options, _OF_STORES)


def stage_config(node: StageNode) -> EngineConfig:
    """The options of a stage's engine. Raises ConfigError."""
    _refuse(node.options, _OF_ALL)
    check_options(node.options)
    caching = node.spec.enable_prefix_caching
    return make_config({**_ALWAYS, **node.options, "enable_prefix_caching": caching})


def no_options(node: StageNode) -> None:
    """Raise ConfigError if a stage that takes no options is given any."""
    if node.options:
        raise ConfigError(
            f"stage {node.spec.name!r} has no options, not {sorted(node.options)[0]!r}"
        )


def _refuse(options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    for name in options:
        if name in reasons:
            raise ConfigError(f"{name} is no option of a stage: {reasons[name]}")
