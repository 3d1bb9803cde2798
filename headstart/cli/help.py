"""`--help` in groups: what most people need first, the engine's internals last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from headstart.cli.streams import note
from headstart.cluster.options import ReplicaConfig
from headstart.frontend.vllm_api.rows import nearest
from headstart.server.options import ServerOptions

__all__ = [
    "SAMPLING",
    "SPEED",
    "GroupedCommand",
    "GroupedOption",
    "OrderedGroup",
    "group_of",
    "with_slips_alone",
]

MAIN, SERVER, REPLICAS, SAMPLING, MEMORY, MODELS, SPEED, INTERNALS, OTHER = (
    "Options",
    "How the server is reached",
    "Replicas",
    "How answers are chosen",
    "Memory and speed",
    "Images and adapters",
    "Speed of a replica",
    "Engine internals",
    "Other",
)
_GROUPS = {
    MAIN: ("max_tokens", "temperature", "max_model_len", "device", "dtype", "weights"),
    SERVER: tuple(field.name for field in fields(ServerOptions)),
    REPLICAS: tuple(field.name for field in fields(ReplicaConfig)),
    SAMPLING: (
        *("top_p", "top_k", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
    MEMORY: (
        *("kv_cache_fraction", "kv_cache_memory", "num_threads", "enable_prefix_caching"),
        *("kv_cache_dtype", "deterministic", "cache_dir", "cache_dir_bytes", "cache_words"),
    ),
    MODELS: (
        *("max_images", "max_image_pixels", "encoder_cache_rows"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    ),
}


def with_slips_alone(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with the flag that is meant; click asks for less than `nearest`, and for more."""
    params = error.ctx.command.params if error.ctx is not None else []
    near = nearest(error.option_name, [flag for one in params for flag in one.opts])
    meant = "" if near is None else f" Did you mean {near!r}?"
    return click.NoSuchOption(
        error.option_name, f"No such option {error.option_name!r}.{meant}", ctx=error.ctx
    )


def group_of(field: str) -> str:
    """The group of the flag of a configuration's field.

    >>> group_of("temperature"), group_of("eviction")
    ('Options', 'Engine internals')
    """
    return next((group for group, names in _GROUPS.items() if field in names), INTERNALS)


_PREFIX = "HEADSTART_"  # of the variables
# Those that are read and stand for no flag of a GroupedCommand.
_OF_NO_FLAG = {
    "HEADSTART_COMPILED_CACHE",
    "HEADSTART_CPU",
    "HEADSTART_DEMO_DIR",
    "HEADSTART_GGUF_DIR",
    "HEADSTART_KEYS_FOLDER",
    "HEADSTART_NATIVE",
}


class GroupedOption(click.Option):
    """An option that `--help` shows under a heading, and that may stand in the environment.

    Its variable is named as its flag: --max-tokens is HEADSTART_MAX_TOKENS.
    """

    def __init__(self, *args: Any, group: str = MAIN, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.flag = max(self.opts, key=len)
        self.variable = f"{_PREFIX}{self.flag.removeprefix('--').replace('-', '_').upper()}"
        self.envvar = self.variable

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """As click's; an error names the environment's variable if the value is from there."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.BadParameter as error:
            assert self.name is not None
            if ctx.get_parameter_source(self.name) is ParameterSource.ENVIRONMENT:
                error.param_hint = self.variable
            raise


def _variables(commands: Iterable[click.Command]) -> set[str]:
    return {
        one.variable
        for command in commands
        for one in command.params
        if isinstance(one, GroupedOption)
    }


class OrderedGroup(click.Group):
    """A group whose commands are shown in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, first what people need first."""
        return list(self.commands)


class GroupedCommand(click.Command):
    """A command whose options are shown in groups, and may stand in the environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = [one for one in self.params if isinstance(one, GroupedOption)]
        numbers = [one for one in options if one.group == MAIN and one.type.name == click.INT.name]
        if shown := next(iter(numbers), None):
            self.epilog = (
                f"Every flag may stand in the environment instead: {shown.flag} N is "
                f"{shown.variable}=N."
            )

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; before that, say which variables look like slips: nobody reads them.

        Of a command without flags, such as doctor, those that look like any command's.
        """
        root, mine = ctx.find_root().command, _variables([self])
        known = _variables(root.commands.values()) if isinstance(root, click.Group) else mine
        meant = {one.removeprefix(_PREFIX) for one in (mine or known) | _OF_NO_FLAG}
        for name in sorted(os.environ.keys() - known - _OF_NO_FLAG):
            short = name.removeprefix(_PREFIX)
            if short != name and (near := nearest(short, meant)):
                note(f"{name} in the environment is not read; the nearest is {_PREFIX}{near}")
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One list of options for each group that has some."""
        groups: dict[str, list[tuple[str, str]]] = {
            name: []
            for name in (MAIN, SERVER, REPLICAS, SAMPLING, MEMORY, MODELS, SPEED, INTERNALS, OTHER)
        }
        for parameter in self.get_params(ctx):
            is_option = isinstance(parameter, click.Option)
            record = parameter.get_help_record(ctx) if is_option else None
            if record is not None:
                # Of click's own options there is --help alone.
                groups[getattr(parameter, "group", OTHER)].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)
