"""Counterpart of `vllm.utils.argparse_utils`, for programs written for vLLM."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_LEVEL = re.compile(r"-O=?([^.=]+)")

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts both `--max_model_len` and `--max-model-len`.

    If a flag's value is JSON, `--flag.key 3` sets a single key, and `--flag.list+ 3` adds an item
    to a list. `-O3` is `--optimization-level 3`.

    >>> parser = FlexibleArgumentParser()
    >>> _ = parser.add_argument("--max-model-len", type=int)
    >>> _ = parser.add_argument("--hf-overrides")
    >>> parser.parse_args(["--max_model_len=8"]).max_model_len
    8
    >>> parser.parse_args(["--hf-overrides.rope.factor", "2"]).hf_overrides
    '{"rope": {"factor": 2}}'
    """

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; `parse_args` calls this method too."""
        arguments = list(sys.argv[1:] if args is None else args)
        stop = arguments.index("--") if "--" in arguments else len(arguments)  # no flags after "--"
        flags = self._join_keys(map(self._normalize_flag, arguments[:stop]))
        return super().parse_known_args([*flags, *arguments[stop:]], namespace)

    def _normalize_flag(self, argument: str) -> str:
        """Return an argument with its flag spelled as in the call of `add_argument`."""
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        name, equals, value = argument.partition("=")
        flag, dot, keys = name.partition(".")
        if flag.startswith("--"):
            dashed = flag.replace("_", "-")
            flag = flags.get(dashed, dashed)
        elif (level := _LEVEL.fullmatch(argument)) and "--optimization-level" in flags:
            flag, equals, value = "--optimization-level", "=", level[1]
        elif argument == "-O" and "--optimization-level" in flags:
            flag = "--optimization-level"
        return flag + dot + keys + equals + value

    def _join_keys(self, arguments: Iterator[str]) -> list[str]:
        """Join `--flag.one 3 --flag.two 4` into `--flag '{"one": 3, "two": 4}'`."""
        joined: list[str] = []
        dicts: dict[str, dict[str, Any]] = {}
        for argument in arguments:
            name, equals, value = argument.partition("=")
            flag, dot, keys = name.partition(".")
            if not dot or flag not in self._option_string_actions:
                joined.append(argument)
                continue
            if not equals:
                value = next(arguments, "--")
                if value.startswith("--") or value in self._option_string_actions:
                    self.error(f"argument {name}: expected one argument")
            _put(dicts.setdefault(flag, {}), keys, value)
        for flag, keyed in dicts.items():
            joined += [flag, json.dumps(keyed)]
        return joined


def _put(target: dict[str, Any], keys: str, text: str) -> None:
    """Set the entry `a.b.c` to a JSON value or a string. With a `+` at the end, extend a list."""
    *path, last = keys.removesuffix("+").split(".")
    for key in path:
        inner = target.setdefault(key, {})
        target = inner if isinstance(inner, dict) else target
    if keys.endswith("+"):
        old_value = target.get(last)
        target[last] = [*(old_value if isinstance(old_value, list) else ()), *text.split(",")]
        return
    try:
        target[last] = json.loads(text)
    except (ValueError, RecursionError):
        target[last] = text
