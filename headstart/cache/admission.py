"""The result of an admission, and the checks before it."""

from typing import NamedTuple

from headstart.cache.lookup import ComputedBlocks
from headstart.cache.pool import BlockPool
from headstart.cache.sequence import TokenSequence
from headstart.cache.stats import MissExplanation
from headstart.errors import CacheError


class RowCopy(NamedTuple):
    """Copy the K/V of the first `num_rows` slots of one block to another, before the step."""

    source_block: int
    target_block: int
    num_rows: int


class Allocation(NamedTuple):
    """A sequence was admitted: rows to copy before the step runs, and why it hit no more."""

    copies: tuple[RowCopy, ...]
    missed: MissExplanation


def check_admission(
    sequence: TokenSequence, num_new_tokens: int, computed: ComputedBlocks | None, pool: BlockPool
) -> None:
    """Raise CacheError if the sequence cannot be admitted to the pool with this lookup."""
    name = sequence.request_id
    if sequence.blocks:
        raise CacheError(f"sequence {name!r} holds blocks of another manager")
    start = 0
    if computed is not None:
        if computed.sequence is not sequence:
            raise CacheError(f"the lookup given for {name!r} is another sequence's")
        check_source(computed, pool)
        if computed.version != pool.version:
            raise CacheError(f"the lookup of {name!r} is older than an eviction: look again")
        start = computed.num_tokens
    check_count(sequence, num_new_tokens, start)


def check_source(computed: ComputedBlocks, pool: BlockPool) -> None:
    """Raise CacheError if the lookup is another pool's."""
    if computed.source is not pool.index:
        name = computed.sequence.request_id
        raise CacheError(f"the lookup of {name!r} is another manager's: look again")


def check_count(sequence: TokenSequence, num_new_tokens: int, start: int) -> None:
    """Raise CacheError unless from token `start` on the sequence has so many tokens."""
    left = len(sequence.token_ids) - start
    if not 1 <= num_new_tokens <= left:
        raise CacheError(
            f"{num_new_tokens} slots asked for {sequence.request_id!r}; "
            f"from 1 to {left} tokens are left"
        )
