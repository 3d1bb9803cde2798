"""Flags of commands, generated from dataclasses of options, and their `--help`.

A field `max_num_seqs: int = 64` becomes `--max-num-seqs INTEGER`. A bool field becomes a pair of
flags, `--deterministic / --no-deterministic`. Flags have no defaults, so that each default is
defined only in its dataclass. `--help` shows the flags in groups, the most common first.

`headstart serve` also accepts the flags of `vllm serve` and reads them as vLLM does (`--no-…`,
dots, underscores, values such as `4k` and JSON). click reads headstart's flags and the environment.
An option on the command line takes precedence over the file of `--config`, and the file over the
environment, even if they use different names for the option.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import click
from click.core import ParameterSource

from headstart.cli.terminal import note, show_error
from headstart.cluster.options import ReplicaConfig
from headstart.engine.config import count_cores, make_config
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_compat import (
    ENGINE,
    SERVE,
    add_flags,
    read_config,
    read_names,
    read_value,
)
from headstart.imports import load_module
from headstart.models.files import BUILT_IN, read_json
from headstart.replay import SpeedModel
from headstart.server.options import ServerOptions
from headstart.utils.argparse_utils import FlexibleArgumentParser
from headstart.validation import Either, OneOf, describe, shorten

# Defaults of `run`, for longer and reproducible replies. The library has vLLM's defaults.
RUN_SAMPLING: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
# Defaults of a chat, unless the model's generation_config.json has others.
CHAT_SAMPLING: Mapping[str, Any] = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.95}
# Sampling fields of generation_config.json; see `chat_sampling`.
_MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLING_FLAGS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)

MAIN, SAMPLING, INTERNALS, OTHER = (*("Options", "Sampling", "Engine internals", "Other"),)
_GROUPS: Mapping[str, Sequence[str]] = {
    MAIN: ("max_tokens", "temperature", "max_model_len", "device", "dtype", "weights"),
    "Server": [field.name for field in fields(ServerOptions)],
    "Replicas": [field.name for field in fields(ReplicaConfig)],
    SAMPLING: SAMPLING_FLAGS,
    "Memory and speed": (
        *("kv_cache_fraction", "kv_cache_memory", "num_threads", "enable_prefix_caching"),
        *("kv_cache_dtype", "deterministic", "speculation"),
        *("cache_dir", "cache_dir_bytes", "cache_words"),
    ),
    "Images and adapters": (
        *("max_images", "max_image_pixels", "encoder_cache_rows"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    ),
    "Speed of a replica": [field.name for field in fields(SpeedModel)],
    INTERNALS: (),
    OTHER: (),
}
_PREFIX = "HEADSTART_"  # prefix of environment variables
# Environment variables of headstart that set no flag of a GroupedCommand.
_OTHER_VARIABLES = {
    "HEADSTART_COMPILED_CACHE",
    "HEADSTART_CPU",
    "HEADSTART_DEMO_DIR",
    "HEADSTART_GGUF_DIR",
    "HEADSTART_KEYS_FOLDER",
    "HEADSTART_NATIVE",
}
# Names of types in error messages.
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}

Command = TypeVar("Command", bound=Callable[..., Any])
OptionsOfKind = TypeVar("OptionsOfKind", ServerOptions, ReplicaConfig, SpeedModel)


class GroupedOption(click.Option):
    """An option that `--help` shows in a group, and that an environment variable may set."""

    def __init__(self, *args: Any, group: str = MAIN, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.flag = max(self.opts, key=len)
        self.envvar = _PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option's name for error messages: its flag and environment variable."""
        return f"'{self.flag}' ({self.envvar})"


class GroupedCommand(click.Command):
    """A command whose options are shown in groups and may be set in the environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = [option for option in self.params if isinstance(option, GroupedOption)]
        for option in options:
            if option.group == MAIN and option.type.name == click.INT.name and not self.epilog:
                usage = f"{option.flag} N is {option.envvar}=N."
                self.epilog = f"Every flag may be set in the environment instead: {usage}"

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, after a warning about misspelled environment variables."""
        root = ctx.find_root().command
        commands = root.commands.values() if isinstance(root, click.Group) else [self]
        options = [option for command in commands for option in command.params]
        names = {str(o.envvar) for o in options if isinstance(o, GroupedOption)} | _OTHER_VARIABLES
        for name in sorted(os.environ.keys() - names):
            matches = get_close_matches(name, names, n=1, cutoff=0.87)
            if matches and name.startswith(_PREFIX):
                note(f"{name} in the environment is not an option; did you mean {matches[0]}?")
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", OTHER)].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)


class Options(NamedTuple):
    """Options of the engine, and sampling parameters.

    user_sampling: the sampling options that the user has set. sampling: these options, completed
    with defaults.
    """

    engine: dict[str, Any]
    sampling: SamplingParams
    user_sampling: dict[str, Any]


def model_option(command: Command) -> Command:
    """Give a command the flag `--model`."""
    return click.option(
        "--model",
        cls=GroupedOption,
        default=BUILT_IN,
        show_default=True,
        help="Folder of a Hugging Face model, its name on the hub, or a GGUF file (on the hub: "
        "OWNER/NAME:Q4_K_M); demo is a larger model than the default, with random weights, to "
        "measure times.",
    )(command)


def flags(owner: type, defaults: Mapping[str, Any] | None = None) -> Callable[[Command], Command]:
    """Return a decorator that gives a command a flag for each field of a class of options.

    Of SamplingParams, only the fields in SAMPLING_FLAGS become flags. Fields of other classes with
    one of these names, such as EngineConfig's `seed`, are left out.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(owner)
        for field in reversed(fields(owner)):
            if (field.name in SAMPLING_FLAGS) == (owner is SamplingParams):
                default = (defaults or {}).get(field.name, field.default)
                command = _flag(field, hints[field.name], default)(command)
        return command

    return decorate


def take_options(options: dict[str, Any], kind: type[OptionsOfKind]) -> OptionsOfKind:
    """Remove the options of one kind from `options` and return them. Raises ConfigError."""
    values = {field.name: options.pop(field.name, None) for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})


def sort_options(options: Mapping[str, Any], defaults: Mapping[str, Any] = RUN_SAMPLING) -> Options:
    """Separate the engine's options from the sampling options, and check both.

    Raises ConfigError or RequestError.
    """
    values = {name: value for name, value in options.items() if value not in (None, ())}
    sampling = {name: values.pop(name) for name in SAMPLING_FLAGS if name in values}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    return Options(check_engine(values), SamplingParams(**{**defaults, **sampling}), sampling)


def check_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options that the user has set. Raises ConfigError."""
    engine = {name: value for name, value in options.items() if value not in (None, ())}
    cores, threads = count_cores(), make_config(read_config(engine)).num_threads or 0
    if threads > cores:
        show_error(
            f"{threads} threads on {cores} cores wait for one another: "
            f"--num-threads {cores} is faster"
        )
    return engine


def chat_sampling(values: Mapping[str, Any], folder: Path) -> SamplingParams:
    """Return sampling parameters for a chat. Raises RequestError.

    `values` take precedence over the model's generation_config.json, and this file over
    CHAT_SAMPLING. With do_sample false, the file only sets temperature to 0. Otherwise, if it
    sets a sampling field other than repetition_penalty, its temperature and top_p default to 1.
    The loader of the model has checked the file.
    """
    file = folder / "generation_config.json"
    content = read_json(file) if file.is_file() else {}
    model_values = {
        name: content[name] for name in _MODEL_SAMPLING if content.get(name) is not None
    }
    if content.get("do_sample") is False:
        model_values = {"temperature": 0.0}
    elif model_values.keys() - {"repetition_penalty"}:
        model_values = {"temperature": 1.0, "top_p": 1.0, **model_values}
    return SamplingParams(**{**CHAT_SAMPLING, **model_values, **values})


def parse_sampling(name: str, text: str) -> dict[str, Any]:
    """Parse the name and the value of a /set command. Raises RequestError.

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
            f"{name} is {describe(text)}; allowed: {allowed or _TYPE_NAMES[kind]}"
        ) from error


def check_sampling_name(name: str) -> str:
    """Return the field of SamplingParams with this name. Raises RequestError."""
    field = name.replace("-", "_").lower()
    if field not in SAMPLING_FLAGS:
        matches = get_close_matches(field, SAMPLING_FLAGS, n=1, cutoff=0.7)
        hint = f"did you mean {matches[0]}?" if matches else f"allowed: {', '.join(SAMPLING_FLAGS)}"
        raise RequestError(f"{describe(name)} cannot be set; {hint}")
    return field


def _flag(field: Field[Any], hint: object, default: Any) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    kind = _click_type(hint)
    help_text = field.metadata.get("help", "")
    if default not in (MISSING, None, ()):
        default_text = ("off", "on")[default] if kind is bool else default
        help_text = f"{help_text}  [default: {default_text}]".strip()
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
    if isinstance(allowed, Either):
        settings["metavar"] = f"[{'|'.join(allowed.words.values)}|INTEGER]"
        kind = read_value  # the option's dataclass checks the value
    kind = _Count() if kind is int else kind
    return click.option(f"--{name}", default=None, type=kind, multiple=is_list, **settings)


class _Count(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """A whole number, which may be written as 4k (4,000) or 4K (4,096)."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = read_value(value) if isinstance(value, str) else value
        if type(number) is not int:
            self.fail(f"{shorten(repr(value))}; allowed: a whole number, such as 4096, 4k or 4K")
        return number


def _click_type(hint: object) -> Any:
    """Return click's type for a field's annotation. For a union, use its first type except None."""
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in get_args(hint)])
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint if hint in (bool, int, float, str) else str


# vLLM's names of options, and headstart's names. The values have the same meaning, except for
# `disable_uvicorn_access_log` and `allowed_origins`, which `_convert_names` converts.
_OUR_NAMES = {
    "ssl_keyfile": "tls_key",
    "ssl_certfile": "tls_cert",
    "shutdown_timeout": "drain_seconds",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "disable_uvicorn_access_log": "log_format",
    "allowed_origins": "cors_origin",
}
# The option that a flag sets, if its name differs from the flag's.
_OPTION_OF_FLAG = _OUR_NAMES | {
    "limit_mm_per_prompt": "max_images",
    "lora_modules": "adapters",
    "adapter": "adapters",
}
_HINT = "Flags of `vllm serve` are accepted too: docs/vllm.md lists them."
_VLLM_OPTIONS = ENGINE | SERVE
_FLAG = re.compile(r"(\w[\w-]*)(\.[\w.-]+)?")


class ServeCommand(GroupedCommand):
    """A command that also accepts vLLM's flags, which `--help` does not show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epilog = f"{self.epilog} {_HINT}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse headstart's and vLLM's flags. Raises ConfigError."""
        if ctx.resilient_parsing:  # for shell completion
            return super().parse_args(ctx, args)
        typed_values, others = _read(args)
        file_values, file_arguments = self._read_file(ctx, typed_values, others)
        arguments_left = super().parse_args(ctx, [*file_arguments, *others])
        values = read_names({**file_values, **typed_values}, _VLLM_OPTIONS, _flag_name)
        first, *aliases = values.pop("served_model_name", [None])
        adapters = tuple(map(_read_module, values.pop("lora_modules", ())))
        has_limit = _is_effective("limit_mm_per_prompt", values)
        for name, is_given in (("adapters", bool(adapters)), ("max_images", has_limit)):
            if is_given and ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
                ctx.params[name] = () if name == "adapters" else None  # ignore the environment
        options = _convert_names(values if first is None else values | {"served_model_name": first})
        for vllm_name, name in _OUR_NAMES.items():
            is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_typed and name in options and ctx.params[name] != options[name]:
                flag, vllm_flag = map(_flag_name, (name, vllm_name))
                raise ConfigError(
                    f"{flag} is {describe(ctx.params[name])} and {vllm_flag} is "
                    f"{describe(options[name])}; allowed: one of the two"
                )
        ctx.params |= options
        ctx.params["adapters"] += adapters
        ctx.params["model_alias"] += tuple(aliases)
        positional, model = ctx.params.pop("model_tag"), typed_values.get("model")
        if positional is not None:  # as in `vllm serve MODEL`
            if model not in (None, positional):
                raise ConfigError(
                    f"the model is {describe(positional)} and --model is {describe(model)}; "
                    "allowed: one of the two"
                )
            ctx.params["model"] = positional
        return arguments_left

    def _read_file(
        self, ctx: click.Context, typed_values: Mapping[str, Any], arguments_left: list[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the result of `_read` for the file of --config.

        Options of the file that are also set on the command line are left out.
        """
        if not typed_values.get("config"):
            return {}, []
        switches = {f for f, a in _parser()._option_string_actions.items() if a.nargs == 0}
        lists = {n for n, option in _VLLM_OPTIONS.items() if option.kind in ("list", "texts")}
        for option in self.params:
            if isinstance(option, click.Option) and option.multiple:
                lists |= {_field(flag) for flag in option.opts}
            if option.type.name == "boolean":
                switches |= {*option.opts, *option.secondary_opts}
        click_values, *_ = self.make_parser(ctx).parse_args([*arguments_left])
        present = {
            _OPTION_OF_FLAG.get(name, name)
            for name in typed_values
            if _is_effective(name, typed_values)
        } | click_values.keys()
        entries = _read_config(typed_values["config"], {_field(flag) for flag in switches}, lists)
        entries = [
            entry for entry in entries if _OPTION_OF_FLAG.get(entry[0], entry[0]) not in present
        ]
        return _read([argument for _, arguments in entries for argument in arguments])


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Parser(FlexibleArgumentParser):
    """A parser of vLLM's flags that reports errors as click does."""

    def error(self, message: str) -> NoReturn:
        raise click.UsageError(message, click.get_current_context(silent=True))


def _read(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of vLLM's flags, and the remaining arguments."""
    values, others = _parser().parse_known_args(args)
    return vars(values), others


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    return add_flags(parser, _VLLM_OPTIONS, given_only=True)


def _read_config(
    path: str, switches: Collection[str], lists: Collection[str]
) -> list[tuple[str, list[str]]]:
    """Return each option of a YAML file with its command-line arguments. Raises ConfigError.

    switches: options without a value. lists: options that may be given several times. Error
    messages do not quote the file, which may contain an API key.
    """
    yaml, prefix = load_module("yaml"), f"--config is {describe(path)};"
    try:
        text = Path(path).expanduser().read_text("utf-8")
        # `written` has scalars as texts, since YAML would read 0123 as 83.
        content, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prefix} {error}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        location = "it" if mark is None else f"line {mark.line + 1}"
        raise ConfigError(f"{prefix} {location} is not valid YAML") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{prefix} it is not a mapping of flags")
    entries = []
    pairs = zip(content.items(), written.values(), strict=True)
    for number, ((name, value), texts) in enumerate(pairs, start=1):
        match = _FLAG.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ConfigError(f"{prefix} entry {number} has no flag name such as max-model-len")
        field = match[1].replace("-", "_")
        if field == "config":
            raise ConfigError(f"{prefix} it contains --config; allowed: one file")
        if value is None:
            continue
        if isinstance(value, bool) and field in switches:
            entries.append((field, [f"--{name}" if value else f"--no-{name}"]))
            continue
        if not (isinstance(value, list) and field in lists):
            value, texts = [value], [texts]
        if None in value:
            raise ConfigError(f"{prefix} an item of {name} has no value")
        is_json = match[2] is not None  # a dotted key, e.g. x.enable_thinking
        arguments = [
            json.dumps(item, default=str) if is_json or isinstance(item, dict | list) else text
            for item, text in zip(value, texts, strict=True)
        ]
        entries.append((field, [f"--{name}={argument}" for argument in arguments]))
    return entries


def _is_effective(name: str, values: Mapping[str, Any]) -> bool:
    """Return True if vLLM's option has a value, and headstart uses this value."""
    value = values.get(name)
    if name == "limit_mm_per_prompt":
        return isinstance(value, Mapping) and value.get("image") is not None
    return value is not None and (value is not False or name != "disable_uvicorn_access_log")


def _convert_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options; replace vLLM's names with headstart's where they differ."""
    options = {name: value for name, value in values.items() if name not in ("config", *_OUR_NAMES)}
    vllm_options = {name: values[name] for name in _OUR_NAMES if _is_effective(name, values)}
    if vllm_options.pop("disable_uvicorn_access_log", False):
        options["log_format"] = "off"
    if (origins := vllm_options.pop("allowed_origins", None)) is not None:
        if not isinstance(origins, list) or not all(isinstance(text, str) for text in origins):
            raise ConfigError(
                f"--allowed-origins is {describe(origins)}; allowed: a list in JSON, such as "
                """'["https://a.example"]'"""
            )
        options["cors_origin"] = ",".join(origins) or None
    if "api_key" in options:
        options["api_key"] = tuple(options["api_key"])
    return options | {_OUR_NAMES[name]: value for name, value in vllm_options.items()}


def _read_module(text: str) -> str:
    """Convert an adapter in vLLM's JSON form to NAME=PATH. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        module = json.loads(text)
        name, path = module["name"], module["path"]
        if not isinstance(name, str) or not isinstance(path, str) or "=" in name:
            raise ValueError("name and path must be strings, and name without =")
        return f"{name}={path}"
    except (ValueError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"--lora-modules is {describe(text)}; allowed: NAME=PATH, or "
            """'{"name": ..., "path": ...}'"""
        ) from error
