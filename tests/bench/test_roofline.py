"""The minimal time of a load matches figures calculated by hand."""

import pytest
from roofline import Limits, Pass, floor, prefill
from shapes import SHAPES

ONE_CORE = Limits(gemm=460, memory=40)
QWEN = SHAPES["qwen2.5-0.5b"]


def test_a_cold_document_is_limited_by_products() -> None:
    least = floor([(1, prefill(0, 3040))], QWEN, ONE_CORE)
    assert least.seconds == pytest.approx(5.6 * 23 / 24, rel=0.01)  # the last layer's for K and V
    assert least.limit == "GEMM"


def test_one_token_is_limited_by_reading_the_weights() -> None:
    least = floor([(1, prefill(3000, 1))], QWEN, ONE_CORE)
    assert least.seconds == pytest.approx(0.026 - 0.136 / 40, rel=0.03)  # half of the head
    assert least.limit == "memory"


def test_passes_add_up() -> None:
    first, second = prefill(0, 16), Pass(4, 4, 400, 400)
    both = floor([(2, first), (3, second)], QWEN, ONE_CORE).seconds
    alone = [floor([(1, part)], QWEN, ONE_CORE).seconds for part in (first, second)]
    assert both == pytest.approx(2 * alone[0] + 3 * alone[1])


def test_a_prefix_read_once_costs_less_memory_than_one_read_by_each() -> None:
    shared, own = Pass(2, 2, 60_000, 30_000), Pass(2, 2, 60_000, 60_000)
    assert floor([(1, shared)], QWEN, ONE_CORE) < floor([(1, own)], QWEN, ONE_CORE)
