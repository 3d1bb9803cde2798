"""The block tables of compiled attention, which are kept from step to step."""

from headstart.attention.native_step import BlockTables
from tests.interruptions import Interrupted, Interruption

ONE, OTHER = [[1, 2, 3], [4, 5]], [[6, 7, 3], [8, 9]]


def rows(tables: BlockTables, wanted: list[list[int]]) -> list[list[int]]:
    return [tables.array[at, : len(row)].tolist() for at, row in enumerate(wanted)]


def test_an_interruption_leaves_no_row_that_is_taken_for_what_it_was() -> None:
    with Interruption() as counted:
        BlockTables(16).fill(OTHER)
    for at in range(len(counted.lines)):
        tables = BlockTables(16)
        tables.fill(ONE)
        try:
            with Interruption(at, Interrupted()):
                tables.fill(OTHER)
        except Interrupted:
            pass
        tables.fill(ONE)
        assert rows(tables, ONE) == ONE
        tables.fill(OTHER)
        assert rows(tables, OTHER) == OTHER
