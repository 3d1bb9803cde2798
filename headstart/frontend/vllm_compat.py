"""vLLM's interface: its engine options, its server flags and its types.

`assets/vllm_options.txt` lists the options; docs/vllm.md explains them.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Self, TypedDict

from headstart.engine.config import MAX_DRAFT, EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.imports import load_module
from headstart.models.files import find_folder, read_json
from headstart.validation import NOT_AN_OPTION, Number, describe

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from headstart.engine.engine import EngineCore


class Option(NamedTuple):
    """An option of vLLM.

    state: "works", "ignored" (any value is accepted, without effect) or "absent" (the value must be
    None or one of `values`). kind: the flag's argument: "value" (parsed by `read_value`), "text"
    (not parsed), "list" (one or more values), "texts" (one or more texts) or "switch" (no
    argument). short: the short flag, or "". values: the first value is the default.
    """

    state: str
    kind: str
    short: str
    values: list[Any]


def _read_table() -> tuple[dict[str, Option], dict[str, Option]]:
    """Return vLLM's engine options and server options."""
    text = (Path(__file__).parents[1] / "assets/vllm_options.txt").read_text("utf-8")
    tables: list[dict[str, Option]] = []
    for line in text.splitlines():
        columns, _, values = line.partition(" = ")
        if line.startswith("["):
            tables.append({})
        elif line and not line.startswith("#"):
            name, state, kind, *short = columns.split()
            allowed = json.loads(values) if values else []
            tables[-1][name] = Option(state, kind, "".join(short), allowed)
    engine, serve = tables
    return engine, serve


ENGINE, SERVE = _read_table()
"""vLLM's engine options and server options by name."""

_COUNTS = Number(int, 0)
_CONFIG = {option.name: option for option in fields(EngineConfig)}
_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling parameters that generation_config.json may set, as in vLLM."""


class EngineOptions(NamedTuple):
    """Options of an engine and its calls.

    config: fields of `EngineConfig`. tokenizer: its folder; None for the model's. sampling: default
    parameters of calls. chat_template: the default template; None for the tokenizer's.
    """

    config: dict[str, Any]
    tokenizer: Path | None
    sampling: SamplingParams
    chat_template: str | None


def read_options(model: str | Path, options: Mapping[str, Any]) -> EngineOptions:
    """Read the options of `LLM(...)`. Raises ConfigError or ModelError."""
    options = _read(options)
    source = options.get("generation_config", "auto")
    return EngineOptions(
        _as_config(options),
        _read_tokenizer(options.get("tokenizer"), model),
        _read_sampling(model, source, options.get("override_generation_config", {})),
        _read_template(options.get("chat_template")),
    )


def read_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` for the options of `LLM(...)`, without reading a model.

    Raises ConfigError, also for an invalid chat template.
    """
    options = _read(options)
    _read_template(options.get("chat_template"))
    return _as_config(options)


def read_names(
    options: Mapping[str, Any], table: Mapping[str, Option], spell: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the options that have an effect. Raises ConfigError for an unsupported option.

    spell: returns the name of an option in errors.
    """
    effective = {}
    for name, value in options.items():
        state, *_, values = table.get(name, ("unknown", ()))
        allowed = [None, *values] if state == "absent" else []
        plain = list(value) if isinstance(value, (set, frozenset, tuple)) else value
        if state == "works":
            effective[name] = value
        elif state != "ignored" and not any(
            plain == other and isinstance(plain, bool) == isinstance(other, bool)
            for other in allowed
        ):
            others = ", ".join(describe(v) for v in values if v not in ("", [], {}))
            reason = f"allowed: {others}; see docs/vllm.md" if others else NOT_AN_OPTION
            raise ConfigError(f"{spell(name)} is {describe(value)}; {reason}")
    return effective


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    config_options = dict.fromkeys(_CONFIG, Option("works", "value", "", []))
    effective = read_names(options, ENGINE | config_options)
    return {n: value for n, value in effective.items() if value is not None or n not in ENGINE}


_ALIASES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "limit_mm_per_prompt": "max_images",
    "speculative_config": "speculation",
}
"""Fields of `EngineConfig` by their names in vLLM."""


def _as_config(options: Mapping[str, Any]) -> dict[str, Any]:
    policy = options.get("scheduling_policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy is {describe(policy)}; allowed: fcfs, priority")
    config = {name: value for name, value in options.items() if name in _CONFIG}
    dtype = config.get("dtype")
    if type(dtype).__name__ in ("str", "dtype"):  # a torch.dtype, but without importing torch
        name = str(dtype).removeprefix("torch.")
        config["dtype"] = {"half": "float16", "float": "float32"}.get(name, name)
    for name, values in (("device", ["auto"]), ("max_model_len", [-1, "auto"])):
        value = config.get(name)
        if isinstance(value, str | int) and value in values:
            del config[name]
    readers = {"limit_mm_per_prompt": _read_image_limit, "speculative_config": _read_speculation}
    for name, field_name in _ALIASES.items():
        passed = value = options.get(name)
        if passed is not None and name in readers:
            value = readers[name](passed)
        if value is None:
            continue
        default = _CONFIG[field_name].default
        other = config.get(field_name, default)
        if other not in (None, default, value):
            raise ConfigError(
                f"{field_name} is {describe(other)} and {name} is {describe(passed)}; allowed: one "
                "of the two"
            )
        config[field_name] = value
    return config


def _read_image_limit(limits: object) -> Any:
    """Return the image limit of a prompt, from `{"image": 4}` or `{"image": {"count": 4}}`."""
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'limit_mm_per_prompt is {describe(limits)}; allowed: a dict such as {{"image": 4}}'
        )
    limit = limits.get("image")
    return limit.get("count") if isinstance(limit, Mapping) else limit


def _read_speculation(drafts: object) -> int:
    """Return the maximum number of tokens in a draft.

    vLLM's methods "ngram" and "suffix" both select headstart's drafts.
    """
    form = '{"method": "ngram", "num_speculative_tokens": 8}'
    if not isinstance(drafts, Mapping) or drafts.get("method") not in ("ngram", "suffix"):
        raise ConfigError(
            f"speculative_config is {describe(drafts)}; allowed: a dict such as {form}, with the "
            'method "ngram" or "suffix"'
        )
    count = drafts.get("num_speculative_tokens", MAX_DRAFT)
    if count not in _COUNTS:
        raise ConfigError(
            f"num_speculative_tokens of speculative_config is {describe(count)}; allowed: {_COUNTS}"
        )
    return min(int(count), MAX_DRAFT)


def _read_tokenizer(path: object, model: str | Path) -> Path | None:
    """Return the folder of a tokenizer; None for the model's. Raises ConfigError."""
    if path is None or str(path) == str(model):
        return None
    if isinstance(path, str | Path) and str(path) and Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    raise ConfigError(f"tokenizer is {describe(path)}; allowed: the folder of a tokenizer")


def _read_sampling(model: str | Path, source: object, changes: object) -> SamplingParams:
    """Return the sampling parameters of a generation_config.json with changes.

    source: "auto" for the model's file, "vllm" for no file, or another folder.
    """
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(
            f'generation_config is {describe(source)}; allowed: "auto", "vllm" or a folder'
        )
    if not isinstance(changes, Mapping):
        raise ConfigError(f"override_generation_config is {describe(changes)}; allowed: a dict")
    config: dict[str, Any] = {}
    if source != "vllm":
        path = find_folder(model if source == "auto" else source) / "generation_config.json"
        if path.is_file():
            config = read_json(path)
        elif source != "auto":
            raise ConfigError(f"generation_config is {describe(source)}, but {path} does not exist")
    config |= changes
    config["max_tokens"] = config.get("max_new_tokens")
    sampling = {name: config[name] for name in _GENERATION if config.get(name) is not None}
    try:
        return SamplingParams(**sampling)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error


def _read_template(source: object) -> str | None:
    """Return a template, or the text of a template's file. Raises ConfigError."""
    if source is None:
        return None
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"chat_template is {describe(source)}; allowed: a template or a file")
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"chat_template is {describe(source)}, which is neither a template nor a file: {error}"
        ) from error


# Engine options with a flag. In vLLM, --chat-template is a flag of the server only.
FLAGS = tuple(name for name in ENGINE if name != "chat_template")
LOG_FLAGS = ("enable_log_requests", "disable_log_requests")  # only in `AsyncEngineArgs`

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER_WITH_UNIT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgt])|(\d{1,15})([KMGT])")


def _default_of(name: str) -> Any:
    """Return an option's default; None if the engine selects the value."""
    if name in _CONFIG:
        return _CONFIG[name].default
    values = ENGINE[name].values if name in ENGINE else []
    return copy.copy(values[0]) if values else None


class _Fields:
    """The descriptor of `__dataclass_fields__` of `EngineArgs`.

    The class `EngineArgs` has all options of vLLM as fields. An instance has only the model and the
    passed options as fields, so that `LLM(**asdict(args))` works.
    """

    def __get__(self, args: EngineArgs | None, kind: type) -> dict[str, Field[Any]]:
        names = FLAGS if args is None else vars(args)
        base = make_dataclass(
            kind.__name__,
            [(n, Any, field(default_factory=partial(_default_of, n))) for n in names],
        )
        return {option.name: option for option in fields(base)}


class EngineArgs(Namespace):
    """A model and its options, for `LLM.from_engine_args` or `LLM(**asdict(engine_args))`.

    Each option is an attribute that may be set; an option that was not passed has its default.
    Raises ConfigError for an unsupported option, ModelError for a missing model.
    """

    __dataclass_fields__ = _Fields()

    def __init__(self, model: str | Path, **options: Any) -> None:
        read_options(model, options)
        super().__init__(model=model, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The passed options without the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each of vLLM's options to a parser, and return it."""
        return add_flags(parser, FLAGS)

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Return the arguments for parsed flags, which may include other flags."""
        options = {name: getattr(args, name) for name in FLAGS if hasattr(args, name)}
        if options.get("model") is None:
            raise ConfigError(
                "the arguments have no model; allowed: --model, or set_defaults(model=...)"
            )
        return cls(**{n: v for n, v in options.items() if v not in (None, _default_of(n))})

    def __getattr__(self, name: str) -> Any:
        if name in ENGINE or name in _CONFIG:
            return _default_of(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM.from_engine_args`."""

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add flags. async_args_only: only the flags that `EngineArgs` does not have."""
        return add_flags(parser, LOG_FLAGS if async_args_only else FLAGS)


def add_flags(
    parser: ArgumentParser, names: Iterable[str], *, given_only: bool = False
) -> ArgumentParser:
    """Add flags for options (`--max-model-len` for max_model_len) to a parser, and return it.

    given_only: add flags without defaults, so that only passed flags have values. The values of
    repeated list flags are then joined.
    """
    group = parser.add_argument_group("engine")
    table = ENGINE | SERVE
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    for name, flag in flags.items():
        option = table[name]
        help_text = "no effect" if option.state == "ignored" else "see docs/vllm.md"
        if name in _CONFIG:
            help_text = str(_CONFIG[name].metadata["help"]).replace("%", "%%")
        default = argparse.SUPPRESS if given_only else _default_of(name)
        add = partial(group.add_argument, dest=name, default=default, help=help_text)
        option_strings = [flag, *option.short.split()]
        if option.kind == "switch":  # add --no-x, and --disable-x for --enable-x or vice versa
            inverse = flag.replace("--enable-", "--disable-")
            if inverse == flag:
                inverse = flag.replace("--disable-", "--enable-")
            others = {f"--no-{flag.removeprefix('--')}", inverse} - set(flags.values())
            add(*option_strings, action="store_true")
            add(*sorted(others), action="store_false")
            continue
        kind = str if option.kind in ("text", "texts") else read_value
        if option.kind in ("list", "texts"):
            add(*option_strings, type=kind, nargs="+", action="extend" if given_only else "store")
        else:
            add(*option_strings, type=kind)
    return parser


def read_value(text: str) -> Any:
    """Parse a flag's argument: a number, a number with a unit, JSON, or otherwise a string.

    The units k, m, g and t are powers of 1,000; K, M, G and T are powers of 1,024.

    >>> read_value("32k"), read_value("0.9"), read_value("auto")
    (32000, 0.9, 'auto')
    """
    if text in ("", "None"):
        return None
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is not None:
        number, unit, whole, binary = match.groups()
        return int(float(number) * _UNITS[unit]) if unit else int(whole) * _BINARY_UNITS[binary]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class _PromptOptions(TypedDict):
    """Fields of every prompt.

    multi_modal_data: `{"image": image}` or `{"image": [image, ...]}`. multi_modal_uuids: ids of the
    images, in the same form. cache_salt: prompts with different salts share no K/V.
    """

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    cache_salt: NotRequired[str | None]


class TextPrompt(_PromptOptions):
    """A prompt as a string."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids, with or without its text."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
"""A prompt of `LLM.generate`."""


@dataclass(frozen=True)
class ModelView:
    """The model. `model` and `tokenizer` are folders."""

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    seed: int
    is_multimodal_model: bool
    vocab_size: int
    runner_type: str = "generate"
    quantization: None = None

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's configuration in transformers. Raises the errors of transformers."""
        auto_config = load_module("transformers").AutoConfig
        config: PretrainedConfig = auto_config.from_pretrained(self.model, trust_remote_code=False)
        return config

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The part of `hf_config` for the language model."""
        config: PretrainedConfig = self.hf_config.get_text_config()
        return config

    def get_vocab_size(self) -> int:
        """Return the width of the logits."""
        return self.vocab_size


@dataclass(frozen=True)
class CacheView:
    """The pool of KV blocks."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


@dataclass(frozen=True)
class SchedulerView:
    """Limits of a step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool = True


@dataclass(frozen=True)
class SpeculativeView:
    """Drafts: their maximum length, and the most similar method of vLLM."""

    num_speculative_tokens: int
    method: str = "suffix"
    model: None = None


@dataclass(frozen=True)
class ParallelView:
    """Parallelism: one process on one device."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class VllmView:
    """All configurations."""

    model_config: ModelView
    cache_config: CacheView
    scheduler_config: SchedulerView
    parallel_config: ParallelView = field(default_factory=ParallelView)
    speculative_config: SpeculativeView | None = None
    quant_config: None = None
    kv_transfer_config: None = None
    kv_events_config: None = None
    ec_transfer_config: None = None


def view_config(engine: EngineCore, tokenizer: object) -> VllmView:
    """Return the configuration of a loaded engine."""
    config, pool = engine.config, engine.manager.config
    folder = str(engine.model.folder or "")
    return VllmView(
        ModelView(
            folder,
            str(getattr(tokenizer, "name_or_path", "") or folder),
            engine.model.dtype,
            engine.max_model_len,
            config.seed,
            engine.model.takes_images,
            engine.model.vocab_size,
        ),
        CacheView(
            pool.block_size,
            pool.num_blocks,
            config.kv_cache_dtype,
            config.enable_prefix_caching,
        ),
        SchedulerView(config.max_num_batched_tokens, config.max_num_seqs),
        speculative_config=SpeculativeView(config.max_draft) if engine.drafting else None,
    )
