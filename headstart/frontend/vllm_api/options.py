"""From the options of `LLM(...)`, in vLLM's names or ours, to those of the engine and its calls."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_api import earlier, engine_args
from headstart.frontend.vllm_api.rows import Names, accepted, refused, works
from headstart.models.files import find_folder, read_json
from headstart.validation import describe

__all__ = ["ENGINE", "EngineOptions", "read_config", "read_options"]

ENGINE = Names(
    "LLM",
    works(engine_args.WORKS)
    | accepted(engine_args.ACCEPTED)
    | accepted(engine_args.EARLIER)
    | refused(engine_args.REFUSED)
    | accepted(earlier.ENGINE_ACCEPTED)
    | refused(earlier.ENGINE_REFUSED),
    ConfigError,
    own=[field.name for field in fields(EngineConfig)],
)

_NO_FIELDS = (
    *("tokenizer", "generation_config", "override_generation_config", "chat_template"),
    "scheduling_policy",
)
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What of a generation_config.json is sampling, and our names for it; as in vLLM."""


class EngineOptions(NamedTuple):
    """config: fields of `EngineConfig`. tokenizer: its folder, None for the model's own. sampling:
    for calls that bring no parameters. chat_template: for chats that bring none, None for the
    tokenizer's."""

    config: dict[str, Any]
    tokenizer: Path | None
    sampling: SamplingParams
    chat_template: str | None


def read_options(model: str | Path, options: Mapping[str, Any]) -> EngineOptions:
    """The options, sorted. Raises ConfigError for one that cannot be followed; ModelError."""
    given = _read(options)
    changes = given.get("override_generation_config", {})
    return EngineOptions(
        _as_config(given),
        _read_tokenizer(given.get("tokenizer"), model),
        _read_sampling(model, given.get("generation_config", "auto"), changes),
        _read_template(given.get("chat_template")),
    )


def read_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `EngineConfig` that are among the options, before there is a model.

    Raises ConfigError, also for a chat template that cannot be read.
    """
    given = _read(options)
    _read_template(given.get("chat_template"))
    return _as_config(given)


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    given = ENGINE.read(options)
    return {
        name: value for name, value in given.items() if value is not None or name not in ENGINE.rows
    }


def _as_config(given: Mapping[str, Any]) -> dict[str, Any]:
    policy = given.get("scheduling_policy", "fcfs")
    if not isinstance(policy, str) or policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy is {describe(policy)}; allowed: fcfs, priority")
    config = {name: value for name, value in given.items() if name not in _NO_FIELDS}
    for name, convert in _CONVERTED.items():
        if name in config:
            _add_as_ours(config, name, convert(config.pop(name)))
    return config


def _add_as_ours(config: dict[str, Any], name: str, translated: Mapping[str, Any]) -> None:
    """Add the options that vLLM's stands for. Raises ConfigError if ours has another value."""
    for ours, value in translated.items():
        given = config.get(ours, _DEFAULTS[ours])
        if given not in (None, _DEFAULTS[ours], value):
            raise ConfigError(
                f"{ours} is {describe(given)}, and {describe(value)} by {name}; allowed: one of "
                "the two"
            )
        config[ours] = value


def _read_tokenizer(given: object, model: str | Path) -> Path | None:
    """The folder of a tokenizer; None where it is the model that is named, or nothing."""
    if given is None or (isinstance(given, str | Path) and str(given) == str(model)):
        return None
    if isinstance(given, str | Path) and str(given):
        try:
            folder = Path(given).expanduser()
            if folder.is_dir():
                return folder
        except (OSError, RuntimeError, ValueError):
            pass  # no name that a folder can have
    raise ConfigError(f"tokenizer is {describe(given)}; allowed: the path of a folder with one")


def _read_dtype(dtype: object) -> dict[str, Any]:
    """vLLM takes torch's dtypes, and two more names."""
    if not isinstance(dtype, str) and type(dtype).__name__ != "dtype":
        return {"dtype": dtype}  # which the engine refuses
    name = str(dtype).removeprefix("torch.")
    return {"dtype": {"half": "float16", "float": "float32"}.get(name, name)}


def _read_device(device: object) -> dict[str, Any]:
    return {} if isinstance(device, str) and device == "auto" else {"device": device}


def _read_length(length: object) -> dict[str, Any]:
    is_auto = isinstance(length, int | str) and length in (-1, "auto")
    return {} if is_auto else {"max_model_len": length}


def _read_limits(limits: object) -> dict[str, Any]:
    """`{"image": 4}`, or `{"image": {"count": 4, ...}}`; other kinds are refused in prompts."""
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'limit_mm_per_prompt is {describe(limits)}; allowed: a dict such as {{"image": 4}}'
        )
    images = limits.get("image")
    count = images.get("count") if isinstance(images, Mapping) else images
    return {} if count is None else {"max_images": count}


_CONVERTED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "dtype": _read_dtype,
    "device": _read_device,
    "max_model_len": _read_length,
    "limit_mm_per_prompt": _read_limits,
    "kv_cache_memory_bytes": lambda size: {"kv_cache_memory": size},
    "num_gpu_blocks_override": lambda count: {"num_blocks": count},
}


def _read_sampling(model: str | Path, source: object, changes: object) -> SamplingParams:
    """The sampling that a model's generation_config.json asks for, with changes."""
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(
            f'generation_config is {describe(source)}; allowed: "auto", "vllm" or a folder'
        )
    if not isinstance(changes, Mapping):
        raise ConfigError(f"override_generation_config is {describe(changes)}; allowed: a dict")
    found: dict[str, Any] = {}
    if source != "vllm":
        path = find_folder(model if source == "auto" else source) / "generation_config.json"
        if path.is_file():
            found = read_json(path)
        elif source != "auto":
            raise ConfigError(f"generation_config is {describe(source)}; there is no {path}")
    found |= changes
    chosen = {
        ours: found[name] for name, ours in _GENERATION.items() if found.get(name) is not None
    }
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error


def _read_template(given: object) -> str | None:
    """A template, or the text of the file that it names."""
    if given is None:
        return None
    if not isinstance(given, str | Path) or not str(given):
        raise ConfigError(f"chat_template is {describe(given)}; allowed: a template or a file")
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"chat_template is {describe(given)}, no template, and no file: {error}"
        ) from error
