"""The cache room is sealed: outside of it nobody reads the fields of blocks, nodes or the pool."""

import ast

import pytest

from tests.house.source import PACKAGE, Module, read_modules

# Fields that only the cache's own types have.
PRIVATE = {
    "block_hash",
    "next_free_block",
    "num_evicted",
    "num_named",
    "num_reused",
    "pool",
    "prev_free_block",
    "ref_cnt",
    "switched",
    "unwritten",
}
# Fields that a block or a sequence shares its names of with other types.
OF_A_LOOKUP = {"blocks": {"found", "computed"}, "writer": {"found", "computed"}}
MAY_NOT_IMPORT = {"block", "free_queue", "index", "pool", "naming", "recovery"}

MODULES = {name: module for name, module in read_modules(PACKAGE).items() if module.room != "cache"}


def reads(module: Module) -> list[str]:
    """Where the module reads what is the cache's own."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            private = node.attr in PRIVATE
            if node.attr in OF_A_LOOKUP and owner not in OF_A_LOOKUP[node.attr]:
                private = True
            if private:
                found.append(f"{module.name}:{node.lineno} reads {ast.unparse(node)}")
    for imported in module.imports:
        package, room, file, *_ = [*imported.module.split("."), "", ""]
        if (package, room) == (PACKAGE, "cache") and file in MAY_NOT_IMPORT:
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
        "self.manager.pool.free",
        "from headstart.cache.block import KVCacheBlock",
    ],
)
def test_a_reader_is_seen(text: str) -> None:
    assert reads(Module("headstart.engine.x", text)) != []


def test_a_lookup_s_result_may_be_read() -> None:
    assert reads(Module("headstart.engine.x", "computed.writer, len(found.blocks)")) == []
