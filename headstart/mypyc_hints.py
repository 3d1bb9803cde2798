"""Hints in `headstart.cache` for mypyc, which compiles that package for some wheels.

In interpreted modules, `mypyc_attr` has no effect and needs no package.
"""

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Return a decorator without effect."""
        return lambda decorated: decorated
