"""No other package reads the fields of the cache's blocks, nodes or pool."""

import ast

import pytest

from tests.house.source import PACKAGE, Module, read_modules

# Fields that only the cache's own types have.
PRIVATE = {
    "next_free_block",
    "num_evicted",
    "num_indexed",
    "num_reused",
    "pool",
    "prev_free_block",
    "ref_cnt",
    "switched",
    "unwritten",
}
# Fields of blocks, nodes and sequences whose names other types use too.
OF_A_LOOKUP = {
    "block_hash": {"event"},
    "blocks": {"found", "computed"},
    "writer": {"found", "computed"},
}
# A field that types of another package have too.
OF_A_PACKAGE = {"block_ids": "attention"}
MAY_IMPORT_FROM = {"config", "identity"}  # the rest is imported from the package
MAY_NOT_IMPORT = {"BlockPool", "FreeBlockQueue", "KVCacheBlock"}

ALL = read_modules(PACKAGE)
INSIDE = {name.rpartition(".")[2] for name, module in ALL.items() if module.package == "cache"}
MODULES = {name: module for name, module in ALL.items() if module.package != "cache"}


def reads(module: Module) -> list[str]:
    """List the places in which a module reads private parts of the cache."""
    places = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            private = node.attr in PRIVATE
            if node.attr in OF_A_LOOKUP and owner not in OF_A_LOOKUP[node.attr]:
                private = True
            if module.package != OF_A_PACKAGE.get(node.attr, module.package):
                private = True
            if private:
                places.append(f"{module.name}:{node.lineno} reads {ast.unparse(node)}")
    for imported in module.imports:
        top, package, file, *_ = [*imported.module.split("."), "", ""]
        inside = file in INSIDE - MAY_IMPORT_FROM or file in MAY_NOT_IMPORT
        if (top, package) == (PACKAGE, "cache") and inside:
            places.append(f"{module.name}:{imported.line} imports {imported.module}")
    return places


@pytest.mark.parametrize("name", MODULES)
def test_other_packages_do_not_read_the_caches_private_fields(name: str) -> None:
    assert reads(MODULES[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "block.ref_cnt",
        "sequence.blocks[0]",
        "found.blocks[0].writer",
        "found.node.block_hash",
        "self.manager.pool.free",
        "request.sequence.block_ids",
        "from headstart.cache.block import KVCacheBlock",
        "from headstart.cache import KVCacheBlock",
        "from headstart.cache import pool",
        "from headstart.cache.manager import KVCacheManager",
    ],
)
def test_a_read_of_a_private_field_is_found(text: str) -> None:
    assert reads(Module("headstart.engine.x", text)) != []


def test_the_result_of_a_lookup_may_be_read() -> None:
    assert reads(Module("headstart.engine.x", "computed.writer, len(found.blocks)")) == []


def test_a_span_of_attention_has_separate_block_ids() -> None:
    assert reads(Module("headstart.attention.x", "span.block_ids")) == []


@pytest.mark.parametrize(
    "names", ["cache import KVCacheManager", "cache.identity import Namespace"]
)
def test_public_names_of_the_cache_may_be_imported(names: str) -> None:
    assert reads(Module("headstart.engine.x", f"from headstart.{names}")) == []
