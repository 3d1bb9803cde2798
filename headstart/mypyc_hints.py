"""What the modules of `headstart.cache` tell mypyc, which compiles them for some wheels.

Interpreted, as they are everywhere else, `mypyc_attr` changes nothing and needs no package.
"""

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Leaves a class as it is."""
        return lambda decorated: decorated
