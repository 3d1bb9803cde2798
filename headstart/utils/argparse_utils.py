"""The names of `vllm.utils.argparse_utils`."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["FlexibleArgumentParser"]

_LEVEL = re.compile(r"-O=?([^.=]+)")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--max_model_len` and `--max-model-len` alike.

    A key of a flag whose value is JSON may be given alone, a list's items with a plus, and `-O3`
    is `--optimization-level 3`.

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
        """As of any parser, which `parse_args` asks as well."""
        given = list(sys.argv[1:] if args is None else args)
        stop = given.index("--") if "--" in given else len(given)  # no flags from there on
        flags = self._join_keys(self._known_spellings(given[:stop]))
        return super().parse_known_args([*flags, *given[stop:]], namespace)

    def _known_spellings(self, given: Sequence[str]) -> list[str]:
        """Each flag as it was added, where it differs from that in dashes alone."""
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        found = []
        for one in given:
            name, equals, value = one.partition("=")
            flag, dot, keys = name.partition(".")
            if flag.startswith("--"):
                dashed = flag.replace("_", "-")
                flag = flags.get(dashed, dashed)
            elif (level := _LEVEL.fullmatch(one)) and "--optimization-level" in flags:
                flag, equals, value = "--optimization-level", "=", level[1]
            elif one == "-O" and "--optimization-level" in flags:
                flag = "--optimization-level"
            found.append(flag + dot + keys + equals + value)
        return found

    def _join_keys(self, given: Sequence[str]) -> list[str]:
        """`--flag.one.two 3` as `--flag '{"one": {"two": 3}}'`: one dict for all keys of a flag."""
        found: list[str] = []
        dicts: dict[str, dict[str, Any]] = {}
        rest = iter(given)
        for one in rest:
            name, equals, value = one.partition("=")
            flag, dot, keys = name.partition(".")
            if not dot or flag not in self._option_string_actions:
                found.append(one)
                continue
            if not equals:
                value = next(rest, "--")
                if value.startswith("--") or value in self._option_string_actions:
                    self.error(f"argument {name}: expected one argument")
            _put(dicts.setdefault(flag, {}), keys, value)
        for flag, keyed in dicts.items():
            found += [flag, json.dumps(keyed)]
        return found


def _put(into: dict[str, Any], keys: str, text: str) -> None:
    """Set what `a.b.c` stands for to a value of JSON, or a text; with `+` add to a list."""
    *way, last = keys.removesuffix("+").split(".")
    for key in way:
        inner = into.setdefault(key, {})
        into = inner if isinstance(inner, dict) else into
    if keys.endswith("+"):
        before = into.get(last)
        into[last] = [*(before if isinstance(before, list) else ()), *text.split(",")]
        return
    try:
        into[last] = json.loads(text)
    except (ValueError, RecursionError):
        into[last] = text
