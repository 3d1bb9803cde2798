"""Pipelines written in TOML: stages, their inputs and their outputs.

    collects = ["vocoder.audio"]

    [stages.thinker]
    kind = "thinker"
    gives = { hidden = "token" }

    [stages.vocoder]
    kind = "vocoder"
    autoregressive = false
    takes = ["thinker.hidden"]
    gives = { audio = { alignment = "frames(4)", dtype = "float32" } }
    enable_prefix_caching = false
    options = { chunk = 8 }

`kind` names the factory that makes the stage, and `options` are the factory's arguments.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.engine.config import EngineConfig, make_config
from headstart.errors import ConfigError
from headstart.omni.pipeline import Pipeline
from headstart.omni.stage import Input, Output, Stage, StageSpec, parse_alignment
from headstart.validation import describe


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage of a graph: its declaration, its factory's name, and the factory's options."""

    spec: StageSpec
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


Factory = Callable[[StageNode], Stage]


@dataclass(frozen=True, slots=True)
class Graph:
    """A pipeline before it is built."""

    nodes: tuple[StageNode, ...]
    collects: tuple[Input, ...] = ()

    def with_options(self, options: Mapping[str, Any]) -> "Graph":
        """Return this graph with `options` as defaults of all autoregressive stages.

        `enable_prefix_caching` applies to every stage: False switches caching off in all stages;
        with True a stage may still switch it off for itself.
        """
        defaults = dict(options)
        caching = defaults.pop("enable_prefix_caching", True)
        nodes = []
        for node in self.nodes:
            is_on = node.spec.enable_prefix_caching and caching
            spec = replace(node.spec, enable_prefix_caching=is_on)
            merged = {**defaults, **node.options} if spec.autoregressive else node.options
            nodes.append(replace(node, spec=spec, options=merged))
        return replace(self, nodes=tuple(nodes))

    def build(self, factories: Mapping[str, Factory]) -> Pipeline:
        """Build the pipeline. Raises ConfigError, after closing the stages already made."""
        unknown = sorted({node.kind for node in self.nodes} - factories.keys())
        if unknown:
            raise ConfigError(f"no factory makes a {unknown[0]!r}; there are {sorted(factories)}")
        taken = {*self.collects, *(source for node in self.nodes for source in node.spec.takes)}
        stages: list[Stage] = []
        try:
            for node in self.nodes:
                spec = node.spec
                if spec.autoregressive:  # stores need not have rows with K/V that no stage takes
                    gives = tuple(
                        output
                        for output in spec.gives
                        if not output.alignment.is_by_token
                        or Input(spec.name, output.name) in taken
                    )
                    node = replace(node, spec=replace(spec, gives=gives))
                stages.append(factories[node.kind](node))
            return Pipeline(stages, self.collects)
        except BaseException:
            for stage in stages:
                stage.close()
            raise


def read_graph(text: str) -> Graph:
    """Read a graph from TOML. Raises ConfigError that names the wrong entry."""
    if not isinstance(text, str):
        raise ConfigError(f"the pipeline is {describe(text)}; allowed: a text in TOML")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the pipeline is no TOML: {error}") from error
    _check_keys(content, {"collects", "stages"}, "a pipeline")
    stages = content.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError("a pipeline has a table [stages.NAME] for each of its stages")
    nodes = tuple(_node(name, table) for name, table in stages.items())
    return Graph(nodes, _inputs(content.get("collects", []), "the pipeline"))


def _node(name: str, table: Mapping[str, Any]) -> StageNode:
    switches = {}
    _check_keys(table, {"kind", "takes", "gives", "options", *_SWITCHES}, f"stage {name!r}")
    for key in table.keys() & _SWITCHES:
        if not isinstance(table[key], bool):
            raise ConfigError(f"{name}.{key} is {table[key]!r}; allowed: true or false")
        switches[key] = table[key]
    spec = StageSpec(
        name=name,
        takes=_inputs(table.get("takes", []), f"stage {name!r}"),
        gives=tuple(_output(key, value) for key, value in table.get("gives", {}).items()),
        **switches,
    )
    options = table.get("options", {})
    _refuse(options, _OF_STORES)
    return StageNode(spec, str(table.get("kind", name)), options)


def _output(name: str, value: str | Mapping[str, Any]) -> Output:
    table = {"alignment": value} if isinstance(value, str) else dict(value)
    _check_keys(table, {"alignment", "dtype", "required"}, f"output {name!r}")
    return Output(name, parse_alignment(table.pop("alignment", "token")), **table)


def _inputs(names: list[str], taker: str) -> tuple[Input, ...]:
    inputs = []
    for name in names:
        stage, dot, output = str(name).partition(".")
        if not (stage and dot and output):
            raise ConfigError(f"{taker} takes {name!r}; an input is written stage.output")
        inputs.append(Input(stage, output))
    return tuple(inputs)


def _check_keys(table: Mapping[str, Any], allowed: set[str], owner: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise ConfigError(f"{owner} has no {unknown[0]!r}; known: {', '.join(sorted(allowed))}")


_SWITCHES = {"find_outputs", "autoregressive", "enable_prefix_caching"}
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
    "enable_prefix_caching": "it stands next to a stage's options, or among those of all stages",
    "num_threads": "it is of the process: among the options of all stages",
}
_OF_STORES = dict.fromkeys(
    ("cache_dir", "cache_dir_bytes", "cache_words", "remote_cache"),
    "blocks are named by those of the stage before: among the options of all stages",
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if one of the options for all stages would have no effect."""
    _refuse(options, _REFUSED)
    if make_config({"partial_hits": False, **options}).partial_hits:  # rows are in whole blocks
        raise ConfigError("partial_hits is True; in a stage it must be False")


def stage_config(node: StageNode) -> EngineConfig:
    """Return the options of a stage's engine. Raises ConfigError."""
    _refuse(node.options, _OF_ALL)
    check_options(node.options)
    caching = node.spec.enable_prefix_caching
    options = {"partial_hits": False, **node.options, "enable_prefix_caching": caching}
    return make_config(options)


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
