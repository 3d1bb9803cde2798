"""Output rows of a stage: each row is passed on once, and whole blocks of rows are cached.

    position    0 ........... watermark ...... start ........... stop
                passed on   | from the store | from this step  |
                                             ^ the first token that the request computes

Rows of a skipped prefix are read from the stage-output store, or from this step's outputs if
another request computes them in this step. A preempted request may resume with a longer or a
shorter hit.

In a step, `usable` is called for requests that could be admitted, then `admitted` for admitted
requests, then `computed` for all requests that ran.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.cache import ComputedBlocks, TokenSequence, UnsavedBlock
from headstart.errors import EngineError
from headstart.omni.output_cache import BlockPath, OutputCache, raw_bytes
from headstart.omni.stage import AlignmentDetector, Chunk, Output, StageSpec


class ScheduledRows(NamedTuple):
    """A step computes the tokens `start` to `stop - 1` of a sequence."""

    sequence: TokenSequence
    start: int
    stop: int


@dataclass(slots=True)
class _Tail:
    """Computed rows of one output, for tokens `start` to `stop - 1`, that fill no block yet."""

    start: int
    stop: int
    parts: list[Tensor]


@dataclass(slots=True)
class _Request:
    """The state of one request's rows.

    watermark: number of tokens whose rows were passed on. start: the first token that the request
    computes. finite: number of tokens before the first NaN or inf. stored: rows of skipped blocks
    from the store. awaited: ids of the skipped blocks that other requests compute in this step.
    """

    watermark: int = 0
    start: int = 0
    finite: float = math.inf
    tails: dict[str, _Tail] = field(default_factory=dict)
    stored: list[Mapping[str, Tensor]] = field(default_factory=list)
    awaited: Sequence[int] = ()
    hit_rows: Counter[str] = field(default_factory=Counter)


class StageRows:
    """The rows of all requests of one stage.

    stage: the stage's name in `cache`. outputs: the declared outputs. cache: None caches no rows.
    find_outputs: use undeclared outputs too, and detect their alignment. A stage whose outputs
    have no rows per token can use all hits of its KV cache.
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
        self._requests: dict[TokenSequence, _Request] = {}
        self.limit_to(None)

    def limit_to(self, outputs: Set[str] | None) -> None:
        """Pass on and cache only these outputs; None for all. Call only while no request runs."""
        self._taken = outputs
        by_token = (name for name, output in self._outputs.items() if output.alignment.is_by_token)
        self._has_outputs = any(map(self._is_taken, by_token))
        # Undeclared outputs are unknown until the first step.
        self._gives_rows = self._has_outputs or self._find_outputs

    def _is_taken(self, name: str) -> bool:
        return self._taken is None or name in self._taken

    def open(self, sequence: TokenSequence) -> None:
        """Begin a request with no rows passed on."""
        self._requests[sequence] = _Request()

    def close(self, sequence: TokenSequence) -> Counter[str]:
        """End a request; return the number of tokens with rows from the store, by output."""
        request = self._requests.pop(sequence, _Request())
        if self._cache is not None:
            self._cache.touch(self._path(sequence, len(sequence.keys)))
        return request.hit_rows

    def watermark(self, sequence: TokenSequence) -> int:
        """Return the number of tokens whose rows were passed on."""
        return self._requests[sequence].watermark

    # Admission

    def usable(self, sequence: TokenSequence, computed: ComputedBlocks) -> int:
        """Return the number of computed blocks, from the first on, that the request may skip.

        Changes nothing. Blocks below the watermark need no rows, because their rows were passed
        on. Later blocks are usable up to the first block without stored rows. If all outputs are
        declared, the next blocks that other requests compute in this step are usable too.

        With undeclared outputs, blocks that end in this step are not usable: an output that first
        appears now has no rows for the tokens that earlier steps computed. Stored rows are usable
        only if all alignments are decided, or if this request's pass will decide them before the
        rows are passed on. The pass will decide them if the request runs alone and computes fewer
        tokens than every earlier pass.
        """
        count = len(computed.blocks)
        if not self._gives_rows:
            return count
        first = self._requests[sequence].watermark // self._block_size
        if count <= first or self._cache is None:
            return min(count, first)
        usable = first + self._cache.count(self._path(sequence, count), first)
        if self._find_outputs:
            left = len(sequence.token_ids) - usable * self._block_size
            limit = left if len(self._requests) == 1 else math.inf
            return usable if self._detector.is_decided_by(limit) else first
        while usable < count and not computed.is_written(usable):
            usable += 1
        return usable

    def admitted(self, sequence: TokenSequence, start: int) -> None:
        """Find the rows of the skipped prefix; the request computes tokens from `start` on."""
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
        self, parts: Sequence[ScheduledRows], outputs: Mapping[str, Tensor]
    ) -> list[tuple[TokenSequence, Chunk]]:
        """Return the chunks that the step's requests pass on, in order; cache whole blocks.

        outputs: `[tokens of the step * ratio, ...]`, in the order of `parts`. Outputs that do not
        belong to tokens are ignored. Raises EngineError if an output differs from its declaration;
        then nothing of the step is cached.
        """
        selected = self._select(outputs, parts)
        ratios = {name: self._detector.ratio(name) for name in selected}
        part_rows, start = [], 0
        for part in parts:
            stop = start + part.stop - part.start
            part_rows.append(
                {
                    name: rows[start * ratios[name] : stop * ratios[name]]
                    for name, rows in selected.items()
                }
            )
            start = stop
        filled: dict[int, Mapping[str, Tensor]] = {}  # by block id
        if self._cache is not None:
            self._find_nonfinite(parts, selected)
            # Outputs of undecided alignment are required too, as they may belong to tokens.
            optional = {name for name, output in self._outputs.items() if not output.required}
            required = frozenset(selected) - optional
            for part, rows_by_name in zip(parts, part_rows, strict=True):
                self._store(self._cache, part, rows_by_name, required, filled)
        return [
            (part.sequence, chunk)
            for part, rows_by_name in zip(parts, part_rows, strict=True)
            for chunk in self._chunks(part, rows_by_name, filled)
        ]

    def _select(
        self, outputs: Mapping[str, Tensor], parts: Sequence[ScheduledRows]
    ) -> dict[str, Tensor]:
        num_tokens = sum(part.stop - part.start for part in parts)
        for name, output in self._outputs.items():
            if name in outputs:
                output.check(outputs[name], num_tokens)
            elif output.required and output.alignment.is_by_token:
                raise EngineError(
                    f"stage {self._stage!r} did not return {name!r}, which it declares"
                )
        outputs = {
            name: rows
            for name, rows in outputs.items()
            if self._is_taken(name) and (self._find_outputs or name in self._outputs)
        }
        for name in self._detector.observe(outputs, num_tokens, len(parts)):
            if self._cache is not None:
                self._cache.drop(self._stage, name)
        selected = {
            name: rows
            for name, rows in outputs.items()
            if self._detector.is_by_token(name) or self._detector.is_undecided(name)
        }
        self._has_outputs = self._gives_rows = self._has_outputs or bool(selected)
        return selected

    def _find_nonfinite(
        self, parts: Sequence[ScheduledRows], selected: Mapping[str, Tensor]
    ) -> None:
        tokens: set[int] = set()  # tokens of the step with a value that is not finite
        for name, rows in selected.items():
            if rows.is_floating_point():
                ratio = self._detector.ratio(name)
                tokens.update(row // ratio for row in _nonfinite_rows(rows))
        first = 0
        for part in parts if tokens else ():
            stop = first + part.stop - part.start
            nonfinite_token = min(
                (token for token in tokens if first <= token < stop), default=None
            )
            if nonfinite_token is not None:
                request = self._requests[part.sequence]
                request.finite = min(request.finite, part.start + nonfinite_token - first)
            first = stop

    def _store(
        self,
        cache: OutputCache,
        part: ScheduledRows,
        rows_by_name: Mapping[str, Tensor],
        required: frozenset[str],
        filled: dict[int, Mapping[str, Tensor]],
    ) -> None:
        """Store the blocks that the part completes, and add them to `filled`.

        Blocks with or after the first NaN or inf of the request are not stored, because stored rows
        are never overwritten.
        """
        request = self._requests[part.sequence]
        blocks: dict[int, dict[str, Tensor]] = {}
        for name in request.tails.keys() - rows_by_name.keys():
            del request.tails[name]
        for name, rows in rows_by_name.items():
            tail = request.tails.get(name)
            if tail is None or tail.stop != part.start:
                tail = request.tails[name] = _Tail(part.start, part.start, [])
            tail.parts.append(rows)
            tail.stop = part.stop
            for index, block in self._cut(tail, self._detector.ratio(name)):
                blocks.setdefault(index, {})[name] = block
        for index, block_rows in blocks.items():
            if (index + 1) * self._block_size <= request.finite:
                cache.put(self._path(part.sequence, index + 1), index, block_rows, required)
            if required <= block_rows.keys():
                filled[part.sequence.block_table()[index]] = block_rows
        if blocks:
            cache.touch(self._path(part.sequence, max(blocks) + 1))

    def _cut(self, tail: _Tail, ratio: int) -> list[tuple[int, Tensor]]:
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

    def _chunks(
        self,
        part: ScheduledRows,
        rows_by_name: Mapping[str, Tensor],
        filled: Mapping[int, Mapping[str, Tensor]],
    ) -> list[Chunk]:
        """Return the rows from the watermark to the part's end, and raise the watermark."""
        request = self._requests[part.sequence]
        chunks = []
        if request.start > request.watermark:
            chunks = self._stored_chunks(request, filled) if self._gives_rows else []
            request.watermark = request.start
        skip = max(0, request.watermark - part.start)
        if part.stop > request.watermark:
            for name, rows in rows_by_name.items():
                ratio = self._detector.ratio(name)
                chunks.append(Chunk(name, part.start + skip, rows[skip * ratio :], ratio))
            request.watermark = part.stop
        return chunks

    def _stored_chunks(
        self, request: _Request, filled: Mapping[int, Mapping[str, Tensor]]
    ) -> list[Chunk]:
        """Return the rows from the watermark to the first token that the request computes."""
        missing = [block for block in request.awaited if block not in filled]
        if missing:
            raise EngineError(
                f"stage {self._stage!r} did not return the rows of {len(missing)} blocks"
            )
        blocks = [*request.stored, *(filled[block] for block in request.awaited)]
        request.stored, request.awaited = [], ()
        chunks = []
        first = request.watermark // self._block_size * self._block_size
        for name in sorted({name for block in blocks for name in block}):
            ratio = self._detector.ratio(name)
            has_gaps = not all(name in block for block in blocks)  # the output is not required
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
    """Return the indices of rows with a NaN or an infinity in a tensor `[rows, ...]`.

    Several times faster than `isfinite`.

    >>> _nonfinite_rows(torch.tensor([[1.0, 3e38], [torch.inf, 0.0], [0.0, torch.nan]]))
    [1, 2]
    """
    mask = (rows - rows).unsqueeze(-1).flatten(1).sum(1).isnan()
    return mask.nonzero().flatten().tolist() if mask.any() else []


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
    """The declared rows of one stage as bytes for the tiers of its engine; a `BlockRows`.

    like: the stage's outputs for one token, `[ratio, ...]`. store_name: the stage's name in
    `cache`.
    """

    def __init__(
        self,
        spec: StageSpec,
        block_size: int,
        like: Mapping[str, Tensor],
        cache: OutputCache,
        store_name: str,
    ) -> None:
        outputs = [out for out in spec.gives if out.alignment.is_by_token and out.name in like]
        self._layouts = []
        for output in outputs:
            rows = like[output.name]
            shape = (block_size * output.alignment.ratio, *rows.shape[1:])
            self._layouts.append(_BlockLayout(output.name, rows.dtype, shape))
        self._required = frozenset(output.name for output in outputs if output.required)
        self._cache = cache
        self._store_name = store_name
        self.title = spec.name
        self.layout = f"stage {spec.name!r}, rows behind K/V: {[*map(tuple, self._layouts)]}"
        self.nbytes = sum(layout.nbytes for layout in self._layouts)

    def read(self, blocks: Sequence[UnsavedBlock]) -> list[bytes | None]:
        """Return the bytes of each block's rows, output by output; None if an output is missing."""
        if not self._layouts:
            return [b""] * len(blocks)
        data: list[bytes | None] = []
        first = 0
        for stop in range(1, len(blocks) + 1):
            # One lookup for consecutive blocks of one prefix.
            if stop == len(blocks) or blocks[stop].parent != blocks[stop - 1].name:
                path = BlockPath(self._store_name, *blocks[stop - 1].path())
                data += map(self._join, self._cache.find(path, blocks[first].depth))
                data += [None] * (stop - len(data))
                first = stop
        return data

    def _join(self, rows: Mapping[str, Tensor]) -> bytes | None:
        if not all(layout.fits(rows.get(layout.name)) for layout in self._layouts):
            return None
        return b"".join(raw_bytes(rows[layout.name]) for layout in self._layouts)

    def write(self, sequence: TokenSequence, first: int, blocks: Sequence[memoryview]) -> None:
        """Put the rows of consecutive blocks into the stage-output store, as far as they fit.

        first: the index of the first block in the sequence.
        """
        if not self._layouts:
            return
        keys = sequence.keys[: first + len(blocks)]
        path = BlockPath(self._store_name, sequence.namespace, keys)
        for index, data in enumerate(blocks, start=first):
            rows, start = {}, 0
            for layout in self._layouts:
                stop = start + layout.nbytes
                flat = np.frombuffer(data[start:stop], dtype=np.uint8).copy()
                rows[layout.name] = torch.from_numpy(flat).view(layout.dtype).view(layout.shape)
                start = stop
            self._cache.put(path, index, rows, self._required)
        self._cache.touch(path)
