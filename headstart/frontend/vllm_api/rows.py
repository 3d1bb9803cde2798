"""A table of names, and what becomes of each: the code decides by it, and `docs/vllm.md` shows it.

works      the name does here what it does in vLLM
accepted   any value is taken, and there is nothing to do
refused    only values that ask for nothing are taken; the note says what to do instead
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from typing import Any, NamedTuple

from headstart.errors import HeadstartError, RequestError
from headstart.validation import describe

__all__ = [
    "FixedError",
    "Flags",
    "JsonNames",
    "MissingImportError",
    "MissingModuleError",
    "MissingNameError",
    "Names",
    "Row",
    "UncopiedError",
    "Verdict",
    "accepted",
    "nearest",
    "refused",
    "works",
]


# Names that transformers, llama.cpp, Ollama and vLLM have for what is here, too.
_SYNONYMS = {
    "torch_dtype": "dtype",
    "quantization": "weights",
    "load_in_8bit": "weights",
    "load_in_4bit": "weights",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "n_ctx": "max_model_len",
    "num_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "n_threads": "num_threads",
    "num_thread": "num_threads",
    "threads": "num_threads",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
_WORD = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")
_FEW = 10  # names that an error tells all of
_LONGEST = 100  # of names that any is compared with: it takes a time that grows with both
_ALIKE, _CLASSES_ALIKE, _WORDS_ALIKE = 0.8, 0.65, 0.6  # of `SequenceMatcher`, for a slip


class Verdict(Enum):
    """What becomes of a name."""

    WORKS = "works"
    ACCEPTED = "accepted, nothing to do here"
    REFUSED = "refused"


class Row(NamedTuple):
    """A name's verdict and what there is to say of it; `allowed` values are not refused."""

    verdict: Verdict
    note: str = ""
    allowed: tuple[Any, ...] = ()


class MissingNameError(RequestError, AttributeError):
    """An attribute that is not here; `hasattr` says False."""


class FixedError(RequestError, AttributeError):
    """An attribute that cannot be changed."""


class UncopiedError(RequestError, TypeError):
    """An object that belongs to one process and is neither copied nor pickled."""


class MissingImportError(HeadstartError, ImportError):
    """A name that a module of ours does not have; `except ImportError` catches it."""


class MissingModuleError(MissingImportError, ModuleNotFoundError):
    """A module that vLLM's package has and ours has not."""


def works(rows: Mapping[str, str]) -> dict[str, Row]:
    """Rows of names that work, each with its note."""
    return {name: Row(Verdict.WORKS, note) for name, note in rows.items()}


def accepted(rows: Mapping[str, Sequence[str]]) -> dict[str, Row]:
    """Rows of names that need nothing, by the reason."""
    return {name: Row(Verdict.ACCEPTED, note) for note, names in rows.items() for name in names}


def refused(rows: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, Row]:
    """Rows of names that are refused, by what to do instead; None is always allowed."""
    return {
        name: Row(Verdict.REFUSED, note, allowed)
        for note, names in rows.items()
        for name, allowed in names.items()
    }


class Names:
    """The names that something takes: rows of vLLM's, and `own` ones that vLLM does not have."""

    def __init__(
        self,
        owner: str,
        rows: Mapping[str, Row],
        error: type[HeadstartError],
        own: Iterable[str] = (),
    ) -> None:
        self.owner = owner
        self.rows = rows
        self._error = error
        self.own = frozenset(own)

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values that count. Raises the error of this table for a name or value that cannot."""
        return {name: value for name, value in given.items() if self._counts(name, value)}

    def _counts(self, name: str, value: object) -> bool:
        row = self.rows.get(name)
        if name in self.own or (row is not None and row.verdict is Verdict.WORKS):
            return True
        if row is None:
            raise self._error(self.unknown(name))
        if row.verdict is Verdict.ACCEPTED or value is None or _is_in(value, row.allowed):
            return False
        told, allowed = self._describe(value), self._allowed(row)
        raise self._error(f"{self.spell(name)} is {told}; allowed: {allowed}; {row.note}")

    def spell(self, name: str) -> str:
        """A name as it is told."""
        return name

    def show(self, value: object) -> str:
        """A value that is allowed, as it is told."""
        return repr(value)

    def _describe(self, value: object) -> str:
        return describe(value)

    def _allowed(self, row: Row) -> str:
        return ", ".join(dict.fromkeys(map(self.show, (None, *row.allowed))))

    def knows(self, name: str) -> bool:
        """Whether there is such a name, whatever becomes of it."""
        return name in self.own or name in self.rows

    def missing_import(self, name: str) -> MissingImportError:
        """The error for an import of a name that is not there."""
        row = self.rows.get(name)
        why = f": {row.note}" if row is not None else self.hint(name)
        return MissingImportError(
            f"cannot import name {name!r} from {self.owner!r}{why}", name=self.owner
        )

    def missing(self, name: str, has: Iterable[str] = ()) -> MissingNameError:
        """The error for an attribute that is not there.

        has: names that are there, besides those of the table; private ones do not count.
        """
        row = self.rows.get(name)
        if row is None:
            return MissingNameError(self.unknown(name, has))
        return MissingNameError(f"{self.owner} has no {name}: {row.note}")

    def unknown(self, name: str, has: Iterable[str] = ()) -> str:
        """What to say of a name that there is not; `has` as for `missing`."""
        return f"{self.owner} knows no {self.spell(name)!r}{self.hint(name, has)}"

    def hint(self, name: str, has: Iterable[str] = ()) -> str:
        """What to say of a name that is meant, or of all if they are few; empty otherwise."""
        # copy and pickle ask for the former, for each request's parameters
        if name.startswith("__") or len(name) > _LONGEST:
            return ""
        own = {*self.own, *(one for one in has if not one.startswith("_"))}
        near = nearest(name, [*own, *self.rows])
        row = self.rows.get(near) if near is not None and near not in own else None
        if row is not None and row.verdict is Verdict.REFUSED:
            return f", and refuses {self.spell(str(near))}: {row.note}"
        if near is not None:
            return f"; the nearest is {self.spell(near)}"
        there = [one for one, row in self.rows.items() if row.verdict is not Verdict.REFUSED]
        there += sorted(own - self.rows.keys())
        return f"; it has {', '.join(map(self.spell, there))}" if 0 < len(there) <= _FEW else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that is written like this one but for a slip; None if there is none.

    A name that another program has for the same is one, too. Names of as many words are compared
    word by word: lora_config is no slip for load_config.
    """
    spelled = {one.lower(): one for one in known}
    plain = {one.lstrip("-").replace("-", "_"): one for one in spelled}
    meant = _SYNONYMS.get(name.lstrip("-").replace("-", "_").lower())
    if meant in plain:
        return spelled[plain[meant]]
    if swapped := _swap(name.lower()) & spelled.keys():
        return spelled[min(swapped)]
    alike = _CLASSES_ALIKE if name[:1].isupper() else _ALIKE
    for near in get_close_matches(name.lower(), spelled, 3, alike):
        mine, theirs = _WORD.findall(name), _WORD.findall(spelled[near])
        if len(mine) != len(theirs) or all(map(_is_alike, mine, theirs)):
            return spelled[near]
    return None


class Flags(Names):
    """Names as flags of a command line, where a value that is not given is no value."""

    def spell(self, name: str) -> str:
        """`max_model_len` as `--max-model-len`, and `h` as `-h`."""
        return f"{'-' if len(name) == 1 else '--'}{name.replace('_', '-')}"

    def show(self, value: object) -> str:
        """A value as it is typed; a switch is on or off."""
        if isinstance(value, bool):
            return "on" if value else "off"
        return value if isinstance(value, str) else json.dumps(value, default=list)  # of a set

    def _describe(self, value: object) -> str:
        return self.show(value) if isinstance(value, bool) else describe(value)

    def _allowed(self, row: Row) -> str:
        return ", ".join(dict.fromkeys(filter(None, map(self.show, row.allowed)))) or "none"


class JsonNames(Names):
    """Names of JSON's objects, whose values are told as JSON spells them."""

    def show(self, value: object) -> str:
        """A value that is allowed, in JSON."""
        return json.dumps(value)

    def _describe(self, value: object) -> str:
        """A value, but for what may be a prompt's text, which belongs into no line of a log."""
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, int | float):
            return describe(value)
        return "a text" if isinstance(value, str) else "a list or an object"


def _swap(name: str) -> set[str]:
    """The name with any two neighbouring letters exchanged: in a short one `_ALIKE` misses that."""
    return {name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1)} - {
        name
    }


def _is_alike(word: str, other: str) -> bool:
    return SequenceMatcher(None, word.lower(), other.lower()).ratio() >= _WORDS_ALIKE


def _is_in(value: object, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, by its type too: False is not 0."""
    return any(type(value) is type(one) and value == one for one in allowed) or (
        isinstance(value, float) and value in [one for one in allowed if type(one) is int]
    )
