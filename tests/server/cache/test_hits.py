"""Hits of cached prefixes by recent prompts match a count over the prompts' tokens."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import Namespace, TokenSequence, read_tokens
from headstart.server.cache.live import count_hits
from headstart.server.cache.traffic import Traffic
from tests.cache.steps import finish, make_manager

SIZE = 2
PROMPTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
    ),
    max_size=12,
)


@given(PROMPTS, st.sampled_from([8, 12, 200]))
def test_hits_count_prompts_that_hit_a_prefixs_first_block(
    prompts: list[tuple[str | None, list[int]]], num_blocks: int
) -> None:
    """A prefix whose blocks were evicted from a small pool has no hits."""
    manager = make_manager(num_blocks=num_blocks, block_size=SIZE)
    traffic = Traffic()
    for number, (salt, tokens) in enumerate(prompts):
        probe = TokenSequence("probe", tokens, salt=salt)
        num_cached = manager.get_computed_blocks(probe).num_tokens
        finish(manager, f"r{number}", tokens, salt=salt)
        traffic.add(f"r{number}", Namespace(None, salt), tokens, num_cached, None)
    stretches = manager.path_segments()
    hits = count_hits(stretches, range(len(stretches)), traffic.recent, SIZE)
    for i, stretch in enumerate(stretches):
        above = stretch.parent
        if not stretch.keys or (above >= 0 and not stretches[above].keys):
            assert hits[i] == 0
            continue
        begin: list[int] = read_tokens(stretch.keys[0])
        while above >= 0:
            begin = [t for key in stretches[above].keys for t in read_tokens(key)] + begin
            above = stretches[above].parent
        expected = sum(
            entry.namespace == stretch.namespace
            and entry.tokens[: len(begin)].tolist() == begin
            and entry.num_cached >= len(begin)
            and len(begin) % SIZE == 0
            for entry in traffic.recent
        )
        assert hits[i] == expected
