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
# Fields that a block, a node or a sequence shares its names of with other types.
OF_A_LOOKUP = {
    "block_hash": {"event"},
    "blocks": {"found", "computed"},
    "writer": {"found", "computed"},
}
# A field that another package's own types have, too.
OF_A_PACKAGE = {"block_ids": "attention"}
MAY_IMPORT_FROM = {"config", "identity"}  # the rest is imported from the package
MAY_NOT_IMPORT = {"BlockPool", "FreeBlockQueue", "KVCacheBlock"}

ALL = read_modules(PACKAGE)
INSIDE = {name.rpartition(".")[2] for name, module in ALL.items() if module.package == "cache"}
MODULES = {name: module for name, module in ALL.items() if module.package != "cache"}


def reads(module: Module) -> list[str]:
    """Where the module reads what is the cache's own."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            private = node.attr in PRIVATE
            if node.attr in OF_A_LOOKUP and owner not in OF_A_LOOKUP[node.attr]:
                private = True
            if module.package != OF_A_PACKAGE.get(node.attr, module.package):
                private = True
            if private:
                found.append(f"{module.name}:{node.lineno} reads {ast.unparse(node)}")
    for imported in module.imports:
        top, package, file, *_ = [*imported.module.split("."), "", ""]
        inside = file in INSIDE - MAY_IMPORT_FROM or file in MAY_NOT_IMPORT
        if (top, package) == (PACKAGE, "cache") and inside:
            found.append(f"{module.name}:{imported.line} imports {imported.module}")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_nobody_outside_reads_the_cache_s_own_fields(name: str) -> None:
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
def test_a_reader_is_seen(text: str) -> None:
    assert reads(Module("headstart.engine.x", text)) != []


def test_a_lookup_s_result_may_be_read() -> None:
    assert reads(Module("headstart.engine.x", "computed.writer, len(found.blocks)")) == []


def test_a_span_of_attention_has_block_ids_of_its_own() -> None:
    assert reads(Module("headstart.attention.x", "span.block_ids")) == []


@pytest.mark.parametrize(
    "names", ["cache import KVCacheManager", "cache.identity import Namespace"]
)
def test_what_the_package_offers_may_be_imported(names: str) -> None:
    assert reads(Module("headstart.engine.x", f"from headstart.{names}")) == []
