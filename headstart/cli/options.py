"""Flags of commands, made of the fields of dataclasses of options, and their `--help`.

A field `max_num_seqs: int = 64` becomes `--max-num-seqs INTEGER`, a bool field a pair of flags
`--deterministic / --no-deterministic`. Only given flags are passed on, so that each default is
stated once. `--help` shows the flags in groups: first those that most people need.
"""

import json
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from headstart.cli.streams import note, tell_error
from headstart.cluster.options import ReplicaConfig
from headstart.engine.config import EngineConfig, count_cores, make_config
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError
from headstart.frontend.engine_args import read_value
from headstart.frontend.vllm_compat import read_config
from headstart.models.files import BUILT_IN
from headstart.replay import SpeedModel
from headstart.server.options import ServerOptions
from headstart.validation import OneOf, describe, shorten

# A command line wants longer and repeatable replies where the library keeps vLLM's defaults.
RUN_SAMPLING: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
# The values for a chat, unless the model's generation_config.json has its own.
CHAT_SAMPLING: Mapping[str, Any] = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.95}
# Fields of generation_config.json that say how tokens are drawn. One of them replaces all of ours.
_MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLING_FLAGS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)

MAIN, SAMPLING, INTERNALS, OTHER = (
    *("Options", "How answers are chosen", "Engine internals", "Other"),
)
_GROUPS: Mapping[str, Iterable[str]] = {
    MAIN: ("max_tokens", "temperature", "max_model_len", "device", "dtype", "weights"),
    "How the server is reached": [field.name for field in fields(ServerOptions)],
    "Replicas": [field.name for field in fields(ReplicaConfig)],
    SAMPLING: SAMPLING_FLAGS,
    "Memory and speed": (
        *("kv_cache_fraction", "kv_cache_memory", "num_threads", "enable_prefix_caching"),
        *("kv_cache_dtype", "deterministic", "cache_dir", "cache_dir_bytes", "cache_words"),
    ),
    "Images and adapters": (
        *("max_images", "max_image_pixels", "encoder_cache_rows"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    ),
    "Speed of a replica": [field.name for field in fields(SpeedModel)],
    INTERNALS: (),
    OTHER: (),
}
_PREFIX = "HEADSTART_"  # of variables in the environment
# Variables that stand for no flag of a GroupedCommand.
_OF_NO_FLAG = {
    "HEADSTART_COMPILED_CACHE",
    "HEADSTART_CPU",
    "HEADSTART_DEMO_DIR",
    "HEADSTART_GGUF_DIR",
    "HEADSTART_KEYS_FOLDER",
    "HEADSTART_NATIVE",
}
# Types whose values need no range in an error.
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}

Command = TypeVar("Command", bound=Callable[..., Any])
OptionsOfKind = TypeVar("OptionsOfKind", ServerOptions, ReplicaConfig, SpeedModel)


class GroupedOption(click.Option):
    """An option that `--help` shows in a group; --max-tokens is also HEADSTART_MAX_TOKENS."""

    def __init__(self, *args: Any, group: str = MAIN, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.flag = max(self.opts, key=len)
        self.envvar = _PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name for an error: the flag, and the variable that may hold the value."""
        return f"'{self.flag}' ({self.envvar})"


class GroupedCommand(click.Command):
    """A command whose options are shown in groups, and may stand in the environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = [option for option in self.params if isinstance(option, GroupedOption)]
        numbers = [one for one in options if one.group == MAIN and one.type.name == click.INT.name]
        if numbers:
            self.epilog = (
                f"Every flag may stand in the environment instead: {numbers[0].flag} N is "
                f"{numbers[0].envvar}=N."
            )

    def invoke(self, ctx: click.Context) -> Any:
        """Warn of variables whose names look like misspelled ones, and run the command."""
        root = ctx.find_root().command
        commands = root.commands.values() if isinstance(root, click.Group) else [self]
        known = {
            str(option.envvar)
            for command in commands
            for option in command.params
            if isinstance(option, GroupedOption)
        } | _OF_NO_FLAG
        for name in sorted(os.environ.keys() - known):
            near = get_close_matches(name, known, n=1, cutoff=0.87)
            if near and name.startswith(_PREFIX):
                note(f"{name} in the environment is not read; the nearest is {near[0]}")
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each group that has some."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", OTHER)].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)


class OrderedGroup(click.Group):
    """A group whose commands are shown in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)


@dataclass(frozen=True)
class Options:
    """Options for the engine, and those for sampling.

    given: sampling values from the command line; sampling: these, with defaults for the rest.
    """

    engine: dict[str, Any]
    sampling: SamplingParams
    given: dict[str, Any]


def model_option(command: Command) -> Command:
    """Give a command the flag `--model`."""
    return click.option(
        "--model",
        cls=GroupedOption,
        default=BUILT_IN,
        show_default=True,
        help="Folder of a Hugging Face model, its name on the hub, or a GGUF file (there too: "
        "OWNER/NAME:Q4_K_M); demo is a larger one with random weights, for times alone.",
    )(command)


def engine_options(command: Command) -> Command:
    """Give a command a flag for each field of EngineConfig; `--seed` is a request's own."""
    chosen = [field for field in fields(EngineConfig) if field.name not in SAMPLING_FLAGS]
    return _add_flags(command, EngineConfig, chosen, {})


def server_options(command: Command) -> Command:
    """Give a command a flag for each field of ServerOptions and ReplicaConfig."""
    command = _add_flags(command, ReplicaConfig, fields(ReplicaConfig), {})
    return _add_flags(command, ServerOptions, fields(ServerOptions), {})


def speed_options(command: Command) -> Command:
    """Give a command a flag for each field of SpeedModel."""
    return _add_flags(command, SpeedModel, fields(SpeedModel), {})


def sampling_options(defaults: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command the flags of SamplingParams that make sense for one reply in a terminal."""
    chosen = [field for field in fields(SamplingParams) if field.name in SAMPLING_FLAGS]
    return lambda command: _add_flags(command, SamplingParams, chosen, defaults)


def take_options(given: dict[str, Any], kind: type[OptionsOfKind]) -> OptionsOfKind:
    """Take the options of one kind out of all that were given. Raises ConfigError."""
    values = {field.name: given.pop(field.name, None) for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})


def sort_options(given: Mapping[str, Any], defaults: Mapping[str, Any] = RUN_SAMPLING) -> Options:
    """Separate the engine's options from those for sampling, and check them.

    Raises ConfigError or RequestError.
    """
    values = {name: value for name, value in given.items() if value not in (None, ())}
    sampling = {name: values.pop(name) for name in SAMPLING_FLAGS if name in values}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    return Options(check_engine(values), SamplingParams(**{**defaults, **sampling}), sampling)


def check_engine(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options that were given. Raises ConfigError."""
    engine = {name: value for name, value in given.items() if value not in (None, ())}
    cores, threads = count_cores(), make_config(read_config(engine)).num_threads or 0
    if threads > cores:
        tell_error(
            f"{threads} threads on {cores} cores wait for one another: "
            f"--num-threads {cores} is faster"
        )
    return engine


def chat_sampling(given: Mapping[str, Any], folder: Path) -> SamplingParams:
    """Return sampling for a chat: given values, then the model's own, then ours.

    The model's values are those of generation_config.json that are in range. Raises RequestError.
    """
    return SamplingParams(**{**CHAT_SAMPLING, **_model_sampling(folder), **given})


def _model_sampling(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # the loader reports what is wrong with the model
    if not isinstance(content, dict):
        return {}
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    allowed = {field.name: field.metadata.get("allowed", ()) for field in fields(SamplingParams)}
    values = {name: content[name] for name in _MODEL_SAMPLING if content.get(name) in allowed[name]}
    if {"temperature", "top_p", "top_k", "min_p"} & values.keys():
        return {"temperature": 1.0, "top_p": 1.0, **values}
    return values


def parse_sampling(name: str, text: str) -> dict[str, Any]:
    """Parse a sampling value that is typed in a chat. Raises RequestError.

    >>> parse_sampling("top-p", "0.9")
    {'top_p': 0.9}
    """
    name = check_sampling_name(name)
    if name == "stop":
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError):
            texts = text
        return {name: texts if isinstance(texts, list) else [text]}
    kind = _click_type(get_type_hints(SamplingParams)[name])
    try:
        return {name: click.types.convert_type(kind).convert(text, None, None)}
    except click.BadParameter as error:
        allowed = SamplingParams.__dataclass_fields__[name].metadata["allowed"]
        raise RequestError(
            f"{name} is {describe(text)}; allowed: {allowed or _WORDS[kind]}"
        ) from error


def check_sampling_name(name: str) -> str:
    """Return the field of SamplingParams of this name. Raises RequestError."""
    field = name.replace("-", "_").lower()
    if field not in SAMPLING_FLAGS:
        near = get_close_matches(field, SAMPLING_FLAGS, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(SAMPLING_FLAGS)}"
        raise RequestError(f"{describe(name)} cannot be set; {hint}")
    return field


def _add_flags(
    command: Command, owner: type, chosen: Iterable[Field[Any]], defaults: Mapping[str, Any]
) -> Command:
    hints = get_type_hints(owner)
    for field in reversed(list(chosen)):
        default = defaults.get(field.name, field.default)
        command = _flag(field, hints[field.name], default)(command)
    return command


def _flag(field: Field[Any], hint: object, default: Any) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    kind = _click_type(hint)
    help_text = field.metadata.get("help", "")
    if default not in (MISSING, None, ()):
        shown = ("off", "on")[default] if kind is bool else default
        help_text = f"{help_text}  [default: {shown}]".strip()
    group = next((group for group, names in _GROUPS.items() if field.name in names), INTERNALS)
    settings: dict[str, Any] = {"cls": GroupedOption, "help": help_text, "group": group}
    if kind is bool:
        return click.option(f"--{name}/--no-{name}", default=None, **settings)
    allowed = field.metadata.get("allowed")
    if isinstance(allowed, OneOf):
        values = [str(value) for value in allowed.values]
        settings["metavar"] = f"[{'|'.join(values)}]"
        settings["shell_complete"] = lambda context, parameter, typed: [
            value for value in values if value.startswith(typed)
        ]
    is_list = field.name == "stop" or get_origin(hint) is tuple
    kind = _Count() if kind is int else kind
    return click.option(f"--{name}", default=None, type=kind, multiple=is_list, **settings)


class _Count(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no such arguments
    """A whole number; also 4k for 4,000 and 4K for 4,096."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = read_value(value) if isinstance(value, str) else value
        if type(number) is not int:
            self.fail(f"{shorten(repr(value))}; allowed: a whole number, as 4096, 4k or 4K")
        return number


def _click_type(hint: object) -> Any:
    """Return click's type for a field's annotation; of a union the first that is not None."""
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in get_args(hint)])
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint if hint in (bool, int, float, str) else str
