"""Imports between packages: allowed directions, and no cycles.

    cache      stdlib and numpy            tiers    + cache          replay   + cache, tiers,
                                                                                cluster's core
    native     torch, no other package     attention  + native       weights  + native
    models     native, attention, weights  engine     models, weights, attention, tiers, cache
    frontend   engine                      omni       frontend, engine, models, cache
    server     frontend, engine, omni      cluster  anything; its core only cache

The core of cluster is the prefix index and the router, with their dependencies.

Every package may import `headstart.errors`, `.validation`, `.version`, `.imports`, `.machine`
and `.mypyc_hints`; the command line may import all packages.
"""

import subprocess
import sys

import pytest

from tests.house.source import PACKAGE, ROOT, Module, read_modules

MAY_IMPORT = {
    "cache": set(),
    "tiers": {"cache"},
    "replay": {"cache", "tiers", "cluster"},
    "native": set(),
    "attention": {"native"},
    "weights": {"native"},
    "models": {"native", "attention", "weights"},
    "engine": {"models", "weights", "attention", "tiers", "cache"},
    "frontend": {"engine", "models", "weights", "attention", "tiers", "cache"},
    "omni": {"frontend", "engine", "models", "attention", "cache"},
    "server": {"frontend", "engine", "omni", "cache"},
    "cluster": {"cache", "tiers", "models", "engine", "frontend", "server"},
    "errors": set(),
    "validation": set(),
    "version": set(),
    "imports": set(),
    "machine": set(),
    "mypyc_hints": set(),
    "distributed": set(),
    "entrypoints": {"frontend"},
    "envs": set(),
    "inputs": {"engine", "frontend"},
    "logger": set(),
    "logprobs": {"engine"},
    "lora": {"engine", "frontend"},
    "multimodal": {"frontend"},
    "sequence": {"engine"},
    "outputs": {"engine", "frontend"},
    "sampling_params": {"engine", "frontend"},
    "utils": set(),
    "v1": {"engine", "frontend"},
}
CLUSTER_CORE = ("events", "index", "router")
CORE_MODULES = {"headstart.cluster", *(f"headstart.cluster.{name}" for name in CLUSTER_CORE)}
EVERYONE_MAY_IMPORT = {
    "errors",
    "validation",
    "version",
    "imports",
    "machine",
    "mypyc_hints",
}
WITHOUT_TORCH = ("cache", "tiers", "replay", *(f"cluster.{name}" for name in CLUSTER_CORE))

# Imported inside functions, because they are optional.
OPTIONAL_DEPENDENCIES = {"PIL", "gguf", "llguidance", "opentelemetry", "redis"}

# vLLM's module paths in the engine's package.
VLLM_PATHS = {
    f"headstart.engine.{name}" for name in ("arg_utils", "async_llm_engine", "llm_engine")
}

MODULES = read_modules(PACKAGE)
PACKAGES = [package for package in WITHOUT_TORCH if f"{PACKAGE}.{package}" in MODULES]


def resolve(imported: str, modules: dict[str, Module]) -> str | None:
    """Return our module that `import a.b.c` or `from a.b import c` loads, or None."""
    while imported and imported not in modules:
        imported = imported.rpartition(".")[0]
    return imported or None


def is_core(name: str) -> bool:
    """Return True for a module of cluster that the replay imports, which must not need torch."""
    return name in CORE_MODULES


def wrong_arrows(module: Module, modules: dict[str, Module]) -> list[str]:
    allowed = MAY_IMPORT.get(module.package)
    if is_core(module.name):
        allowed = {"cache"}
    if module.name == PACKAGE or module.package in ("cli", "__main__"):
        return []
    if module.name in VLLM_PATHS:
        allowed = {*MAY_IMPORT[module.package], "frontend"}
    assert allowed is not None, f"{module.name}: give the package its arrows in MAY_IMPORT"
    complaints = []
    for imported in module.imports:
        target = resolve(imported.module, modules)
        if target is None:
            continue
        package = modules[target].package
        wants_core = module.package == "replay" or is_core(module.name)
        beyond_core = package == "cluster" and wants_core and not is_core(target)
        if beyond_core or package not in {*allowed, module.package, *EVERYONE_MAY_IMPORT}:
            complaints.append(f"{module.name}:{imported.line} imports {imported.module}")
    return complaints


def find_cycle(modules: dict[str, Module]) -> list[str]:
    """Return the modules of an import cycle, including imports for types, or an empty list."""
    graph = {
        name: {resolve(i.module, modules) for i in module.imports} - {None}
        for name, module in modules.items()
    }
    while graph:
        leaves = {name for name, targets in graph.items() if not targets & graph.keys()}
        if not leaves:
            return sorted(graph)
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    return []


def local_imports(module: Module) -> list[str]:
    return [
        f"{module.name}:{imported.line} imports {imported.module}"
        for imported in module.imports
        if imported.in_function and imported.module.partition(".")[0] not in OPTIONAL_DEPENDENCIES
    ]


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_allowed_directions(name: str) -> None:
    assert wrong_arrows(MODULES[name], MODULES) == []


@pytest.mark.parametrize("name", MODULES)
def test_imports_are_at_the_top(name: str) -> None:
    assert local_imports(MODULES[name]) == []


def test_no_import_cycle() -> None:
    assert find_cycle(MODULES) == []


@pytest.mark.parametrize("name", [name for name in MODULES if MODULES[name].package == "cache"])
def test_the_cache_imports_stdlib_and_numpy(name: str) -> None:
    tops = {imported.module.partition(".")[0] for imported in MODULES[name].imports}
    assert tops <= {*sys.stdlib_module_names, "numpy", PACKAGE}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_without_torch(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
package = importlib.import_module("{PACKAGE}.{package}")
for found in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(found.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_help_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from headstart.cli.main import main; main(['--help'], standalone_mode=False);"
        "found = {'torch', 'transformers', 'numpy', 'httpx2'} & sys.modules.keys();"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def pretend(**texts: str) -> dict[str, Module]:
    modules = {name.replace("_", "."): text for name, text in texts.items()}
    return {name: Module(name, text) for name, text in modules.items()}


def test_an_upward_import_is_found() -> None:
    modules = pretend(headstart_cache_pool="from headstart.engine import llm", headstart_engine="")
    assert wrong_arrows(modules["headstart.cache.pool"], modules) == [
        "headstart.cache.pool:1 imports headstart.engine.llm"
    ]


def test_an_import_of_the_replay_beyond_the_router_is_found() -> None:
    modules = {
        name: Module(name, text)
        for name, text in {
            "headstart.replay.a": "from headstart.cluster import deployment, router",
            "headstart.cluster.deployment": "",
            "headstart.cluster.router": "from headstart.cluster import deployment",
        }.items()
    }
    complaints = [
        complaint for module in modules.values() for complaint in wrong_arrows(module, modules)
    ]
    assert complaints == [
        "headstart.replay.a:1 imports headstart.cluster.deployment",
        "headstart.cluster.router:1 imports headstart.cluster.deployment",
    ]


@pytest.mark.parametrize(
    "upward", ["import headstart.cache.a", "if TYPE_CHECKING:\n    import headstart.cache.a"]
)
def test_a_cycle_is_found(upward: str) -> None:
    modules = pretend(headstart_cache_a="from headstart.cache import b", headstart_cache_b=upward)
    assert find_cycle(modules) == ["headstart.cache.a", "headstart.cache.b"]


def test_an_import_in_a_function_is_found() -> None:
    module = Module("headstart.cache.a", "def f():\n    if 1:\n        import json\n")
    assert local_imports(module) == ["headstart.cache.a:3 imports json"]
