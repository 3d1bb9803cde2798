"""Sampling filters compared with transformers' warpers, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.engine.sampling import (
    apply_min_p,
    apply_repetition_penalty,
    apply_top_k,
    apply_top_p,
)

VOCABULARY = 40


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-6])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_top_p_over_the_top_equals_a_full_sort(top_p: float, scale: float) -> None:
    """The vocabulary is larger than the part that is sorted first; flat rows need the full sort."""
    scores = scale * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    ids = torch.LongTensor(4, 0)
    expected = TopPLogitsWarper(top_p)(ids, scores)
    assert torch.equal(apply_top_p(scores, top_p), expected)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_as_many_of_equal_tokens(top_p: float) -> None:
    """Logits in bfloat16 are often equal; sorts differ in which of equal tokens remain."""
    scores = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    expected = TopPLogitsWarper(top_p)(torch.LongTensor(4, 0), scores)
    assert torch.equal(apply_top_p(scores, top_p).sort().values, expected.sort().values)


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 30.0]),  # 0: all are as likely
    count=st.integers(1, VOCABULARY + 2),
    share=st.floats(0, 1),
    penalty=st.floats(1e-9, 1e9),
    seen=st.lists(st.integers(0, VOCABULARY + 3), min_size=1),
)
def test_warpers_have_the_bits_of_transformers(
    seed: int, scale: float, count: int, share: float, penalty: float, seen: list[int]
) -> None:
    """Bits are equal also for ids that the LM head lacks and for rows with masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, VOCABULARY, generator=generator)
    ids = torch.LongTensor([seen, seen])
    scores[1, seed % VOCABULARY] = float("-inf")
    for own, theirs in (
        (apply_min_p(scores, share), MinPLogitsWarper(share)),
        (apply_top_k(scores, count), TopKLogitsWarper(count)),
        (apply_repetition_penalty(scores, ids, penalty), RepetitionPenaltyLogitsProcessor(penalty)),
    ):
        assert torch.equal(own, theirs(ids, scores))
