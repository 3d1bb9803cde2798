"""The likeliest token without all logits is that of all logits, for ties and odd numbers too."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.native import library
from headstart.weights.bf16 import PackedWeight
from headstart.weights.greedy_head import GreedyHead, every_token, greedy_tokens, mask_logits
from tests.examples import at_least
from tests.native.foreign_rows import among_nonfinite

needs_kernels = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

pytestmark = pytest.mark.usefixtures("bf16_products")

BF16 = torch.bfloat16
NAN, INF = float("nan"), float("inf")
# Widths that differ from the kernels': fours of inputs, unrolled by 4, panels of 32 outputs.
INPUTS = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 896]))
OUTPUTS = st.one_of(st.integers(1, 70), st.sampled_from([255, 600, 3001]))
ROWS = st.one_of(st.integers(1, 9), st.just(33))
# Numbers that bounds, rounding or the hardware's flushing to zero may get wrong.
ODD = [0.0, -0.0, 1.0, -1.0, 1 + 2**-7, 2**-133, -(2**-127), 2**-120, 2**-70, 3e4, 2**51, 1e38]
SEEDS = st.integers(0, 2**31)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def choice(values: list[float], *shape: int, seed: int) -> Tensor:
    at = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(values)[at].to(BF16)


def check(weight: Tensor, x: Tensor) -> GreedyHead:
    """Return the head of this weight, after a check that it chooses the tokens of all logits."""
    head, x = GreedyHead(PackedWeight(weight)), among_nonfinite(x)
    logits = head.weight.multiply(x).float()
    tokens = head.choose(x)
    assert tokens == greedy_tokens(logits)
    for row, token in zip(logits, tokens, strict=True):
        assert (token == -1) == (not bool(row.max().isfinite()))
        assert token == -1 or token == int(row.argmax())
    return head


@needs_kernels
@at_least(60)
@given(ROWS, INPUTS, OUTPUTS, SEEDS, st.integers(1, 3))
def test_random_rows(rows: int, inputs: int, outputs: int, seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, x = noise(outputs, inputs, seed=seed), noise(rows, inputs, seed=seed + 1)
    tokens = check(weight, x).choose(x)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    chosen = exact.gather(1, torch.tensor(tokens).unsqueeze(1))
    off = 2**-8 * exact.abs() + 1e-5 * size  # of a logit in bfloat16, each way
    assert bool((exact - off <= chosen + off.gather(1, torch.tensor(tokens).unsqueeze(1))).all())


@needs_kernels
@at_least(60)
@given(ROWS, INPUTS, OUTPUTS, SEEDS, st.integers(1, 3))
def test_ties(rows: int, inputs: int, outputs: int, seed: int, distinct: int) -> None:
    """Some outputs are copies, some differ only beyond the rounding of bfloat16."""
    torch.set_num_threads(2)
    few = noise(distinct, inputs, seed=seed)
    weight = few[torch.randint(distinct, (outputs,), generator=torch.Generator().manual_seed(1))]
    x = noise(rows, inputs, seed=seed + 1)
    check(weight, x)
    check(weight * choice([1.0, 1 + 2**-7], outputs, 1, seed=seed), x)


@needs_kernels
@at_least(150)
@given(st.integers(1, 5), INPUTS, OUTPUTS, SEEDS, st.data())
def test_odd_numbers(rows: int, inputs: int, outputs: int, seed: int, data: st.DataObject) -> None:
    """Zeros, denormal numbers, outliers, and sums that are not numbers."""
    some = st.lists(st.sampled_from([*ODD, INF, -INF, NAN]), min_size=1, max_size=4)
    weight = choice([1.0, *data.draw(some)], outputs, inputs, seed=seed)
    x = choice([1.0, *data.draw(some)], rows, inputs, seed=seed + 1)
    if data.draw(st.booleans()):
        weight = weight * noise(outputs, inputs, seed=seed)
    if data.draw(st.booleans()):
        x = x * noise(rows, inputs, seed=seed + 2)
    check(weight, x)


@needs_kernels
@at_least(60)
@given(INPUTS, SEEDS, st.sampled_from([2.0**-60, 2.0**-20, 1.0, 2.0**20]), st.integers(0, 9))
def test_near_ties_of_all_sizes(inputs: int, seed: int, size: float, outliers: int) -> None:
    """Outputs differ by a few units in the last place; some inputs are much larger."""
    one = noise(1, inputs, seed=seed).expand(200, inputs)
    weight = one * choice([1.0, 1 - 2**-8, 1 + 2**-7], 200, inputs, seed=seed + 1) * size
    x = noise(6, inputs, seed=seed + 2)
    check(weight, x)
    x[:, :outliers] *= 300
    check(weight, x[:2])


@needs_kernels
@at_least(100)
@given(ROWS, INPUTS, OUTPUTS, SEEDS, st.sampled_from([0.0, 0.003, 0.5, 0.99, 1.0]), st.booleans())
def test_only_allowed_tokens_are_chosen(
    rows: int, inputs: int, outputs: int, seed: int, share: float, grouped: bool
) -> None:
    """Few or most tokens, whole panels without one, rows with none, rows with all."""
    torch.set_num_threads(2)
    weight, x = noise(outputs, inputs, seed=seed), noise(rows, inputs, seed=seed + 1)
    x = among_nonfinite(x)
    draw = np.random.default_rng(seed)
    allowed_groups = np.repeat(draw.random((rows, outputs // 64 + 1)) < share, 64, axis=1)[
        :, :outputs
    ]
    bits = allowed_groups if grouped else draw.random((rows, outputs)) < share
    allowed = np.stack([every_token(outputs)] * rows)
    allowed[:, : (outputs + 7) // 8] = np.packbits(bits, axis=1, bitorder="little")
    if rows > 2:
        allowed[1] = every_token(outputs)
    head = GreedyHead(PackedWeight(weight))
    logits = head.weight.multiply(x).float()
    if rows > 2:
        bits[1] = True
    masked = torch.where(torch.from_numpy(bits), logits, float("-inf"))
    assert head.choose(x, allowed) == greedy_tokens(masked)


@pytest.mark.parametrize("size", [1, 8, 31, 33, 600, 3001])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_logits_of_banned_tokens_are_minus_infinity(size: int, share: float) -> None:
    """Each row follows its mask for any logits; a row without banned tokens is unchanged."""
    draw = np.random.default_rng(size)
    bits = draw.random((4, size)) < share
    bits[2] = True
    allowed = np.stack([np.zeros_like(every_token(size))] * 4)
    allowed[:, : (size + 7) // 8] = np.packbits(bits, axis=1, bitorder="little")
    logits = torch.from_numpy(draw.standard_normal((4, size), dtype=np.float32))
    logits[:, ::5], logits[:, ::7] = INF, NAN
    expected = torch.where(torch.from_numpy(bits), logits, -INF)
    mask_logits(logits, allowed)
    assert torch.equal(logits.nan_to_num(123.0, 456.0), expected.nan_to_num(123.0, 456.0))


@needs_kernels
def test_all_logits_are_computed_where_all_can_be_the_largest() -> None:
    """The head then computes all logits for 1 step, then 3, then 7, until its search succeeds."""
    weight, bad, good = noise(600, 64, seed=0), torch.zeros(1, 64, dtype=BF16), noise(1, 64, seed=1)
    head = GreedyHead(PackedWeight(weight))
    expected = greedy_tokens(head.weight.multiply(good).float())
    tried: list[bool] = []
    screened = head._choose

    def spy(*arguments: object) -> None:
        tried[-1] = True
        screened(*arguments)

    head._choose = spy
    for x, answer in (*[(bad, [0])] * 12, *[(good, expected)] * 5):
        tried.append(False)
        assert head.choose(x) == answer
    assert [step for step, one in enumerate(tried) if one] == [0, 2, 6, 14, 15, 16]


@needs_kernels
def test_bounds_leave_few_outputs_to_compute() -> None:
    """A row may need an eighth of 600 panels of random weights; it needs a few."""
    head = GreedyHead(PackedWeight(noise(19_200, 256, seed=0)))
    x = noise(40, 256, seed=1)
    x[:, :3] *= 30  # outliers, as hidden rows of real models have them
    head.choose(x)
    assert head._pause == 0


@needs_kernels
def test_no_rows() -> None:
    assert GreedyHead(PackedWeight(noise(40, 8, seed=0))).choose(noise(0, 8, seed=1)) == []


def test_rows_whose_largest_logit_is_not_finite() -> None:
    """Regression: they were answered with token 0, or with the token of the invalid number."""
    rows = [
        [0.0, 2.0, -INF, 2.0],
        [0.0, NAN, 1.0, 5.0],
        [1.0, 2.0, INF, 0.0],
        [-INF] * 4,
        [NAN] * 4,
        [-INF, -INF, -3e38, -INF],
    ]
    assert greedy_tokens(torch.tensor(rows)) == [1, -1, -1, -1, -1, 2]
    assert greedy_tokens(torch.empty(0, 4)) == []


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 7])  # of one tile, and of two
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_weight_or_hidden_number_that_is_not_finite(rows: int, bad: float) -> None:
    """It is among many panels, where all others are excluded by their bounds."""
    weight, x = noise(3001, 64, seed=0), noise(rows, 64, seed=1)
    expected = check(weight, x).choose(x)
    assert -1 not in expected
    weight[2900, 5] = bad
    reached = x[:, 5] * torch.tensor(bad).sign() > 0 if bad == bad else torch.ones(rows) > 0
    tokens = check(weight, x).choose(x)
    assert [token == -1 for token in tokens] == reached.tolist()
    weight[2900, 5], x[-1, 9] = 1.0, bad
    assert check(weight, x).choose(x)[-1] == -1


@needs_kernels
def test_rows_of_another_width_or_dtype_are_refused() -> None:
    head = GreedyHead(PackedWeight(noise(40, 8, seed=0)))
    for x in (noise(2, 7, seed=1), noise(2, 8, seed=1).float(), noise(2, 8, seed=1).to("meta")):
        with pytest.raises(ValueError, match=r"allowed: 8 in torch\.bfloat16 on cpu"):
            head.choose(x)
