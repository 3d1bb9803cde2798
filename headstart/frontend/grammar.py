"""Grammars over tokens, which constrain structured outputs.

llguidance compiles JSON schemas, regular expressions and context-free grammars to matchers. In each
step, a matcher returns the tokens that may come next. Compiling a constraint usually takes
milliseconds, in the worst case seconds. It is done once, in the thread that prepares a request,
never in a step. Each answer gets a copy of the compiled matcher, which takes microseconds.

Two kinds of schemas are refused. One has a large `multipleOf`: llguidance makes a state for each
remainder. 100,003 states take a second, 982,451,653 states hours, and the computation cannot be
stopped. In the other, every value must contain another value of the schema (a required property
with `{"$ref": "#"}`), so an answer would open objects until `max_tokens`.
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
"""Grammar rules that may apply at one position; an optional property of an object adds 4 rules."""
_MAY_HAVE_SPECIAL = ("grammar", "structural_tag")
"""Kinds of constraints that may contain special tokens."""
_MAX_DIGITS = 12  # a `multipleOf` with more digits is refused
_MAX_PASSES = 64  # passes over the references of a schema
_CACHED = 64  # compiled constraints
_TRIAL_TOKENS = 32  # tokens of a trial answer, which must succeed before a constraint is accepted
_SCHEMA = re.compile(r"%json\s*")  # precedes a schema in a Lark grammar
_LARK_START = re.compile(r"^\s*[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)  # GBNF has ::=
_READER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
_STACK = 512 * 2**20  # bytes of address space; memory is allocated only when used
_STACK_LOCK = threading.Lock()


# Limits of JSON schemas


def _schemas_in(kind: str, text: str) -> list[Any]:
    """Return a constraint's JSON schemas, with exact numbers.

    Invalid schemas are left out, because llguidance refuses them.
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

    together: a number may be required to be a multiple of all values of `multipleOf` at once.
    """
    parts = list(_objects_in(schemas))
    together = together or any("allOf" in part or "$ref" in part for part in parts)
    remainders = 1
    for value in (part.get("multipleOf") for part in parts):
        if not isinstance(value, Decimal) or not value.is_finite() or value <= 0:
            continue
        _, digits, exponent = value.normalize().as_tuple()
        assert isinstance(exponent, int)
        count = MAX_REMAINDERS + 1
        if exponent <= _MAX_DIGITS and len(digits) <= _MAX_DIGITS:
            count = int("".join(map(str, digits)) + "0" * exponent)
        remainders = lcm(remainders, count) if together else count
        if remainders > MAX_REMAINDERS:
            others = ", and its least common multiple with other values is too large"
            raise ValueError(
                f'"multipleOf" is {value}{others if count != remainders else ""}; allowed: up to '
                f"{MAX_REMAINDERS:,}, ignoring the decimal point"
            )


def _check_recursion(schema: Any) -> None:
    """Raise ValueError for a schema that no finite value satisfies, because references recurse.

    Computes a least fixed point: a reference has a finite value if its target has a finite value
    that does not need the reference. Unknown parts of a schema count as finite.
    """
    targets: dict[str, Any] = {}
    for part in _objects_in(schema):
        if isinstance(reference := part.get("$ref"), str):
            with suppress(LookupError, TypeError, ValueError):
                targets[reference] = _resolve(reference, schema)
    endless = dict.fromkeys(reversed(targets))  # most definitions refer to later definitions
    with suppress(RecursionError):  # llguidance refuses deep nesting
        for _ in range(_MAX_PASSES):
            before = len(endless)
            for reference in list(endless):
                if _is_finite(targets[reference], endless):
                    del endless[reference]
            if len(endless) == before:
                break
        else:
            return
        if not _is_finite(schema, endless):
            raise ValueError('"$ref" recurses without end')


def _resolve(pointer: str, root: Any) -> Any:
    """Return the target of a reference. Raises LookupError, TypeError or ValueError."""
    if not f"{pointer}/".startswith("#/"):
        raise LookupError(pointer)
    part = root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part[int(name) if isinstance(part, list) else name]
    return part


def _is_finite(schema: Any, endless: Collection[str]) -> bool:
    """Return True if a schema has a finite value that needs none of the `endless` references."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    if not all(_is_finite(part, endless) for part in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _list(schema, name)
        if parts and not any(_is_finite(part, endless) for part in parts):
            return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = schema.get("type")
    return any(
        all(_is_finite(part, endless) for part in _required_parts(schema, kind))
        for kind in (kinds if isinstance(kinds, list) else [kinds])
    )


def _required_parts(schema: dict[str, Any], kind: Any) -> list[Any]:
    """Return the schemas of the required properties or items of a value of type `kind`."""
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return [properties.get(name) for name in _list(schema, "required") if isinstance(name, str)]
    if kind != "array":
        return []
    minimum, first = schema.get("minItems"), _list(schema, "prefixItems") or _list(schema, "items")
    count = int(min(minimum, Decimal(len(first) + 1))) if isinstance(minimum, Decimal) else 0
    return [*first[:count], *([schema.get("items")] if count > len(first) else [])]


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


# Compilation


class TokenMasks:
    """llguidance's tokenizer and threads for one model, which compute masks of allowed tokens.

    A mask has `num_bytes` bytes with one bit for each token, the lowest bit first. end_ids, ends:
    the tokens that end an answer, and their mask. end_token: the token that llguidance allows where
    an answer may end. special: the mask of the special tokens. special_ids: their ids by text.
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
        self.end_token: int = self.tokenizer.eos_tokens[0]
        self.ends = self.pack(self.end_ids)
        self.special = self.pack(i for i in range(size) if self.tokenizer.is_special_token(i))
        self.special_ids = {
            text: token_id
            for text, token_id in tokenizer.get_added_vocab().items()
            if text and self.tokenizer.is_special_token(token_id)
        }

    def pack(self, token_ids: Iterable[int]) -> np.ndarray:
        """Return a mask of the token ids; ids outside the vocabulary are ignored."""
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
    """Compiler of constraints for one model's tokens. Thread-safe.

    If two threads need a constraint at the same time, both compile it. The vocabulary is read for
    the first structured request; 100,000 tokens take a second.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks = functools.cache(self._read_vocabulary)
        self._compiled = functools.lru_cache(_CACHED)(self._compile)

    def matcher(self, constraint: OutputConstraint) -> LLMatcher:
        """Return a matcher at the beginning of a constraint. Raises RequestError."""
        return self._compiled(constraint).deep_copy()

    def mask(
        self, constraint: OutputConstraint, stops: Iterable[int], *, ignore_eos: bool
    ) -> GrammarMask:
        """Return a logits processor for one answer. Raises RequestError.

        stops: tokens that end the answer.
        """
        masks, matcher = self._masks(), self.matcher(constraint)
        ends = [*(() if ignore_eos else masks.end_ids), *stops]
        return GrammarMask(matcher, masks, ends, special=constraint.kind in _MAY_HAVE_SPECIAL)

    def _read_vocabulary(self) -> TokenMasks:
        tokenizer = self._vocabulary.tokenizer
        if tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer; the model has no tokenizer")
        _library()  # raises RequestError if llguidance is missing
        try:
            return TokenMasks(tokenizer, self._vocabulary)
        except Exception as error:  # llguidance may raise anything for an unsupported tokenizer
            raise RequestError(
                f"structured_outputs cannot use the model's tokenizer: {_explain(error)}"
            ) from error

    def _compile(self, constraint: OutputConstraint) -> LLMatcher:
        masks = self._masks()
        for text in () if constraint.kind in _MAY_HAVE_SPECIAL else masks.special_ids:
            if text in constraint.text:
                reason = f"generated text cannot contain the special token {text!r}"
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
    """Raise RequestError for a constraint that no model can follow. Needs no model."""
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
    """Return a constraint in llguidance's notation. special: ids of the special tokens."""
    library = _library()
    schemas = _schemas_in(constraint.kind, constraint.text)
    _check_multiples(schemas, together=constraint.kind == "grammar" and len(schemas) > 1)
    for schema in schemas:
        _check_recursion(schema)
    if constraint.kind == "structural_tag":
        return str(library.LLMatcher.grammar_from_lark(write_tags(*constraint[1:], special)))
    if constraint.kind == "choice":
        # One terminal: if each text were a rule, every step would check all of them.
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

    Generates the first tokens of a trial answer at random, with a fixed seed, because llguidance
    checks its limits only when it computes masks.
    """
    matcher: LLMatcher = _library().LLMatcher(
        masks.tokenizer, _write(constraint, masks.special_ids), log_level=0, limits=_limits()
    )
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    masks.compute([matcher])
    draw = random.Random(0)
    trial = matcher.deep_copy()
    for _ in range(_TRIAL_TOKENS):
        [mask] = masks.compute([trial])
        nonzero = np.flatnonzero(mask)
        if trial.is_stopped() or not len(nonzero):
            break
        index = int(draw.choice(nonzero))
        bits = [bit for bit in range(8) if mask[index] >> bit & 1]
        trial.consume_token(index * 8 + draw.choice(bits))
    if trial.is_error():
        raise ValueError(trial.get_error())
    return matcher


def _run(constraint: OutputConstraint, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread with a large stack, and return its result. Raises RequestError.

    constraint: named in the error. llguidance is recursive: 64 kB of nested rules or `$ref`s
    overflow the usual stack of 8 MB, and the process would crash.
    """
    results: list[Result | Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="headstart-grammar", daemon=True)
    with _STACK_LOCK:  # the stack size applies to every thread that starts meanwhile
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
    """A mask of the tokens that one answer's grammar allows. Applied after all other processors.

    end_ids: tokens that end the answer where the grammar allows both the end and further text.
    Where it allows no further text, the model's end-of-text tokens end the answer. special: the
    grammar may contain special tokens. complete: True if no further text is allowed.
    """

    rank = 4

    def __init__(
        self, matcher: LLMatcher, masks: TokenMasks, end_ids: Iterable[int], *, special: bool
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self._ends = masks.pack(end_ids)
        eos_tokens = masks.pack(masks.tokenizer.eos_tokens)
        self._text_tokens = ~(eos_tokens if special else eos_tokens | masks.special)
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
            index, bit = divmod(masks.end_token, 8)
            may_end = mask[index] >> bit & 1
            np.bitwise_and(mask, processor._text_tokens, out=mask)
            processor.complete = not mask.any()
            if may_end:
                mask |= masks.ends if processor.complete else processor._ends
            allowed[row] &= mask[: allowed.shape[1]]
        return failed

    def accept(self, token_id: int) -> None:
        """Advance by a token. The next mask reports an error of the matcher."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
