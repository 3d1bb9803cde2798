"""The file of `headstart serve --config`: flags in YAML, as `vllm serve` reads them.

A value stands behind its flag's name and a "=", so none is taken for another flag, or the model.
What is wrong is told by its place, and not in the file's own words: one of them may be a key.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from headstart.errors import ConfigError
from headstart.imports import load_module
from headstart.validation import describe, shorten

__all__ = ["Entry", "Kinds", "read_file"]

_NAME = re.compile(r"\w[\w-]*(\.[\w.-]+)?")
_MOST_VALUES = 10_000
_PLAIN = re.compile(r"""([^'"]|'(<[a-z ]*>|.)')*""")
"""A parser's message that quotes one character at the most."""


class Kinds(NamedTuple):
    """Which flags have no value, which may be given several times, and whose values are texts."""

    switches: Collection[str]
    lists: Collection[str]
    texts: Collection[str]


class Entry(NamedTuple):
    """A flag in a file, without the keys behind a dot, and the arguments that it stands for."""

    name: str
    arguments: list[str]


def read_file(path: str, kinds: Kinds) -> list[Entry]:
    """The flags of a file; names have underscores, as those of `kinds`. Raises ConfigError."""
    yaml = load_module("yaml")
    try:
        text = Path(path).expanduser().read_text("utf-8")
        content, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
        if not isinstance(content, dict):
            raise _FileError("it is no mapping of flags")
        _check_size(content)
        return [
            _read_entry(number, name, value, written.get(name, value), kinds)
            for number, (name, value) in enumerate(content.items(), 1)
        ]
    except Exception as error:  # the library's own errors derive from Exception alone
        raise ConfigError(f"--config is {describe(path)}; {_reason(error)}") from None


def _check_size(content: Any) -> None:
    """Raise _FileError for aliases within themselves, or such as stand for many others."""
    pending = [content]
    for _ in range(_MOST_VALUES):
        if not pending:
            return
        part = pending.pop()
        pending += part.values() if isinstance(part, dict) else ()
        pending += part if isinstance(part, list) else ()
    raise _FileError(f"it has more than {_MOST_VALUES:,} values, its aliases written out")


class _FileError(Exception):
    """Something is wrong with a file's content, and the text says it without quoting."""


def _reason(error: Exception) -> str:
    if isinstance(error, OSError | RuntimeError | UnicodeDecodeError | _FileError):
        return shorten(str(error))
    problem, mark = (getattr(error, name, None) for name in ("problem", "problem_mark"))
    told = problem if problem and _PLAIN.fullmatch(problem) else "it cannot be read as YAML"
    return told if mark is None else f"line {mark.line + 1}: {told}"


def _read_entry(number: int, name: object, value: Any, written: Any, kinds: Kinds) -> Entry:
    """written: the value as the file has it, where numbers and dates are texts."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _FileError(f"entry {number} in it has no name of a flag, such as max-model-len")
    flag, dot, _ = name.partition(".")
    flag = flag.replace("-", "_")
    if flag == "config":
        raise _FileError("it names another file; allowed: one")
    if value is None:
        return Entry(flag, [])
    if dot:
        return Entry(flag, [f"--{name}={json.dumps(value, default=str)}"])
    if isinstance(value, bool) and flag in kinds.switches:
        return Entry(flag, [f"--{name}" if value else f"--no-{name}"])
    if not isinstance(value, list) or flag not in kinds.lists:
        value, written = [value], [written]
    if None in value:
        raise _FileError(f"an item of {name} in it has no value")
    if flag in kinds.texts:
        as_written = zip(value, written, strict=True)
        value = [one if isinstance(one, dict | list) else str(text) for one, text in as_written]
    return Entry(flag, [f"--{name}={_spell(one)}" for one in value])


def _spell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
