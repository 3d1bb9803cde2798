"""The instructions by which compiled products multiply bytes."""

import pytest

from headstart import native

__all__ = ["BYTE_PRODUCTS", "use_byte_product"]

BYTE_PRODUCTS = ("avx2", "avx_vnni", "avx512")
"""The kernels' number of each is its place here."""


def use_byte_product(name: str) -> None:
    """Multiply by these instructions from now on; skip the test where the CPU lacks them.

    A test that calls it takes the fixture `own_byte_product`, which undoes it.
    """
    library, number = native.avx2_library(), BYTE_PRODUCTS.index(name)
    if library is None or number & ~library.headstart_native_vnni():
        pytest.skip(f"no such products here: {name}")
    library.headstart_native_use_vnni(number)
