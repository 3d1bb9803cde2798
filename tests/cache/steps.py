"""Helpers that drive a manager as an engine does, one step at a time."""

from headstart.cache import BlockHasher, CacheConfig, KVCacheManager, MultiModalItem, TokenSequence


def make_manager(**options: object) -> KVCacheManager:
    """Return a manager of ten blocks of four tokens by default."""
    options = {"num_blocks": 10, "block_size": 4} | options
    config = CacheConfig(**options)  # type: ignore[arg-type]
    return KVCacheManager(config, BlockHasher(config.block_size))


def admit(manager: KVCacheManager, sequence: TokenSequence, count: int | None = None) -> int:
    """Allocate `count` tokens, or all, without a commit; return the number of hit tokens."""
    match = manager.get_computed_blocks(sequence)
    left = len(sequence.token_ids) - match.num_tokens
    assert manager.allocate_slots(sequence, left if count is None else count, match) is not None
    manager.check()
    return match.num_tokens


def start(
    manager: KVCacheManager,
    name: str,
    tokens: list[int],
    *,
    adapter: str | None = None,
    salt: str | None = None,
    items: tuple[MultiModalItem, ...] = (),
) -> TokenSequence:
    """Compute a request's whole prompt in a separate step."""
    sequence = TokenSequence(name, tokens, adapter=adapter, salt=salt, items=items)
    admit(manager, sequence)
    manager.commit_step()
    return sequence


def decode(manager: KVCacheManager, sequence: TokenSequence, *tokens: int) -> None:
    """Generate these tokens, one per step."""
    for token in tokens:
        sequence.append(token)
        assert manager.append_slots(sequence)
        manager.check()
        manager.commit_step()


def finish(
    manager: KVCacheManager,
    name: str,
    tokens: list[int],
    *,
    adapter: str | None = None,
    salt: str | None = None,
    items: tuple[MultiModalItem, ...] = (),
) -> list[int]:
    """Run a request from arrival to end; return its block table."""
    sequence = start(manager, name, tokens, adapter=adapter, salt=salt, items=items)
    table = list(sequence.block_ids)
    manager.free(sequence)
    manager.check()
    return table


def hits(manager: KVCacheManager, tokens: list[int]) -> int:
    """Return how many tokens a request with this prompt would not have to compute."""
    return manager.get_computed_blocks(TokenSequence("probe", tokens)).num_tokens


def free_ids(manager: KVCacheManager) -> list[int]:
    """Return the ids on the free queue, next to be reused first."""
    return [block.block_id for block in manager.pool.free]


def cached_ids(manager: KVCacheManager) -> list[int]:
    """Return the ids of the blocks whose content can be hit."""
    return [block.block_id for block in manager.pool.blocks if block.node is not None]


def counts(manager: KVCacheManager) -> tuple[object, ...]:
    """Return all counters of the statistics of admissions."""
    stats = manager.stats
    first = (stats.requests, stats.queried_tokens, stats.hit_tokens, dict(stats.missed))
    return (*first, stats.resumed_requests, stats.resumed_queried_tokens, stats.resumed_hit_tokens)
