"""Each way in which compiled products multiply bytes."""

import pytest

from headstart import native

__all__ = ["BYTE_PRODUCTS", "use_byte_product"]

BYTE_PRODUCTS = ("avx2", "avx_vnni", "avx512")
"""The kernels' number of each is its place here."""


def use_byte_product(name: str) -> None:
    """Multiply in this way from now on; skips the test where the CPU cannot.

    A test that calls it takes the fixture `own_byte_product`, which undoes it.
    """
    found, number = native.avx2_library(), BYTE_PRODUCTS.index(name)
    if found is None or number & ~found.headstart_native_vnni():
        pytest.skip(f"no such products here: {name}")
    found.headstart_native_use_vnni(number)
