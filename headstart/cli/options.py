"""Flags made of the fields of `EngineConfig` and `SamplingParams`, and the model they are for.

A field `max_num_seqs: int = 64` becomes `--max-num-seqs INTEGER`, a bool field a pair of flags
`--deterministic / --no-deterministic`. Only what a user typed is handed on, so every default
stands in one place.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

import headstart
from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams

if TYPE_CHECKING:
    from headstart.engine.llm import LLM

DEFAULT_MODEL = "headstart-tiny"
RANDOM_MODEL = "demo"
NOTES: Mapping[str, str] = {
    DEFAULT_MODEL: (
        "headstart-tiny, 8 million parameters, made for looking up tables: "
        "it looks things up in a document, and can do little else."
    ),
    RANDOM_MODEL: (
        "The demo model is a small Llama with random weights, made on the spot: "
        "its answers are noise, its times are real."
    ),
}

# A command line wants longer and repeatable replies where the library keeps vLLM's defaults.
SAMPLING_DEFAULTS: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
SAMPLING_FLAGS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What the flags of one call said: for the engine, and for sampling."""

    engine: dict[str, Any]
    sampling: SamplingParams


def engine_options(command: Command) -> Command:
    """Give a command one flag for each field of EngineConfig; `--seed` is a request's own."""
    chosen = [field for field in fields(EngineConfig) if field.name not in SAMPLING_FLAGS]
    return _add_flags(command, EngineConfig, chosen)


def sampling_options(command: Command) -> Command:
    """Give a command the flags of SamplingParams that make sense for one reply in a terminal."""
    chosen = [field for field in fields(SamplingParams) if field.name in SAMPLING_FLAGS]
    return _add_flags(command, SamplingParams, chosen)


def sort_options(given: Mapping[str, Any]) -> Options:
    """Tell the engine's options from those for sampling. Raises ConfigError or RequestError."""
    said = {name: value for name, value in given.items() if value not in (None, ())}
    sampling = {name: value for name, value in said.items() if name in SAMPLING_FLAGS}
    engine = {name: value for name, value in said.items() if name not in SAMPLING_FLAGS}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    return Options(engine, SamplingParams(**{**SAMPLING_DEFAULTS, **sampling}))


def open_model(model: str, options: Mapping[str, Any]) -> "LLM":
    """Load a model. Raises ModelError, ConfigError or OutOfMemoryError."""
    return headstart.LLM(resolve_model(model), **options)


def note_on(model: str) -> str:
    """What a user must know of the model's answers before reading them; mostly nothing."""
    return NOTES.get(model, "")


def resolve_model(model: str) -> str:
    """The folder or hub name to load for `--model`. Imports torch only for the demo model."""
    if model != RANDOM_MODEL:
        return model
    return str(import_module("headstart.models.demo.llama").demo_model_path())


def _add_flags(command: Command, owner: type, chosen: list[Field[Any]]) -> Command:
    hints = get_type_hints(owner)
    for field in reversed(chosen):
        command = _flag(field, hints[field.name])(command)
    return command


def _flag(field: Field[Any], hint: object) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    default = SAMPLING_DEFAULTS.get(field.name, field.default)
    help_text = field.metadata.get("help", "")
    kind = _click_type(hint)
    if default is not MISSING and default is not None:
        shown = ("off", "on")[default] if kind is bool else default
        help_text = f"{help_text}  [default: {shown}]".strip()
    if kind is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=help_text)
    return click.option(
        f"--{name}", type=kind, default=None, multiple=field.name == "stop", help=help_text
    )


def _click_type(hint: object) -> Any:
    """What click makes of a field's annotation; the first of a union that is not None counts."""
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in get_args(hint)])
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint if hint in (bool, int, float, str) else str
