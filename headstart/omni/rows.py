"""A stage's output rows: each is handed on once, and whole blocks of them are cached.

    position    0 ........... watermark ...... start ........... stop
                handed on   | from the store | from this step  |
                                             ^ where the request runs from

Rows of a skipped prefix come from the store, or from the step if another request computes them in
this step. Computed rows come from the step. Rows below the watermark were handed on before. This
one rule covers chunks of a prompt, decoding, and a preempted request that resumes with a longer or
a shorter hit.

The order in a step: `usable` for requests that could be admitted, `admitted` for admitted requests,
`computed` for all requests that ran.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.cache import ComputedBlocks, TokenSequence, UnsavedBlock
from headstart.engine.config import EngineConfig
from headstart.errors import EngineError
from headstart.omni.output_cache import BlockPath, OutputCache
from headstart.omni.stage import AlignmentDetector, Chunk, Output, StageSpec

__all__ = ["TierRows", "Part", "StageRows", "has_store", "without_store"]


class Part(NamedTuple):
    """The computed tokens `start` to `stop - 1` of a sequence in a step."""

    sequence: TokenSequence
    start: int
    stop: int


@dataclass(slots=True)
class _Tail:
    """Rows of one output since the last block border, or since the request was admitted."""

    start: int
    stop: int
    parts: list[Tensor]


@dataclass(slots=True)
class _Request:
    """The state of one request's rows. finite: its tokens before the first with a NaN or inf."""

    watermark: int = 0
    start: int = 0
    finite: float = math.inf
    tails: dict[str, _Tail] = field(default_factory=dict)
    stored: list[Mapping[str, Tensor]] = field(default_factory=list)
    awaited: Sequence[int] = ()
    hit_rows: Counter[str] = field(default_factory=Counter)


class StageRows:
    """The rows of all requests of one stage.

    outputs: the declared outputs. find_outputs: detect the alignment of undeclared outputs;
    otherwise they are ignored. cache: None caches nothing. A stage without row outputs may skip all
    tokens that its KV cache holds.
    """

    def __init__(
        self,
        stage: str,
        block_size: int,
        outputs: Sequence[Output],
        cache: OutputCache | None,
        *,
        find_outputs: bool = False,
    ) -> None:
        self._stage = stage
        self._block_size = block_size
        self._outputs = {output.name: output for output in outputs}
        self._cache = cache
        self._detector = AlignmentDetector({output.name: output.alignment for output in outputs})
        self._find_outputs = find_outputs
        self._taken: Set[str] | None = None
        self._requests: dict[TokenSequence, _Request] = {}
        self._expect_rows()

    def limit_to(self, outputs: Set[str]) -> None:
        """Limit the taken outputs to these; by default all are taken. Not while a request runs.

        Other outputs are neither cached nor required for a hit.
        """
        self._taken = outputs
        self._expect_rows()

    def _expect_rows(self) -> None:
        """Set whether rows are handed on, as far as is known before a step."""
        self._has_given = any(
            output.alignment.is_by_token and self._is_taken(name)
            for name, output in self._outputs.items()
        )
        self._gives_rows = self._has_given or self._find_outputs  # until a step says otherwise

    def _is_taken(self, name: str) -> bool:
        return self._taken is None or name in self._taken

    def open(self, sequence: TokenSequence) -> None:
        """Begin a request; nothing of it has been handed on."""
        self._requests[sequence] = _Request()

    def close(self, sequence: TokenSequence) -> Counter[str]:
        """End a request, if it was begun; how many tokens' rows came from the store, by output."""
        request = self._requests.pop(sequence, _Request())
        if self._cache is not None:
            self._cache.touch(self._path(sequence, len(sequence.keys)))
        return request.hit_rows

    def watermark(self, sequence: TokenSequence) -> int:
        """Number of tokens whose rows were handed on."""
        return self._requests[sequence].watermark

    # Admission

    def usable(self, sequence: TokenSequence, found: ComputedBlocks) -> int:
        """Number of the blocks found by a lookup that have rows, or need none.

        Blocks below the watermark need none. Blocks that this step computes will have their rows
        when it ends. They are not usable with undeclared outputs, since such an output may first
        appear with a later part of the block. Rows of an undecided output are usable for a request
        that runs alone and whose pass is shorter than all before: that pass decides about them
        before they are handed on. Changes nothing.
        """
        count = len(found.blocks)
        if not self._gives_rows:
            return count
        first = self._requests[sequence].watermark // self._block_size
        if count <= first or self._cache is None:
            return min(count, first)
        usable = first + self._cache.count(self._path(sequence, count), first)
        if self._find_outputs:
            left = len(sequence.token_ids) - usable * self._block_size
            alone = left if len(self._requests) == 1 else math.inf
            return usable if self._detector.is_settled_by(alone) else first
        while usable < count and not found.is_written(usable):
            usable += 1
        return usable

    def admitted(self, sequence: TokenSequence, start: int) -> None:
        """Hold the rows of a sequence's skipped prefix; it runs from token `start` on."""
        request = self._requests[sequence]
        request.start = start
        request.tails.clear()
        request.stored, request.awaited = [], ()
        if not self._gives_rows or self._cache is None or start <= request.watermark:
            return
        first, last = request.watermark // self._block_size, -(-start // self._block_size)
        path = self._path(sequence, last)
        request.stored = self._cache.find(path, first)
        request.awaited = sequence.block_table()[first + len(request.stored) : last]
        self._cache.touch(path)

    # A step

    def computed(
        self, parts: Sequence[Part], outputs: Mapping[str, Tensor]
    ) -> list[tuple[TokenSequence, Chunk]]:
        """The chunks that the step's requests hand on, in order.

        outputs: `[tokens of the step * ratio, ...]`, the parts one after another; outputs of other
        alignments are left out. Raises EngineError if an output differs from its declaration;
        nothing of the step is then cached.
        """
        named = self._sort(outputs, parts)
        if self._cache is not None:
            self._find_nonfinite(parts, named)
        needed = self._needed(named)
        filled: dict[int, Mapping[str, Tensor]] = {}  # by block id
        at = 0
        shares = []
        for part in parts:
            count = part.stop - part.start
            shares.append(
                {
                    name: rows[at * self._detector.ratio(name) :][
                        : count * self._detector.ratio(name)
                    ]
                    for name, rows in named.items()
                }
            )
            at += count
            self._keep(part, shares[-1], needed, filled)
        return [
            (part.sequence, chunk)
            for part, share in zip(parts, shares, strict=True)
            for chunk in self._hand_on(part, share, filled)
        ]

    def _sort(self, outputs: Mapping[str, Tensor], parts: Sequence[Part]) -> dict[str, Tensor]:
        """The outputs that have, or may have, rows for the step's tokens."""
        num_tokens = sum(part.stop - part.start for part in parts)
        for name, output in self._outputs.items():
            if name in outputs:
                output.check(outputs[name], num_tokens)
            elif output.required and output.alignment.is_by_token:
                raise EngineError(f"stage {self._stage!r} did not give {name!r}, which it declares")
        outputs = {
            name: rows
            for name, rows in outputs.items()
            if self._is_taken(name) and (self._find_outputs or name in self._outputs)
        }
        if self._cache is not None:
            for name in self._detector.refutes(outputs, num_tokens):
                self._cache.drop(self._stage, name)
        self._detector.observe(outputs, num_tokens, len(parts))
        named = {
            name: rows
            for name, rows in outputs.items()
            if self._detector.is_by_token(name) or self._detector.is_undecided(name)
        }
        self._has_given = self._gives_rows = self._has_given or bool(named)
        return named

    def _needed(self, named: Iterable[str]) -> frozenset[str]:
        """The outputs required for a hit, including those whose alignment is still undecided."""
        optional = {name for name, output in self._outputs.items() if not output.required}
        return frozenset(named) - optional

    def _find_nonfinite(self, parts: Sequence[Part], named: Mapping[str, Tensor]) -> None:
        """Record each request's first row with a NaN or an infinity."""
        found: set[int] = set()  # tokens of the step
        for name, rows in named.items():
            if rows.is_floating_point():
                ratio = self._detector.ratio(name)
                found.update(at // ratio for at in _nonfinite_rows(rows))
        at = 0
        for part in parts if found else ():
            mine = [token for token in found if at <= token < at + part.stop - part.start]
            if mine:
                request = self._requests[part.sequence]
                request.finite = min(request.finite, part.start + min(mine) - at)
            at += part.stop - part.start

    def _keep(
        self,
        part: Part,
        share: Mapping[str, Tensor],
        needed: frozenset[str],
        filled: dict[int, Mapping[str, Tensor]],
    ) -> None:
        """Store the blocks that the part completes, and note them for hits within the step.

        From the first row on that is not finite nothing of the request is stored: the engine ends
        the request, and stored rows are never overwritten.
        """
        if self._cache is None:
            return
        request = self._requests[part.sequence]
        blocks: dict[int, dict[str, Tensor]] = {}
        for name in request.tails.keys() - share.keys():
            del request.tails[name]
        for name, rows in share.items():
            tail = request.tails.get(name)
            if tail is None or tail.stop != part.start:
                tail = request.tails[name] = _Tail(part.start, part.start, [])
            tail.parts.append(rows)
            tail.stop = part.stop
            for index, block in self._cut(tail, self._detector.ratio(name)):
                blocks.setdefault(index, {})[name] = block
        for index in blocks:
            if (index + 1) * self._block_size > request.finite:
                continue
            path = self._path(part.sequence, index + 1)
            self._cache.put(path, index, blocks[index], needed)
        if blocks:
            self._cache.touch(self._path(part.sequence, max(blocks) + 1))
        for index, rows_of_block in blocks.items():
            if needed <= rows_of_block.keys():
                filled[part.sequence.block_table()[index]] = rows_of_block

    def _cut(self, tail: _Tail, ratio: int) -> list[tuple[int, Tensor]]:
        """The whole blocks at the head of a tail, by index; what is left over stays in it."""
        size = self._block_size
        first, last = -(-tail.start // size), tail.stop // size
        if last * size <= tail.start:
            return []
        rows = torch.cat(tail.parts) if len(tail.parts) > 1 else tail.parts[0]
        cut = [
            (index, rows[(index * size - tail.start) * ratio :][: size * ratio])
            for index in range(first, last)
        ]
        left = rows[(last * size - tail.start) * ratio :]
        tail.parts = [left.clone()] if len(left) else []
        tail.start = last * size
        return cut

    def _hand_on(
        self,
        part: Part,
        share: Mapping[str, Tensor],
        filled: Mapping[int, Mapping[str, Tensor]],
    ) -> list[Chunk]:
        """Rows from the watermark to the part's end, once each."""
        request = self._requests[part.sequence]
        chunks = []
        if request.start > request.watermark:
            chunks = self._stored_chunks(request, filled) if self._gives_rows else []
            request.watermark = request.start
        skip = max(0, request.watermark - part.start)
        if part.stop > request.watermark:
            for name, rows in share.items():
                ratio = self._detector.ratio(name)
                chunks.append(Chunk(name, part.start + skip, rows[skip * ratio :], ratio))
            request.watermark = part.stop
        return chunks

    def _stored_chunks(
        self,
        request: _Request,
        filled: Mapping[int, Mapping[str, Tensor]],
    ) -> list[Chunk]:
        """Stored rows from the watermark to the first token that the request computes."""
        missing = [block for block in request.awaited if block not in filled]
        if missing:
            raise EngineError(
                f"stage {self._stage!r} did not give the rows of {len(missing)} blocks"
            )
        blocks = [*request.stored, *(filled[block] for block in request.awaited)]
        request.stored, request.awaited = [], ()
        chunks = []
        first = request.watermark // self._block_size * self._block_size
        for name in sorted({name for block in blocks for name in block}):
            ratio = self._detector.ratio(name)
            has_gaps = not all(name in block for block in blocks)  # of an optional output
            if has_gaps or not self._detector.is_by_token(name):
                continue
            rows = torch.cat([block[name] for block in blocks])
            rows = rows[(request.watermark - first) * ratio : (request.start - first) * ratio]
            chunks.append(Chunk(name, request.watermark, rows, ratio))
            request.hit_rows[name] += request.start - request.watermark
        return chunks

    def _path(self, sequence: TokenSequence, count: int) -> BlockPath:
        return BlockPath(self._stage, sequence.namespace, sequence.keys[:count])


def _nonfinite_rows(rows: Tensor) -> list[int]:
    """The rows of a tensor `[rows, ...]` that hold a NaN or an infinity.

    Several times faster than `isfinite`.

    >>> _nonfinite_rows(torch.tensor([[1.0, 3e38], [torch.inf, 0.0], [0.0, torch.nan]]))
    [1, 2]
    """
    found = (rows - rows).unsqueeze(-1).flatten(1).sum(1).isnan()
    return found.nonzero().flatten().tolist() if found.any() else []


def has_store(config: EngineConfig) -> bool:
    """True if the options ask for blocks that outlive the process."""
    is_asked = config.kept_folder is not None or bool(config.remote_cache)
    return is_asked and config.enable_prefix_caching


def without_store(config: EngineConfig) -> EngineConfig:
    """Return these options for a stage whose blocks end with the process."""
    return replace(config, cache_dir=None, remote_cache=None)


class _BlockLayout(NamedTuple):
    """The rows of one output in a block: `shape` is `[tokens of the block * ratio, ...]`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fits(self, rows: Tensor | None) -> bool:
        return rows is not None and (rows.dtype, tuple(rows.shape)) == (self.dtype, self.shape)


class TierRows:
    """The declared rows of one stage, as bytes of its blocks; a `BlockRows` of its engine's tiers.

    place: the stage's name in `cache`. like: the stage's outputs for one token, `[ratio, ...]`.
    """

    def __init__(
        self,
        spec: StageSpec,
        block_size: int,
        like: Mapping[str, Tensor],
        cache: OutputCache,
        place: str,
    ) -> None:
        kept = [one for one in spec.gives if one.alignment.is_by_token and one.name in like]
        self._layouts = [
            _BlockLayout(
                one.name,
                like[one.name].dtype,
                (block_size * one.alignment.ratio, *like[one.name].shape[1:]),
            )
            for one in kept
        ]
        self._needed = frozenset(one.name for one in kept if one.required)
        self._cache = cache
        self._place = place
        self.title = spec.name
        self.layout = (
            f"stage {spec.name!r}, rows behind K/V: {[tuple(one) for one in self._layouts]}"
        )
        self.nbytes = sum(one.nbytes for one in self._layouts)

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[bytes | None]:
        """The rows of each block, one output after the other; None where one is missing."""
        if not self._layouts:
            return [b""] * len(blocks)
        found: list[bytes | None] = []
        for run in _runs(blocks):
            path = BlockPath(self._place, *run[-1].path())
            rows = self._cache.find(path, run[0].depth)
            data = [self._join(rows_of_block) for rows_of_block in rows]
            found += [*data, *[None] * (len(run) - len(data))]
        return found

    def _join(self, rows: Mapping[str, Tensor]) -> bytes | None:
        if not all(one.fits(rows.get(one.name)) for one in self._layouts):
            return None
        flat = [rows[one.name].contiguous().view(-1).view(torch.uint8) for one in self._layouts]
        return b"".join(part.numpy().tobytes() for part in flat)

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Have rows in the stage-output store, as far as it has room."""
        if not self._layouts:
            return
        keys = sequence.keys[: first + len(blocks)]
        path = BlockPath(self._place, sequence.namespace, keys)
        for index, data in enumerate(blocks, start=first):
            self._cache.put(path, index, self._cut(data), self._needed)
        self._cache.touch(path)

    def _cut(self, data: memoryview) -> dict[str, Tensor]:
        rows, at = {}, 0
        for one in self._layouts:
            flat = np.frombuffer(data[at : at + one.nbytes], dtype=np.uint8).copy()
            rows[one.name] = torch.from_numpy(flat).view(one.dtype).view(one.shape)
            at += one.nbytes
        return rows


def _runs(blocks: Sequence[UnsavedBlock]) -> Iterator[Sequence[UnsavedBlock]]:
    """Blocks that follow one another in one prefix, so that one walk finds all of a run."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at].parent != blocks[at - 1].name:
            yield blocks[first:at]
            first = at
