"""Size limits of files and functions."""

import ast

import pytest

from tests.house.source import ROOT, FunctionNode, Module, read_modules

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8  # outside the public API, which lists all parameters of users
MAX_OPTION_FIELDS = 82  # of all dataclasses of options
MAX_COMPILED_LINES = 6_000  # of C++, all files together

# Modules of the public API: their functions take as many parameters as users need.
PUBLIC_API = {
    "headstart.frontend.async_llm",
    "headstart.frontend.facade",
    "headstart.frontend.llm",
    "headstart.engine.params",
    "headstart.omni.omni",
}

# recipes/, which builds the embedded model, is outside these budgets.
FOLDERS = ("headstart", "bench", "tools", "docs/figures_src")
MODULES = {name: module for folder in FOLDERS for name, module in read_modules(folder).items()}
TESTS = read_modules("tests")


def count_lines(function: FunctionNode) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def count_parameters(function: FunctionNode) -> int:
    """Count the parameters that a caller may pass, without `self` and `cls`."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = [arguments.vararg, arguments.kwarg]
    return len([a for a in named if a.arg not in ("self", "cls")]) + len([a for a in extra if a])


def count_fields(module: Module) -> int:
    """Count the fields of the dataclasses named *Config and *Options."""
    return sum(
        isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and node.name.endswith(("Config", "Options"))
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for statement in node.body
    )


def over_budget(module: Module) -> list[str]:
    complaints = []
    if module.num_lines > MAX_FILE_LINES:
        complaints.append(f"{module.num_lines} lines, at most {MAX_FILE_LINES}")
    for function in module.functions:
        lines, parameters = count_lines(function), count_parameters(function)
        if lines > MAX_FUNCTION_LINES:
            complaints.append(f"{function.name}: {lines} lines, at most {MAX_FUNCTION_LINES}")
        if parameters > MAX_PARAMETERS and module.name not in PUBLIC_API:
            complaints.append(f"{function.name}: {parameters} parameters, at most {MAX_PARAMETERS}")
    return complaints


@pytest.mark.parametrize("name", MODULES)
def test_module_is_within_its_budgets(name: str) -> None:
    assert over_budget(MODULES[name]) == []


@pytest.mark.parametrize("name", TESTS)
def test_a_file_of_tests_is_within_its_lines(name: str) -> None:
    assert TESTS[name].num_lines <= MAX_FILE_LINES


def test_configuration_is_within_its_budget() -> None:
    fields = {name: count_fields(module) for name, module in MODULES.items()}
    assert sum(fields.values()) <= MAX_OPTION_FIELDS, fields


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n" * 601, "601 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "f: 61 lines"),
        ("class A:\n    def f(self, a, b, c, *d, e, f, g, h, i): pass", "f: 9 parameters"),
    ],
)
def test_a_module_over_its_budget_is_found(text: str, complaint: str) -> None:
    assert [line for line in over_budget(Module("m", text)) if line.startswith(complaint)]


def test_compiled_code_stays_within_its_budget() -> None:
    files = [*(ROOT / "headstart" / "native").rglob("*")]
    lines = [len(path.read_text().splitlines()) for path in files if path.suffix in (".cpp", ".h")]
    assert len(lines) > 30
    assert sum(lines) < MAX_COMPILED_LINES
