"""Grammars over tokens: compiled when a request is prepared, followed token by token in a step.

llguidance does both: it reads JSON schemas, regular expressions and context-free grammars, and
returns the tokens that may come next. Compiling takes milliseconds as a rule and seconds at worst,
once for a form: in the thread that prepares a request, never in a step. Each answer then has its
own copy of the compiled matcher, which takes microseconds.

Two kinds of schemas are refused, since llguidance would follow them without an end. It makes a
state for each remainder of a `multipleOf` when a mask is computed, and cannot be stopped: 100,003
take a second, 982,451,653 would take hours. A schema whose every value contains itself, such as
`{"$ref": "#"}` as a required property, would have an answer open objects until `max_tokens`."""

from __future__ import annotations

import functools
import json
import random
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from math import lcm
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import numpy as np
import torch

from headstart.engine.logits import Failures, Rows, TokenMask, Vocabulary
from headstart.engine.structured_outputs import Form, write_tags
from headstart.errors import NoTokenError, RequestError
from headstart.imports import install
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "GrammarCompiler",
    "GrammarMask",
    "MAX_REMAINDERS",
    "NAMES_SPECIAL",
    "check_form",
    "check_multiples",
    "check_recursion",
    "schemas_in",
]


MAX_REMAINDERS = 2**16
_MAX_EXPONENT = 12  # of ten
_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar; a schema follows
_READER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
_MAX_PASSES = 64  # over the references of a schema
_INDEX = re.compile("0|[1-9][0-9]{0,9}")
_Place = tuple[str, ...]  # the steps of a JSON pointer


def check_multiples(schemas: Sequence[Any], *, together: bool = False) -> None:
    """Raise ValueError for schemas whose numbers have too many remainders.

    together: a number may have to be a multiple of all.
    """
    together = together or any("allOf" in part or "$ref" in part for part in _objects_in(schemas))
    most = 1
    for value in _multiples(schemas):
        count = _remainders(value)
        most = lcm(most, count) if together else count
        if most > MAX_REMAINDERS:
            raise ValueError(
                f'"multipleOf" is {value}{", with others beside it" if count != most else ""}; '
                f"allowed: up to {MAX_REMAINDERS:,}, the decimal point left out"
            )


def schemas_in(kind: str, text: str) -> list[Any]:
    """Return the JSON schemas of a form, with exact numbers; a grammar has them behind `%json`.

    What cannot be read is left out: llguidance refuses it.
    """
    with suppress(ValueError, RecursionError):
        if kind == "json":
            return [_READER.decode(text)]
        if kind == "structural_tag":
            return [tag[-2] for tag in _READER.decode(text)]
    schemas = []
    for found in _SCHEMA.finditer(text) if kind == "grammar" else ():
        with suppress(ValueError, RecursionError):
            schemas.append(_READER.raw_decode(text, found.end())[0])
    return schemas


def _multiples(schema: Any) -> Iterator[Decimal]:
    for part in _objects_in(schema):
        found = part.get("multipleOf")
        if isinstance(found, Decimal) and found.is_finite() and found > 0:
            yield found


def _objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
        pending += part.values() if isinstance(part, dict) else ()
        pending += part if isinstance(part, list) else ()


def _remainders(value: Decimal) -> int:
    """The number without its decimal point, as an integer; more than are allowed if it is huge."""
    _, digits, exponent = value.normalize().as_tuple()
    if not isinstance(exponent, int) or exponent > _MAX_EXPONENT or len(digits) > _MAX_EXPONENT:
        return MAX_REMAINDERS + 1
    return int("".join(map(str, digits)) + "0" * exponent)


def check_recursion(schema: Any) -> None:
    """Raise ValueError for a schema that no finite value satisfies, since its references recur.

    The least fixed point: a reference can end if what it refers to can end without it. A schema
    that is not understood can end; llguidance may still refuse it. Numbers are decimal ones.
    """
    references = dict(_references(schema))
    ending: set[_Place] = set()
    order = list(references)[::-1]  # definitions mostly refer to later ones
    with suppress(RecursionError):  # too deep, which llguidance refuses
        for _ in range(_MAX_PASSES):
            found = [one for one in order if _can_end(references[one], schema, ending, one)]
            if not found:
                break
            order = [one for one in order if one not in ending]
        else:
            return
        if not _can_end(schema, schema, ending):
            raise ValueError('"$ref" recurs and can never end')


def _references(schema: Any) -> Iterator[tuple[_Place, Any]]:
    for part in _objects_in(schema):
        yield from _resolve(part.get("$ref"), schema)


def _resolve(pointer: Any, root: Any) -> list[tuple[_Place, Any]]:
    """Return the place that a reference points to and the schema there, alone in a list.

    The list is empty for a reference that points nowhere in `root`.
    """
    if not isinstance(pointer, str) or not f"{pointer}/".startswith("#/"):
        return []
    place, part = [], root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and not _INDEX.fullmatch(name):
            return []
        try:
            part = part[int(name) if isinstance(part, list) else name]
        except (LookupError, TypeError):
            return []
        place.append(name)
    return [(tuple(place), part)]


def _can_end(schema: Any, root: Any, ending: set[_Place], place: _Place = ()) -> bool:
    """Return True if a schema has a finite value, and then add its place to `ending`."""
    if not _ends(schema, root, ending):
        return False
    ending.add(place)
    return True


def _ends(schema: Any, root: Any, ending: Collection[_Place]) -> bool:
    if not isinstance(schema, dict):
        return True
    if any(place not in ending for place, _ in _resolve(schema.get("$ref"), root)):
        return False
    if not all(_ends(part, root, ending) for part in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _list(schema, name)
        if parts and not any(_ends(part, root, ending) for part in parts):
            return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return any(
        _object_ends(schema, root, ending)
        if kind == "object"
        else _array_ends(schema, root, ending)
        if kind == "array"
        else True
        for kind in types
    )


def _object_ends(schema: dict[str, Any], root: Any, ending: Collection[_Place]) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    named = (properties.get(name) for name in _list(schema, "required") if isinstance(name, str))
    return all(_ends(part, root, ending) for part in named)


def _array_ends(schema: dict[str, Any], root: Any, ending: Collection[_Place]) -> bool:
    least = schema.get("minItems")
    first = _list(schema, "prefixItems") or _list(schema, "items")
    least = int(min(least, Decimal(len(first) + 1))) if isinstance(least, Decimal) else 0
    rest = [schema.get("items")] if least > len(first) else []
    return all(_ends(part, root, ending) for part in [*first[:least], *rest])


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


Found = TypeVar("Found")

NAMES_SPECIAL = ("grammar", "structural_tag")
"""Kinds of forms in which special tokens may stand."""
MAX_ITEMS_IN_ROW = 4_100
"""Rules that may apply at one place of an answer; an optional property of an object has 4."""
_SETTING_STACK = threading.Lock()
_REMEMBERED = 64  # compiled forms
_TRIED = 32  # tokens of an answer, before a form is taken
_LARK_START = re.compile(r"^\s*[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)  # and not GBNF's ::=
_STACK = 512 * 2**20  # bytes, of address space alone until they are used


class TokenMasks:
    """The tokens of one model as llguidance has them, and its threads.

    A mask is `num_bytes` bytes with one bit for each token, the lowest first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> None:
        library = _library()
        size = max(vocabulary.size, len(tokenizer))
        self.end_ids = sorted(one for one in vocabulary.eos_token_ids if one < size)
        """Tokens that end an answer."""
        self.tokenizer: LLTokenizer = library.hf.from_tokenizer(
            tokenizer, size, eos_token=self.end_ids or None
        )
        self.executor: LLExecutor = library.LLExecutor(torch.get_num_threads())
        self.num_bytes = (size + 31) // 32 * 4
        self.end_bit: int = self.tokenizer.eos_tokens[0]
        """The token whose bit says that the answer may end here."""
        special = [i for i in range(size) if self.tokenizer.is_special_token(i)]
        self.ends = self.pack(self.end_ids)
        self.special = self.pack(special)
        """A mask of the tokens that spell no text."""
        self.special_ids = {
            text: token_id
            for text, token_id in tokenizer.get_added_vocab().items()
            if text and self.tokenizer.is_special_token(token_id)
        }

    def pack(self, token_ids: Iterable[int]) -> np.ndarray:
        """A mask of these tokens; those outside the vocabulary are left out."""
        bits = np.zeros(self.num_bytes * 8, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
        return np.packbits(bits, bitorder="little")

    def compute(self, matchers: list[LLMatcher]) -> np.ndarray:
        """The next mask of each matcher, uint8 `[matchers, num_bytes]`."""
        masks = np.empty((len(matchers), self.num_bytes), dtype=np.uint8)
        numbered = [(matcher, at) for at, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(
            numbered, masks.ctypes.data, self.num_bytes, len(matchers)
        )
        return masks


class GrammarCompiler:
    """Matchers for one model's tokens. May be used from several threads.

    What is compiled twice at the same time is compiled twice: no thread waits for a lock that an
    interrupted one may have left closed. The vocabulary is read for the first structured request,
    which takes a second for 100,000 tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks = functools.cache(self._read_vocabulary)
        self._compiled = functools.lru_cache(_REMEMBERED)(self._compile)

    @property
    def masks(self) -> TokenMasks:
        """The model's tokens. Raises RequestError."""
        return self._masks()

    def matcher(self, form: Form) -> LLMatcher:
        """A matcher at the beginning of a form. Raises RequestError."""
        return self._compiled(form).deep_copy()

    def _read_vocabulary(self) -> TokenMasks:
        tokenizer = self._vocabulary.tokenizer
        if tokenizer is None:
            raise RequestError("the model came without a tokenizer: structured_outputs needs one")
        try:
            return TokenMasks(tokenizer, self._vocabulary)
        except ImportError as error:
            raise _not_installed() from error
        except Exception as error:  # whatever llguidance says of a tokenizer that it cannot read
            raise RequestError(
                f"structured_outputs cannot use the model's tokenizer: {explain(error)}"
            ) from error

    def _compile(self, form: Form) -> LLMatcher:
        """A matcher that has followed an answer's beginning: its first masks take the longest."""
        masks = self.masks
        if form.kind not in NAMES_SPECIAL:
            _refuse_special(form, masks)
        found = _with_deep_stack(lambda: _build(form, masks))
        if isinstance(found, RequestError):
            raise found
        if isinstance(found, Exception) or found.is_error():
            raise _refusal(form, _why(found))
        return found


def _library() -> Any:
    import llguidance
    import llguidance.hf

    return llguidance


def check_form(form: Form) -> None:
    """Raise RequestError for a form that no model's tokens can follow; needs no model."""
    try:
        _library()
    except ImportError as error:
        raise _not_installed() from error
    reason = _with_deep_stack(lambda: _misread(form))
    if reason:
        raise _refusal(form, reason)


def _misread(form: Form) -> str:
    """Return the reason why a form is refused for any tokens; "" if it is not."""
    try:
        is_wrong, messages = _library().LLMatcher.validate_grammar_with_warnings(
            _grammar(form, {}), limits=_limits()
        )
    except Exception as error:
        return _why(error)
    return str(messages[0]) if is_wrong else ""


def explain(reason: object) -> str:
    """Return a library's message in one line, without its backtrace."""
    message = str(reason).removesuffix("<non-verbose/>").partition("<backtrace>")[0]
    return in_one_line(" ".join(message.split()))


def _refusal(form: Form, reason: object) -> RequestError:
    return RequestError(f"structured_outputs.{form.kind} cannot be followed: {explain(reason)}")


def _why(found: LLMatcher | Exception) -> str:
    return (str(found) or repr(found)) if isinstance(found, Exception) else found.get_error()


def _grammar(form: Form, special: Mapping[str, int]) -> str:
    """A form in llguidance's own notation; special: ids of the tokens that spell no text."""
    library = _library()
    schemas = schemas_in(form.kind, form.text)
    check_multiples(schemas, together=form.kind == "grammar" and len(schemas) > 1)
    for schema in schemas:
        check_recursion(schema)
    if form.kind == "structural_tag":
        return str(library.LLMatcher.grammar_from_lark(write_tags(*form[1:], special)))
    if form.kind == "choice":  # one terminal: as rules, each text would be looked at in every step
        texts = " | ".join(json.dumps(text) for text in json.loads(form.text))
        return str(library.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if form.kind == "grammar" and _LARK_START.search(form.text):
        return str(library.LLMatcher.grammar_from_lark(form.text))
    if form.kind != "json":
        return str(library.grammar_from(form.kind, form.text))
    options: dict[str, object] = {"whitespace_flexible": form.whitespace != ""}
    if form.whitespace:
        options["whitespace_pattern"] = form.whitespace
    return str(library.LLMatcher.grammar_from_json_schema(form.text, defaults=options))


def _limits() -> LLParserLimits:
    limits: LLParserLimits = _library().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False
    )
    return limits


def _build(form: Form, masks: TokenMasks) -> LLMatcher:
    matcher: LLMatcher = _library().LLMatcher(
        masks.tokenizer, _grammar(form, masks.special_ids), log_level=0, limits=_limits()
    )
    if matcher.is_error():
        return matcher
    masks.compute([matcher])
    tried = _follow(matcher.deep_copy(), masks)
    return tried if tried.is_error() else matcher


def _follow(matcher: LLMatcher, masks: TokenMasks) -> LLMatcher:
    """The matcher after the first tokens of an answer, drawn at random but always alike.

    Whether a form is within llguidance's limits shows in its masks, not before.
    """
    draw = random.Random(0)
    for _ in range(_TRIED):
        [mask] = masks.compute([matcher])
        bytes_with_any = np.flatnonzero(mask)
        if matcher.is_stopped() or not len(bytes_with_any):
            break
        place = int(draw.choice(bytes_with_any))
        bits = [bit for bit in range(8) if mask[place] >> bit & 1]
        matcher.consume_token(place * 8 + draw.choice(bits))
    return matcher


def _with_deep_stack(work: Callable[[], Found]) -> Found | Exception:
    """Return what `work` returns or raises, run with a large stack.

    llguidance follows rules and `$ref`s by calling itself: at 64 kB of them an ordinary stack of
    8 MB overflows, which would end the process.
    """
    found: list[Found | Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="headstart-grammar", daemon=True)
    with _SETTING_STACK:  # the size is that of all threads which are started now
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]


def _not_installed() -> RequestError:
    return RequestError(f"structured_outputs needs llguidance: {install('structured')}")


def _refuse_special(form: Form, masks: TokenMasks) -> None:
    for text in masks.special_ids:
        if text in form.text:
            reason = f"no text that is generated can have the special token {text!r}"
            raise _refusal(form, reason)


class GrammarMask(TokenMask):
    """One answer's place in its grammar. Applied last, so no other processor allows more.

    end_ids: tokens that end the answer where the grammar is satisfied and may continue; where
    nothing else may follow, the model's own end it. special: the grammar may name special tokens.
    """

    rank = 4

    def __init__(
        self, matcher: LLMatcher, masks: TokenMasks, end_ids: Iterable[int], *, special: bool
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self._ends = masks.pack(end_ids)
        barred = masks.pack(masks.tokenizer.eos_tokens)
        self._spellable = ~(barred if special else barred | masks.special)
        self.complete = False

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Mask all rows; the matchers' masks are computed in parallel."""
        masks: TokenMasks = rows[0][1]._masks
        computed = masks.compute([one._matcher for _, one in rows])
        failed: Failures = {}
        for (row, one), mask in zip(rows, computed, strict=True):
            if one._matcher.is_error():
                failed[row] = NoTokenError(
                    "structured_outputs could not be followed to the answer's end: "
                    f"{explain(one._matcher.get_error())}"
                )
            one._finish(mask)
            allowed[row] &= mask[: allowed.shape[1]]
        return failed

    def accept(self, token_id: int) -> None:
        """Move on by a token. An error of the matcher is told with the next mask."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()

    def _finish(self, mask: np.ndarray) -> None:
        """Put the answer's own ends where llguidance has the tokenizer's."""
        place, bit = divmod(self._masks.end_bit, 8)
        may_end = mask[place] >> bit & 1
        np.bitwise_and(mask, self._spellable, out=mask)
        self.complete = not mask.any()
        if may_end:
            mask |= self._masks.ends if self.complete else self._ends
