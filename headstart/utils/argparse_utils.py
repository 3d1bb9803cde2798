"""The names of `vllm.utils.argparse_utils`."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from headstart.vllm_imports import find_names

__all__ = ["FlexibleArgumentParser"]

__getattr__ = find_names(__name__, __all__)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--max_model_len` and `--max-model-len` alike.

    >>> parser = FlexibleArgumentParser()
    >>> _ = parser.add_argument("--max-model-len", type=int)
    >>> parser.parse_args(["--max_model_len=8"]).max_model_len
    8
    """

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As of any parser, which `parse_args` asks as well."""
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._known_spellings(given), namespace)

    def _known_spellings(self, given: Sequence[str]) -> list[str]:
        """Each flag as it was added, where it differs from that in dashes alone."""
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        stop = given.index("--") if "--" in given else len(given)  # no flags from there on
        found = []
        for one in given[:stop]:
            name, equals, value = one.partition("=")
            if name.startswith("--"):
                dashed = name.replace("_", "-")
                name = flags.get(dashed, dashed)
            found.append(name + equals + value)
        return [*found, *given[stop:]]
