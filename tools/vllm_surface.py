"""Read vLLM's Python surface from its source text into JSON, without importing it.

    python tools/vllm_surface.py .../site-packages/vllm > tests/data/vllm_surface.json

The JSON has parameters of functions and fields of classes, each with its default as Python source
(null if it is required, "..." if it is computed), public names of classes, the flags of
`vllm serve`, and the modules up to the second level.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

FOLDERS = ("entrypoints", "engine", "v1/engine", "config", "inputs", "lora", "outputs")
FILES = ("__init__.py", "sampling_params.py", "outputs.py", "logprobs.py", "_version.py")

CALLS = {
    "LLM": ("__init__", "generate", "chat", "beam_search", "reset_prefix_cache"),
    "AsyncLLM": ("generate", "reset_prefix_cache"),
    "LLMEngine": ("add_request", "reset_prefix_cache"),
}
FIELDS = ("EngineArgs", "FrontendArgs", "ChatCompletionRequest",
          "CompletionRequest", "SamplingParams", "BeamSearchParams", "LoRARequest", "TextPrompt",
          "TokensPrompt", "CompletionOutput", "Logprob", "RequestOutputKind",
          "StructuredOutputsParams")  # fmt: skip
FLAGS = ("engine/arg_utils.py", "entrypoints/common/cli_args.py")
LEVELS = 2
METHODS = ("LLM", "AsyncLLM", "LLMEngine", "SamplingParams", "CompletionOutput")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Surface = dict[str, Any]


class Source:
    """The classes and the public names of a package's files."""

    def __init__(self, package: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        files = [package / name for name in FILES]
        files += [path for folder in FOLDERS for path in sorted((package / folder).rglob("*.py"))]
        for path in filter(Path.is_file, files):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)
        self.exports = _exports(package / "__init__.py")

    def lineage(self, name: str) -> list[ast.ClassDef]:
        """Return a class and its known base classes, itself first."""
        found = [self.classes[name]]
        for base in found[0].bases:
            base_name = ast.unparse(base)
            if base_name in self.classes:
                found += self.lineage(base_name)
        return found

    def function(self, owner: str, name: str) -> FunctionNode:
        """Return a method of a class or of its bases."""
        for node in self.lineage(owner):
            for statement in node.body:
                if isinstance(statement, FunctionNode) and statement.name == name:
                    return statement
        raise SystemExit(f"{owner} has no {name}")

    def parameters(self, owner: str, name: str) -> dict[str, str | None]:
        """Return the parameters of a function in order; of several overloads, of the last."""
        arguments = self.function(owner, name).args
        plain = [*arguments.posonlyargs, *arguments.args][1:]
        missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
        defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
        pairs = zip([*plain, *arguments.kwonlyargs], defaults, strict=True)
        return {
            argument.arg: None if default is None else self.default(default)
            for argument, default in pairs
        }

    def fields(self, name: str) -> dict[str, str | None]:
        """Return the annotated fields, inherited ones first, or the members of an enumeration."""
        found: dict[str, str | None] = {}
        for node in reversed(self.lineage(name)):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    value = statement.value
                    found[statement.target.id] = self.default(value) if value else None
                elif isinstance(statement, ast.Assign) and isinstance(
                    statement.targets[0], ast.Name
                ):
                    found[statement.targets[0].id] = self.default(statement.value)
        return {field: value for field, value in found.items() if not field.startswith("_")}

    def default(self, value: ast.expr) -> str:
        """Return a default as source text; a reference to another class's field is resolved."""
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            return self.default_of(value.value.id, value.attr)
        if isinstance(value, ast.Call):
            return self.called_default(value)
        try:
            return repr(ast.literal_eval(value))
        except ValueError:
            return "..."

    def default_of(self, owner: str, name: str) -> str:
        """Return the default of a field of a class."""
        for node in self.lineage(owner) if owner in self.classes else []:
            for statement in node.body:
                target = getattr(statement, "target", None)
                if isinstance(target, ast.Name) and target.id == name:
                    value = getattr(statement, "value", None)
                    return self.default(value) if value is not None else "..."
        return "..."

    def called_default(self, value: ast.Call) -> str:
        """Return the default of `get_field(Config, "name")` or `Field(default=...)`."""
        texts = [ast.unparse(argument).strip("'\"") for argument in value.args]
        if ast.unparse(value.func) == "get_field" and len(texts) == 2:
            return self.default_of(texts[0], texts[1])
        for keyword in value.keywords:
            if keyword.arg == "default":
                return self.default(keyword.value)
            if keyword.arg == "default_factory":
                return {"dict": "{}", "list": "[]", "set": "set()"}.get(
                    ast.unparse(keyword.value), "..."
                )
        return "..."

    def public_names(self, name: str) -> list[str]:
        """Return the public methods, properties and attributes that `__init__` sets."""
        found: dict[str, None] = {}
        for node in self.lineage(name):
            for statement in node.body:
                if isinstance(statement, FunctionNode):
                    found[statement.name] = None
                    if statement.name == "__init__":
                        found |= dict.fromkeys(_attributes(statement))
        return [one for one in found if not one.startswith("_")]


def _attributes(function: FunctionNode) -> list[str]:
    """Return the attributes that a function sets on `self`."""
    return [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    ]


def _exports(path: Path) -> list[str]:
    """Return the names in a file's `__all__`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def read_surface(package: Path) -> Surface:
    """Return the surface of the package."""
    source = Source(package)
    surface: Surface = {"vllm": source.exports}
    for owner, names in CALLS.items():
        for name in names:
            surface[f"{owner}.{name}()"] = source.parameters(owner, name)
    for name in FIELDS:
        surface[name] = source.fields(name)
    surface["RequestOutput"] = source.parameters("RequestOutput", "__init__")
    for name in METHODS:
        surface[f"{name}."] = source.public_names(name)
    surface["inputs"] = _exports(package / "inputs" / "__init__.py")
    surface["flags"] = [flags for path in FLAGS for flags in read_flags(package / path)]
    surface["modules"] = read_modules(package)
    return surface


def read_flags(path: Path) -> list[list[str]]:
    """Return the names of each flag that is added to a parser with literal names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found.append([str(name) for name in names])
    return [names for names in found if names]


def read_modules(package: Path) -> list[str]:
    """Return the dotted names of public modules, down to the second level."""
    found = set()
    for path in package.rglob("*.py"):
        names = path.relative_to(package).with_suffix("").parts
        parts = names[:-1] if names[-1] == "__init__" else names
        if not any(part.startswith("_") for part in parts):
            found |= {".".join(parts[:depth]) for depth in range(1, min(len(parts), LEVELS) + 1)}
    return sorted(found)


if __name__ == "__main__":
    json.dump(read_surface(Path(sys.argv[1])), sys.stdout, indent=1)
    print()
