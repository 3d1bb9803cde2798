"""The source tree for the house rules: modules, their functions and imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "headstart"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module: dotted name, line, and whether a function imports it."""

    module: str
    line: int
    in_function: bool


class Module:
    """One Python file, parsed when a rule first reads its tree."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def functions(self) -> list[FunctionNode]:
        return [node for node in ast.walk(self.tree) if isinstance(node, FunctionNode)]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, in_function=False))

    @property
    def package(self) -> str:
        """Package name: `cache` for headstart.cache.pool, or the module's name outside packages."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""


@cache
def read_modules(folder: str) -> dict[str, Module]:
    """Return all modules under `folder` by dotted name; a package has its folder's name."""
    modules = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        modules[name] = Module(name, path.read_text(encoding="utf-8"))
    return modules


def _imports(node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, in_function)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute here"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, in_function)
        else:
            yield from _imports(child, in_function or isinstance(child, FunctionNode))
