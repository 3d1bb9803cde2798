"""Openings of docstrings."""

import ast
import re

import pytest

from tests.house.source import Module, read_modules

# Words that begin a clause where a reader expects a verb (functions) or a noun (classes, modules).
FORBIDDEN = re.compile(r"\s*(What|Who|Whom|Whose|How|Whether|Why|As|Of|That|Those|The same)\b")

FOLDERS = ("headstart", "bench", "tools", "docs/figures_src", "tests")


def forbidden_openings(module: Module) -> list[str]:
    """List the docstrings, those of attributes included, that begin with a forbidden word."""
    return [
        f"{module.name}:{node.lineno}: {node.value.value.strip().splitlines()[0]}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and FORBIDDEN.match(node.value.value)
    ]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    modules = [module for folder in FOLDERS for module in read_modules(folder).values()]
    assert [opening for module in modules for opening in forbidden_openings(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""What a request holds."""',
        'class A:\n    """Whether it runs."""',
        'limit: int\n"""How many run at once."""',
    ],
)
def test_a_forbidden_opening_is_found(text: str) -> None:
    assert len(forbidden_openings(Module("m", text))) == 1
