"""The options of an engine in one object, as in `vllm.engine.arg_utils`, and as flags."""

import argparse
import copy
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import Field, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from headstart.engine.config import EngineConfig
from headstart.errors import ConfigError
from headstart.frontend.vllm_compat import (
    ABSENT,
    IGNORED,
    SERVE_ABSENT,
    SWITCHES,
    WORKS,
    read_options,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names that are no flags: vLLM has --chat-template for its server alone.
FLAGS = tuple(n for n in (*WORKS, *sorted(IGNORED), *ABSENT) if n != "chat_template")
LOG_FLAGS = ("enable_log_requests", "disable_log_requests")  # of `AsyncEngineArgs`

# Options that take several values on a command line.
LISTS = _names(
    "api_key lora_modules middleware prompt_adapters served_model_name cudagraph_capture_sizes "
    "allowed_media_domains numa_bind_nodes numa_bind_cpus device_ids cpu_offload_params "
    "offload_params lora_target_modules collect_detailed_traces sleep_preserve_parameter_names "
    "kv_cache_dtype_skip_layers logits_processors ignore_patterns"
)

# Options whose value is a text, even one that spells a number.
TEXTS = _names(
    "model tokenizer dtype generation_config served_model_name chat_template host api_key "
    "lora_modules ssl_keyfile ssl_certfile default_chat_template_kwargs tool_call_parser "
    "reasoning_parser config otlp_traces_endpoint root_path"
)

# Further flags of an option.
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "nnodes": "-n",
    "node_rank": "-r",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "data_parallel_size": "-dp",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "enable_expert_parallel": "-ep",
    "speculative_config": "-sc",
    "diffusion_config": "-dc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "gpu_memory_utilization": "--device-memory-utilization",
    "api_server_count": "-asc",
}

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNTED = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgt])|(\d{1,15})([KMGT])")
_OF_CONFIG = {option.name: option for option in fields(EngineConfig)}


def _default_of(name: str) -> Any:
    """Return an option's default; None where the engine chooses."""
    if name in _OF_CONFIG:
        return _OF_CONFIG[name].default
    return copy.copy(next(iter(ABSENT.get(name, ())), None))


class _Fields:
    """The fields of an `EngineArgs` are the model and the options that were given, so that
    `LLM(**asdict(args))` works. Those of the class are all options of vLLM's."""

    def __get__(self, args: "EngineArgs | None", kind: type) -> dict[str, Field[Any]]:
        names = FLAGS if args is None else vars(args)
        made = make_dataclass(
            kind.__name__,
            [(n, Any, field(default_factory=partial(_default_of, n))) for n in names],
        )
        return {option.name: option for option in fields(made)}


class EngineArgs(Namespace):
    """A model and its options, for `LLM.from_engine_args` or `LLM(**asdict(engine_args))`.

    Each option is an attribute, which may be set; one that was not given has its default. Raises
    ConfigError for one that cannot be followed, ModelError for a model that is not there.
    """

    __dataclass_fields__ = _Fields()

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        super().__init__(model=model, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, without the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each of vLLM's options to a parser, and return it."""
        return add_flags(parser, FLAGS)

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Take what a parser with these flags read; the program's own flags are left alone."""
        given = {name: getattr(args, name) for name in FLAGS if hasattr(args, name)}
        if given.get("model") is None:
            raise ConfigError(
                "the arguments name no model; allowed: --model, or set_defaults(model=...)"
            )
        defaults = {name: (None, _default_of(name)) for name in given}
        return cls(**{n: v for n, v in given.items() if v not in defaults[n]})

    def __getattr__(self, name: str) -> Any:
        if name in FLAGS or name in _OF_CONFIG or name == "chat_template":
            return _default_of(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM.from_engine_args`."""

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add flags as `EngineArgs` does; async_args_only: only those that an `LLM` lacks."""
        return add_flags(parser, LOG_FLAGS if async_args_only else FLAGS)


class _Switch(argparse.BooleanOptionalAction):
    """`--x` and `--no-x`; with `--enable-x` also `--disable-x`, and the other way round."""

    def __init__(self, option_strings: list[str], dest: str, inverse: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._off = {f"--no-{option_strings[0].removeprefix('--')}", inverse}
        self.option_strings = [*option_strings, *sorted(self._off - {""})]

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, flag: Any = None
    ) -> None:
        setattr(namespace, self.dest, flag not in self._off)


def add_flags(
    parser: ArgumentParser, names: Iterable[str], *, given_only: bool = False
) -> ArgumentParser:
    """Add flags for options to a parser, `--max-model-len` for max_model_len, and return it.

    given_only: flags that are not given have no default, and lists may be given in several parts.
    """
    group = parser.add_argument_group("engine")
    spellings = {n: [f"--{n.replace('_', '-')}", *SHORT.get(n, "").split()] for n in names}
    flags = {flag for spelled in spellings.values() for flag in spelled}
    for name, spelled in spellings.items():
        more: dict[str, Any] = {"type": str if name in TEXTS else read_value}
        values = SERVE_ABSENT.get(name, ABSENT.get(name, ()))
        if name in SWITCHES or any(isinstance(value, bool) for value in values):
            inverse = _inverse(spelled[0])
            more = {"action": partial(_Switch, inverse="" if inverse in flags else inverse)}
        elif name in LISTS:
            more |= {"nargs": "+", "action": "extend" if given_only else "store"}
        default = argparse.SUPPRESS if given_only else _default_of(name)
        group.add_argument(*spelled, dest=name, default=default, help=_help(name), **more)
    return parser


def _inverse(flag: str) -> str:
    """Return the other of `--enable-x` and `--disable-x`; "" for any other flag."""
    for prefix, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(prefix):
            return other + flag.removeprefix(prefix)
    return ""


def _help(name: str) -> str:
    if name in _OF_CONFIG:
        return str(_OF_CONFIG[name].metadata["help"]).replace("%", "%%")
    return "no effect" if name in IGNORED else "see docs/vllm.md"


def read_value(text: str) -> Any:
    """Read a number, one with a unit such as 32k (thousands) and 32K (1,024s), JSON, or a text.

    >>> read_value("32k"), read_value("0.9"), read_value("auto")
    (32000, 0.9, 'auto')
    """
    if text in ("", "None"):
        return None
    counted = _COUNTED.fullmatch(text.strip())
    if counted is not None:
        number, unit, whole, binary = counted.groups()
        return int(float(number) * _UNITS[unit]) if unit else int(whole) * _BINARY_UNITS[binary]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
