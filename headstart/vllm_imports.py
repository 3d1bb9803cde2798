"""Imports of vLLM's modules and names: what has no file works as well, or says what to do instead.

Python asks the finder here last of all. The tables are loaded when something is missing.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dis import opmap
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import FrameType, ModuleType

from headstart.imports import load_module

__all__ = ["find_names", "serve_modules"]

_TABLES = "headstart.frontend.vllm_api.modules"
_IMPORT_FROM = opmap["IMPORT_FROM"]


def serve_modules() -> None:
    """From here on vLLM's modules may be imported under our name."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def find_names(
    module: str,
    names: Sequence[str],
    homes: Mapping[str, str] | None = None,
    values: Mapping[str, Callable[[], object]] | None = None,
) -> Callable[[str], object]:
    """A module's `__getattr__`: finds names when first used, and says what to do without others.

    names: all that the module has. homes: the modules that those come from which it does not
    define. values: names whose value is read at each use. An import of any other name gets an
    ImportError, any other look an AttributeError: an import would replace that by an error of its
    own, and `hasattr` lets no ImportError pass.
    """

    def find(name: str) -> object:
        if homes is not None and name in homes:
            value: object = getattr(load_module(homes[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        if values is not None and name in values:
            return values[name]()
        if name.startswith("_"):  # what Python asks of a module, which must not load the tables
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        caller = sys._getframe(1)
        imported = caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM
        raise load_module(_TABLES).explain_missing(module, name, names, imported=imported)

    return find


class _Finder(MetaPathFinder):
    """Finds the modules of vLLM that have no file here; raises for those that are not here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "headstart" or f"{_TABLES}.".startswith(f"{fullname}."):
            return None  # the tables themselves are missing where the cache is installed alone
        tables = load_module(_TABLES)
        if name in tables.HOMES:
            is_package = any(other.startswith(f"{name}.") for other in tables.MODULES.rows)
            return spec_from_loader(fullname, _Loader(tables.HOMES[name]), is_package=is_package)
        missing = tables.missing_module(fullname)
        if missing is None or _is_looked_for():
            return None
        raise missing


def _is_looked_for() -> bool:
    """Whether `importlib.util.find_spec` asks, which has None for what is not there."""
    asking: FrameType | None = sys._getframe()
    for _ in range(3):  # this function, the finder's, and the one that asks finders
        asking = asking.f_back if asking is not None else None
    return asking is not None and asking.f_globals.get("__name__") == "importlib.util"


class _Loader(Loader):
    """Makes a module whose names come from others."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"The names of `vllm{module.__name__.removeprefix('headstart')}`."
        find = find_names(module.__name__, list(self._homes), self._homes)
        vars(module).update(__getattr__=find, __all__=list(self._homes))
