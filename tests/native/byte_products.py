"""Each way in which compiled products multiply bytes."""

import pytest

from headstart import native

__all__ = ["BYTE_PRODUCTS", "use_byte_product"]

BYTE_PRODUCTS = ("avx2", "avx_vnni", "avx512")
"""By the number that the kernels have for them."""


def use_byte_product(name: str) -> None:
    """Multiply in this way from now on; skips where the CPU cannot.

    `own_byte_product` is to be among the test's fixtures.
    """
    found, number = native.avx2_library(), BYTE_PRODUCTS.index(name)
    if found is None or number & ~found.headstart_native_vnni():
        pytest.skip(f"no such products here: {name}")
    found.headstart_native_use_vnni(number)
