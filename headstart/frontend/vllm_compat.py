"""vLLM's engine options and server flags, and the options of headstart that they stand for.

`assets/vllm_options.txt` is the table of vLLM's names; docs/vllm.md explains them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.models.files import find_folder, read_json
from headstart.validation import NOT_AN_OPTION, describe


class Option(NamedTuple):
    """A name of vLLM's.

    state: "works", "ignored" (any value, without effect) or "absent" (must be None or one of
    `values`, of which the first is the default). kind: of the flag's argument: "value", "text",
    "switch", "list" of values or "texts". short: a further flag, or "".
    """

    state: str
    kind: str
    short: str
    values: list[Any]


def _read_table() -> tuple[dict[str, Option], dict[str, Option]]:
    """Return vLLM's options of an engine and those of its server."""
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
"""vLLM's options of an engine and of its server; for flags of a server the latter come first."""

_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling parameters that are read from a generation_config.json, as in vLLM."""


class EngineOptions(NamedTuple):
    """Options of an engine and its calls.

    config: fields of `EngineConfig`. tokenizer: its folder, None for the model's own. sampling:
    for calls without parameters. chat_template: for chats without one, None for the tokenizer's.
    """

    config: dict[str, Any]
    tokenizer: Path | None
    sampling: SamplingParams
    chat_template: str | None


def read_options(model: str | Path, options: Mapping[str, Any]) -> EngineOptions:
    """Sort the options of `LLM(...)`. Raises ConfigError, ModelError."""
    options = _read(options)
    source = options.get("generation_config", "auto")
    return EngineOptions(
        _as_config(options),
        _read_tokenizer(options.get("tokenizer"), model),
        _read_sampling(model, source, options.get("override_generation_config", {})),
        _read_template(options.get("chat_template")),
    )


def read_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` among the options, before there is a model.

    Raises ConfigError, also for a chat template that cannot be read.
    """
    options = _read(options)
    _read_template(options.get("chat_template"))
    return _as_config(options)


def read_names(
    options: Mapping[str, Any], table: Mapping[str, Option], spell: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the values of names that work. Raises ConfigError for an option that is not here."""
    read = {}
    for name, value in options.items():
        state, *_, values = table.get(name, ("unknown", ()))
        allowed = [None, *values] if state == "absent" else []
        plain = list(value) if isinstance(value, (set, frozenset, tuple)) else value
        if state == "works":
            read[name] = value
        elif state != "ignored" and not any(
            plain == other and isinstance(plain, bool) == isinstance(other, bool)
            for other in allowed
        ):
            raise ConfigError(f"{spell(name)} is {describe(value)}; {NOT_AN_OPTION}")
    return read


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    own = dict.fromkeys(_DEFAULTS, Option("works", "value", "", []))
    read = read_names(options, ENGINE | own)
    return {name: value for name, value in read.items() if value is not None or name not in ENGINE}


_ALIASES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "limit_mm_per_prompt": "max_images",
}
"""Fields of `EngineConfig` by vLLM's names for them."""


def _as_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` with the values of vLLM's options."""
    policy = options.get("scheduling_policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy is {describe(policy)}; allowed: fcfs, priority")
    config = {name: value for name, value in options.items() if name in _DEFAULTS}
    dtype = config.get("dtype")
    if type(dtype).__name__ in ("str", "dtype"):  # torch's dtypes, and vLLM's two further names
        name = str(dtype).removeprefix("torch.")
        config["dtype"] = {"half": "float16", "float": "float32"}.get(name, name)
    for name, values in (("device", ["auto"]), ("max_model_len", [-1, "auto"])):
        if config.get(name) in values:
            del config[name]
    for name, field_name in _ALIASES.items():
        value = options.get(name)
        if name == "limit_mm_per_prompt":
            value = _count_images(value)
        if value is None:
            continue
        other = config.get(field_name, _DEFAULTS[field_name])
        if other not in (None, _DEFAULTS[field_name], value):
            raise ConfigError(
                f"{field_name} is {describe(other)}, and {describe(value)} by {name}; allowed: one "
                "of the two"
            )
        config[field_name] = value
    return config


def _count_images(limits: object) -> Any:
    """Read `{"image": 4}` or `{"image": {"count": 4}}`; prompts have no other media."""
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'limit_mm_per_prompt is {describe(limits)}; allowed: a dict such as {{"image": 4}}'
        )
    images = limits.get("image")
    return images.get("count") if isinstance(images, Mapping) else images


def _read_tokenizer(path: object, model: str | Path) -> Path | None:
    """Return the folder of a tokenizer, None for the model's own. Raises ConfigError."""
    if path is None or str(path) == str(model):
        return None
    if isinstance(path, str | Path) and str(path) and Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    raise ConfigError(f"tokenizer is {describe(path)}; allowed: the path of a folder with one")


def _read_sampling(model: str | Path, source: object, changes: object) -> SamplingParams:
    """Return the sampling of a model's generation_config.json, with changes."""
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
            raise ConfigError(f"generation_config is {describe(source)}; there is no {path}")
    config |= changes
    config["max_tokens"] = config.get("max_new_tokens")
    sampling = {name: config[name] for name in _GENERATION if config.get(name) is not None}
    try:
        return SamplingParams(**sampling)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error


def _read_template(source: object) -> str | None:
    """Return a template, or the text of the file with this path. Raises ConfigError."""
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
            f"chat_template is {describe(source)}, no template, and no file: {error}"
        ) from error
