"""Grammars over tokens: compiled when a request is prepared, followed token by token in a step.

llguidance does both: it reads JSON schemas, regular expressions and context-free grammars, and
returns the tokens that may come next. Compiling takes milliseconds as a rule and seconds at worst,
once a constraint: in the thread that prepares a request, never in a step. Each answer then gets a
copy of the compiled matcher, which takes microseconds.

Two kinds of schemas are refused, since llguidance would follow them without an end. It makes a
state for each remainder of a `multipleOf` when a mask is computed, and cannot be stopped: 100,003
take a second, 982,451,653 would take hours. A schema whose every value contains itself, such as
`{"$ref": "#"}` as a required property, would have an answer open objects until `max_tokens`.
"""

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
from headstart.engine.structured_outputs import OutputConstraint, write_tags
from headstart.errors import NoTokenError, RequestError
from headstart.imports import install
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")

MAX_REMAINDERS = 2**16
MAX_ITEMS_IN_ROW = 4_100
"""Rules that may apply at one place of an answer; an optional property of an object has 4."""
_NAMES_SPECIAL = ("grammar", "structural_tag")
"""Kinds of forms in which special tokens may stand."""
_MAX_EXPONENT = 12  # of ten
_MAX_PASSES = 64  # over the references of a schema
_REMEMBERED = 64  # compiled constraints
_TRIED = 32  # tokens of an answer, before a constraint is accepted
_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar; a schema follows
_LARK_START = re.compile(r"^\s*[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)  # and not GBNF's ::=
_READER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
_STACK = 512 * 2**20  # bytes, of address space alone until they are used
_SETTING_STACK = threading.Lock()


# Limits of JSON schemas


def _schemas_in(kind: str, text: str) -> list[Any]:
    """Return a constraint's JSON schemas, with exact numbers; a grammar has them after `%json`.

    Unreadable schemas are left out: llguidance refuses them.
    """
    with suppress(ValueError, RecursionError):
        if kind == "json":
            return [_READER.decode(text)]
        if kind == "structural_tag":
            return [tag[-2] for tag in _READER.decode(text)]
    schemas = []
    for match in _SCHEMA.finditer(text) if kind == "grammar" else ():
        with suppress(ValueError, RecursionError):
            schemas.append(_READER.raw_decode(text, match.end())[0])
    return schemas


def _objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _check_multiples(schemas: Sequence[Any], *, together: bool) -> None:
    """Raise ValueError for schemas whose numbers have too many remainders.

    together: a number may have to be a multiple of all.
    """
    parts = list(_objects_in(schemas))
    together = together or any("allOf" in part or "$ref" in part for part in parts)
    most = 1
    for value in (part.get("multipleOf") for part in parts):
        if not isinstance(value, Decimal) or not value.is_finite() or value <= 0:
            continue
        _, digits, exponent = value.normalize().as_tuple()
        assert isinstance(exponent, int)
        count = MAX_REMAINDERS + 1
        if exponent <= _MAX_EXPONENT and len(digits) <= _MAX_EXPONENT:
            count = int("".join(map(str, digits)) + "0" * exponent)  # without its decimal point
        most = lcm(most, count) if together else count
        if most > MAX_REMAINDERS:
            raise ValueError(
                f'"multipleOf" is {value}{", together with others" if count != most else ""}; '
                f"allowed: up to {MAX_REMAINDERS:,}, the decimal point left out"
            )


def _check_recursion(schema: Any) -> None:
    """Raise ValueError for a schema that no finite value satisfies, since its references recur.

    The least fixed point: a reference can end if its target can end without it. A schema that is
    not understood can end; llguidance may still refuse it.
    """
    targets: dict[str, Any] = {}
    for part in _objects_in(schema):
        if isinstance(reference := part.get("$ref"), str):
            with suppress(LookupError, TypeError, ValueError):
                targets[reference] = _resolve(reference, schema)
    endless = dict.fromkeys(reversed(targets))  # definitions mostly refer to later ones
    with suppress(RecursionError):  # too deep, which llguidance refuses
        for _ in range(_MAX_PASSES):
            before = len(endless)
            for reference in list(endless):
                if _ends(targets[reference], endless):
                    del endless[reference]
            if len(endless) == before:
                break
        else:
            return
        if not _ends(schema, endless):
            raise ValueError('"$ref" recurs without an end')


def _resolve(pointer: str, root: Any) -> Any:
    """Return the schema that a reference points to. Raises LookupError, TypeError or ValueError."""
    if not f"{pointer}/".startswith("#/"):
        raise LookupError(pointer)
    part = root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part[int(name) if isinstance(part, list) else name]
    return part


def _ends(schema: Any, endless: Collection[str]) -> bool:
    """Return True if a schema has a finite value while these references have none."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    if not all(_ends(part, endless) for part in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _list(schema, name)
        if parts and not any(_ends(part, endless) for part in parts):
            return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = schema.get("type")
    return any(
        all(_ends(part, endless) for part in _required_parts(schema, kind))
        for kind in (kinds if isinstance(kinds, list) else [kinds])
    )


def _required_parts(schema: dict[str, Any], kind: Any) -> list[Any]:
    """Return the schemas of all that a value of this type must contain."""
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return [properties.get(name) for name in _list(schema, "required") if isinstance(name, str)]
    if kind != "array":
        return []
    least, first = schema.get("minItems"), _list(schema, "prefixItems") or _list(schema, "items")
    count = int(min(least, Decimal(len(first) + 1))) if isinstance(least, Decimal) else 0
    return [*first[:count], *([schema.get("items")] if count > len(first) else [])]


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


# Compilation


class TokenMasks:
    """The tokens of one model for llguidance, and its threads.

    A mask is `num_bytes` bytes with one bit for each token, the lowest first. end_ids: tokens that
    end an answer. end_bit: the token whose bit says that the answer may end here. special: a mask
    of the tokens that spell no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> None:
        library = _library()
        size = max(vocabulary.size, len(tokenizer))
        self.end_ids = sorted(end for end in vocabulary.eos_token_ids if end < size)
        self.tokenizer: LLTokenizer = library.hf.from_tokenizer(
            tokenizer, size, eos_token=self.end_ids or None
        )
        self.executor: LLExecutor = library.LLExecutor(torch.get_num_threads())
        self.num_bytes = (size + 31) // 32 * 4
        self.end_bit: int = self.tokenizer.eos_tokens[0]
        self.ends = self.pack(self.end_ids)
        self.special = self.pack(i for i in range(size) if self.tokenizer.is_special_token(i))
        self.special_ids = {
            text: token_id
            for text, token_id in tokenizer.get_added_vocab().items()
            if text and self.tokenizer.is_special_token(token_id)
        }

    def pack(self, token_ids: Iterable[int]) -> np.ndarray:
        """Return a mask of these tokens, without those outside the vocabulary."""
        bits = np.zeros(self.num_bytes * 8, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
        return np.packbits(bits, bitorder="little")

    def compute(self, matchers: list[LLMatcher]) -> np.ndarray:
        """Return the next mask of each matcher, uint8 `[matchers, num_bytes]`."""
        masks = np.empty((len(matchers), self.num_bytes), dtype=np.uint8)
        numbered = [(matcher, row) for row, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(
            numbered, masks.ctypes.data, self.num_bytes, len(matchers)
        )
        return masks


class GrammarCompiler:
    """Matchers for one model's tokens. May be used from several threads.

    Two threads that need a constraint at the same time both compile it: none waits for a lock an
    interrupted thread may hold. The vocabulary is read for the first structured request, which
    takes a second for 100,000 tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks = functools.cache(self._read_vocabulary)
        self._compiled = functools.lru_cache(_REMEMBERED)(self._compile)

    def matcher(self, constraint: OutputConstraint) -> LLMatcher:
        """Return a matcher at the beginning of a constraint. Raises RequestError."""
        return self._compiled(constraint).deep_copy()

    def mask(
        self, constraint: OutputConstraint, stops: Iterable[int], *, ignore_eos: bool
    ) -> GrammarMask:
        """Return the logits processor of an answer, which these tokens end. Raises RequestError."""
        masks, matcher = self._masks(), self.matcher(constraint)
        ends = [*(() if ignore_eos else masks.end_ids), *stops]
        return GrammarMask(matcher, masks, ends, special=constraint.kind in _NAMES_SPECIAL)

    def _read_vocabulary(self) -> TokenMasks:
        tokenizer = self._vocabulary.tokenizer
        if tokenizer is None:
            raise RequestError("the model has no tokenizer, which structured_outputs needs")
        _library()  # which may be missing
        try:
            return TokenMasks(tokenizer, self._vocabulary)
        except Exception as error:  # llguidance raises what it likes for a tokenizer it cannot read
            raise RequestError(
                f"structured_outputs cannot use the model's tokenizer: {_explain(error)}"
            ) from error

    def _compile(self, constraint: OutputConstraint) -> LLMatcher:
        """Return a matcher that has followed an answer: its first masks take the longest."""
        masks = self._masks()
        for text in () if constraint.kind in _NAMES_SPECIAL else masks.special_ids:
            if text in constraint.text:
                reason = f"no text that is generated can have the special token {text!r}"
                raise _refusal(constraint, reason)
        return _run(constraint, lambda: _build(constraint, masks))


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise RequestError(
            f"structured_outputs needs llguidance: {install('structured')}"
        ) from error
    return llguidance


def check_constraint(constraint: OutputConstraint) -> None:
    """Raise RequestError for a constraint that no model's tokens can follow; needs no model."""
    validate = _library().LLMatcher.validate_grammar_with_warnings
    is_wrong, messages = _run(
        constraint, lambda: validate(_write(constraint, {}), limits=_limits())
    )
    if is_wrong:
        raise _refusal(constraint, messages[0])


def _refusal(constraint: OutputConstraint, reason: object) -> RequestError:
    return RequestError(
        f"structured_outputs.{constraint.kind} cannot be followed: {_explain(reason)}"
    )


def _explain(reason: object) -> str:
    """Return a library's message in one line, without its backtrace."""
    message = str(reason).removesuffix("<non-verbose/>").partition("<backtrace>")[0]
    return in_one_line(" ".join(message.split()))


def _write(constraint: OutputConstraint, special: Mapping[str, int]) -> str:
    """Return a constraint in llguidance's notation; special: ids of tokens without a text."""
    library = _library()
    schemas = _schemas_in(constraint.kind, constraint.text)
    _check_multiples(schemas, together=constraint.kind == "grammar" and len(schemas) > 1)
    for schema in schemas:
        _check_recursion(schema)
    if constraint.kind == "structural_tag":
        return str(library.LLMatcher.grammar_from_lark(write_tags(*constraint[1:], special)))
    if constraint.kind == "choice":
        # One terminal: as rules, each text would be looked at in every step.
        texts = " | ".join(json.dumps(text) for text in json.loads(constraint.text))
        return str(library.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if constraint.kind == "grammar" and _LARK_START.search(constraint.text):
        return str(library.LLMatcher.grammar_from_lark(constraint.text))
    if constraint.kind != "json":
        return str(library.grammar_from(constraint.kind, constraint.text))
    options: dict[str, object] = {"whitespace_flexible": constraint.whitespace != ""}
    if constraint.whitespace:
        options["whitespace_pattern"] = constraint.whitespace
    return str(library.LLMatcher.grammar_from_json_schema(constraint.text, defaults=options))


def _limits() -> LLParserLimits:
    make: type[LLParserLimits] = _library().LLParserLimits
    return make(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)


def _build(constraint: OutputConstraint, masks: TokenMasks) -> LLMatcher:
    """Return a constraint's matcher. Raises ValueError.

    The first tokens of an answer are tried, drawn at random but always alike: only its masks show
    that a constraint is within llguidance's limits.
    """
    matcher: LLMatcher = _library().LLMatcher(
        masks.tokenizer, _write(constraint, masks.special_ids), log_level=0, limits=_limits()
    )
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    masks.compute([matcher])
    draw = random.Random(0)
    tried = matcher.deep_copy()
    for _ in range(_TRIED):
        [mask] = masks.compute([tried])
        bytes_with_any = np.flatnonzero(mask)
        if tried.is_stopped() or not len(bytes_with_any):
            break
        place = int(draw.choice(bytes_with_any))
        bits = [bit for bit in range(8) if mask[place] >> bit & 1]
        tried.consume_token(place * 8 + draw.choice(bits))
    if tried.is_error():
        raise ValueError(tried.get_error())
    return matcher


def _run(constraint: OutputConstraint, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a constraint, run with a large stack. Raises RequestError.

    llguidance follows rules and `$ref`s by calling itself: at 64 kB of them an ordinary stack of
    8 MB overflows, which would end the process.
    """
    results: list[Result | Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="headstart-grammar", daemon=True)
    with _SETTING_STACK:  # the size is that of all threads which are started now
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    [result] = results
    if isinstance(result, RequestError):
        raise result
    if isinstance(result, Exception):
        raise _refusal(constraint, str(result) or repr(result)) from result
    return result


class GrammarMask(TokenMask):
    """One answer's place in its grammar. Applied last, so no other processor allows more.

    end_ids: tokens that end the answer where the grammar is satisfied and may continue; where
    nothing else may follow, the model's end tokens do. special: the grammar may name special
    tokens.
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
        computed = masks.compute([processor._matcher for _, processor in rows])
        failed: Failures = {}
        for (row, processor), mask in zip(rows, computed, strict=True):
            if processor._matcher.is_error():
                failed[row] = NoTokenError(
                    "structured_outputs could not be followed to the answer's end: "
                    f"{_explain(processor._matcher.get_error())}"
                )
            place, bit = divmod(masks.end_bit, 8)  # the tokenizer's, for the answer's end tokens
            may_end = mask[place] >> bit & 1
            np.bitwise_and(mask, processor._spellable, out=mask)
            processor.complete = not mask.any()
            if may_end:
                mask |= masks.ends if processor.complete else processor._ends
            allowed[row] &= mask[: allowed.shape[1]]
        return failed

    def accept(self, token_id: int) -> None:
        """Advance by a token. An error of the matcher comes with the next mask."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
