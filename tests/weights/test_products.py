"""The table of products, also for other machines than this one."""

import pytest
import torch

from headstart.weights import products
from headstart.weights.products import Product, WeightForm, choose_product

CPU = torch.device("cpu")
FORMS: tuple[WeightForm, ...] = ("bfloat16", "int8", "int8 in groups", "fewer bits")
# The product for a weight of each form: rows in bfloat16, then in float32.
MACHINES: dict[str, tuple[tuple[Product, ...], tuple[Product, ...]]] = {
    "AMX": (
        ("bfloat16", "bfloat16", "integers", "bfloat16"),
        ("float32", "integers", "integers", "integers"),
    ),
    "AVX-512": (
        ("bfloat16", "integers", "integers", "integers"),
        ("float32", "integers", "integers", "integers"),
    ),
    "AVX2": (
        ("torch", "integers", "integers", "integers"),
        ("float32", "integers", "integers", "integers"),
    ),
    "FBGEMM": (("torch", "fbgemm", "torch", "torch"), ("torch", "fbgemm", "torch", "torch")),
    "torch": (("torch",) * 4, ("torch",) * 4),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_product_of_each_weight(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level = {"AMX": 3, "AVX-512": 2, "AVX2": 1}.get(machine, 0)
    monkeypatch.setattr(products, "level", lambda: level)
    monkeypatch.setattr(products, "library", lambda: object() if level >= 2 else None)
    monkeypatch.setattr(products, "avx2_library", lambda: object() if level else None)
    monkeypatch.setattr(products, "has_fbgemm", lambda: machine != "torch")
    for dtype, expected in zip((torch.bfloat16, torch.float32), MACHINES[machine], strict=True):
        assert tuple(choose_product(form, dtype, CPU) for form in FORMS) == expected
    assert choose_product("bfloat16", torch.float16, CPU) == "torch"
    other = torch.device("meta")
    assert {choose_product(form, torch.float32, other) for form in FORMS} == {"torch"}
