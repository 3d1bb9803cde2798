"""Flags made of the fields of `EngineConfig` and `SamplingParams`, and the model they are for.

A field `max_num_seqs: int = 64` becomes `--max-num-seqs INTEGER`, a bool field a pair of flags
`--deterministic / --no-deterministic`. Only what a user typed is handed on, so every default
stands in one place. Each flag is in one of the groups that `--help` shows.
"""

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

import headstart
from headstart.cli.help import GroupedOption, group_of
from headstart.cli.streams import tell_error
from headstart.cluster.options import ReplicaConfig
from headstart.engine.config import EngineConfig, make_config
from headstart.engine.params import SamplingParams
from headstart.engine.startup.threads import count_cores
from headstart.errors import RequestError
from headstart.frontend.vllm_api.command_line import read_value
from headstart.frontend.vllm_api.options import read_config
from headstart.frontend.vllm_api.rows import nearest
from headstart.server.options import ServerOptions
from headstart.validation import OneOf, describe, shorten

if TYPE_CHECKING:
    from headstart.frontend.llm import LLM

DEFAULT_MODEL = "headstart-tiny"
RANDOM_MODEL = "demo"
NOTES: Mapping[str, str] = {
    DEFAULT_MODEL: (
        "headstart-tiny, 8 million parameters, looks things up in a document and can do little "
        "else. For a model that chats, add --model Qwen/Qwen3-0.6B-GGUF:Q8_0 (a download of "
        "0.6 GB); headstart models recommend lists others."
    ),
    RANDOM_MODEL: (
        "The demo model is a small Llama with random weights, made on the spot: "
        "its answers are noise, its times are real."
    ),
}

# What few bits do not hold: headstart-tiny's weights are set by formulas.
_TOO_FEW_BITS = {"weights": ("int5", "int4"), "kv_cache_dtype": ("int8",)}

# A command line wants longer and repeatable replies where the library keeps vLLM's defaults.
RUN_SAMPLING: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
# A chat is for people, whom the likeliest words bore; a model's own values go before these.
CHAT_SAMPLING: Mapping[str, Any] = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.95}
# Of generation_config.json: what says how tokens are drawn. One of them replaces all of ours.
_MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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

# What may be typed for a field whose annotation says all.
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What the flags of one call said: for the engine, and for sampling (`said`).

    sampling: what was said, and the command's defaults for the rest.
    """

    engine: dict[str, Any]
    sampling: SamplingParams
    said: dict[str, Any]


def model_option(command: Command) -> Command:
    """Give a command the flag `--model`."""
    return click.option(
        "--model",
        cls=GroupedOption,
        default=DEFAULT_MODEL,
        show_default=True,
        help="Folder of a Hugging Face model, its name on the hub, or a GGUF file (there too: "
        "OWNER/NAME:Q4_K_M); demo is a larger one with random weights, for times alone.",
    )(command)


def engine_options(command: Command) -> Command:
    """Give a command one flag for each field of EngineConfig; `--seed` is a request's own."""
    chosen = [field for field in fields(EngineConfig) if field.name not in SAMPLING_FLAGS]
    return _add_flags(command, EngineConfig, chosen, {})


def server_options(command: Command) -> Command:
    """Give a command one flag for each field of ServerOptions and ReplicaConfig."""
    command = _add_flags(command, ReplicaConfig, list(fields(ReplicaConfig)), {})
    return _add_flags(command, ServerOptions, list(fields(ServerOptions)), {})


def sampling_options(defaults: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command the flags of SamplingParams that make sense for one reply in a terminal."""
    chosen = [field for field in fields(SamplingParams) if field.name in SAMPLING_FLAGS]
    return lambda command: _add_flags(command, SamplingParams, chosen, defaults)


def sort_options(given: Mapping[str, Any], defaults: Mapping[str, Any] = RUN_SAMPLING) -> Options:
    """Tell the engine's options from those for sampling; see `check_engine`.

    Raises ConfigError or RequestError.
    """
    said = {name: value for name, value in given.items() if value not in (None, ())}
    sampling = {name: value for name, value in said.items() if name in SAMPLING_FLAGS}
    engine = {name: value for name, value in said.items() if name not in SAMPLING_FLAGS}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    return Options(check_engine(engine), SamplingParams(**{**defaults, **sampling}), sampling)


def check_engine(given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options that were given; warns of more threads than cores.

    Raises ConfigError.
    """
    engine = {name: value for name, value in given.items() if value not in (None, ())}
    cores, threads = count_cores(), make_config(read_config(engine)).num_threads or 0
    if threads > cores:
        tell_error(
            f"{threads} threads on {cores} cores wait for one another: "
            f"--num-threads {cores} is faster"
        )
    return engine


def chat_sampling(said: Mapping[str, Any], folder: Path) -> SamplingParams:
    """Sampling for a chat: what the user said, then the model's own values, then ours.

    The model's are those of generation_config.json that are in range. Raises RequestError.
    """
    return SamplingParams(**{**CHAT_SAMPLING, **_sampling_of_model(folder), **said})


def _sampling_of_model(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # a model without one, or one that the loader refuses with a better reason
    if not isinstance(content, dict):
        return {}
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    allowed = {
        field.name: field.metadata["allowed"]
        for field in fields(SamplingParams)
        if field.name in _MODEL_SAMPLING
    }
    found = {name: content[name] for name in _MODEL_SAMPLING if content.get(name) in allowed[name]}
    if {"temperature", "top_p", "top_k", "min_p"} & found.keys():
        return {"temperature": 1.0, "top_p": 1.0, **found}
    return found


def parse_sampling(name: str, text: str) -> dict[str, Any]:
    """A sampling value as it is typed in a chat. Raises RequestError.

    >>> parse_sampling("top-p", "0.9")
    {'top_p': 0.9}
    """
    name = check_sampling_name(name)
    if name == "stop":
        return {name: _read_stop(text)}
    kind = _click_type(get_type_hints(SamplingParams)[name])
    try:
        return {name: click.types.convert_type(kind).convert(text, None, None)}
    except click.BadParameter as error:
        allowed = SamplingParams.__dataclass_fields__[name].metadata["allowed"]
        raise RequestError(
            f"{name} is {describe(text)}; allowed: {allowed or _WORDS[kind]}"
        ) from error


def check_sampling_name(name: str) -> str:
    """The field of SamplingParams that is meant. Raises RequestError."""
    known = name.replace("-", "_").lower()
    if known not in SAMPLING_FLAGS:
        near = nearest(known, SAMPLING_FLAGS)
        hint = f"did you mean {near}?" if near else f"allowed: {', '.join(SAMPLING_FLAGS)}"
        raise RequestError(f"{describe(name)} cannot be set; {hint}")
    return known


def _read_stop(text: str) -> list[Any]:
    """A list of JSON, or one text; the texts of a list are checked with the other parameters."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return found if isinstance(found, list) else [text]


def open_model(model: str, options: Mapping[str, Any]) -> "LLM":
    """Load a model. Raises ModelError, ConfigError or OutOfMemoryError."""
    return headstart.LLM(resolve_model(model), **options)


def note_on(model: str, engine: Mapping[str, Any]) -> str:
    """What a user must know of the model's answers before reading them; mostly nothing.

    engine: the engine's options that were given.
    """
    told = NOTES.get(model, "")
    few = {name: engine[name] for name in _TOO_FEW_BITS.keys() & engine.keys()}
    lost = [f"{name} {kind}" for name, kind in sorted(few.items()) if kind in _TOO_FEW_BITS[name]]
    if model != DEFAULT_MODEL or not lost:
        return told
    return f"{told} With {' and '.join(lost)} most of its answers are wrong."


def resolve_model(model: str) -> str:
    """The folder or hub name to load for `--model`. Imports torch only for the demo model."""
    if model != RANDOM_MODEL:
        return model
    return str(import_module("headstart.models.demo").demo_model_path())


def _add_flags(
    command: Command, owner: type, chosen: list[Field[Any]], defaults: Mapping[str, Any]
) -> Command:
    hints = get_type_hints(owner)
    for field in reversed(chosen):
        default = defaults.get(field.name, field.default)
        command = _flag(field, hints[field.name], default)(command)
    return command


def _flag(field: Field[Any], hint: object, default: Any) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    help_text = field.metadata.get("help", "")
    kind = _click_type(hint)
    if default not in (MISSING, None, ()):
        shown = ("off", "on")[default] if kind is bool else default
        help_text = f"{help_text}  [default: {shown}]".strip()
    told: dict[str, Any] = {"help": help_text, "default": None, "group": group_of(field.name)}
    if kind is bool:
        return click.option(f"--{name}/--no-{name}", cls=GroupedOption, **told)
    is_list = field.name == "stop" or get_origin(hint) is tuple
    allowed = field.metadata.get("allowed")
    if isinstance(allowed, OneOf):
        values = [str(value) for value in allowed.values]
        told["metavar"] = f"[{'|'.join(values)}]"
        told["shell_complete"] = lambda context, parameter, typed: [
            value for value in values if value.startswith(typed)
        ]
    kind = _COUNT if kind is int else kind
    return click.option(f"--{name}", cls=GroupedOption, type=kind, multiple=is_list, **told)


class _Count(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no such arguments
    """A whole number; also 4k for 4,000 and 4K for 4,096."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = read_value(value) if isinstance(value, str) else value
        if isinstance(found, str):
            value = shorten(found)  # which the error tells
        if type(found) is int:
            return found
        try:
            return click.INT.convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r}; allowed: a whole number, as 4096, 4k or 4K", param, ctx)


_COUNT = _Count()


def _click_type(hint: object) -> Any:
    """What click makes of a field's annotation; the first of a union that is not None counts."""
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in get_args(hint)])
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint if hint in (bool, int, float, str) else str
