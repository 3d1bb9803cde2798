"""The angles of positions, from a table or computed."""

import torch

from headstart.models.dense.modules import AngleTable, Frequencies


def test_positions_beyond_the_table_are_computed() -> None:
    frequencies = Frequencies(torch.tensor([1.0, 0.25]))
    table = AngleTable(frequencies, torch.empty(0))
    far = torch.tensor([5, 3_000_000])
    cos, sin = table(far)
    angles = far.unsqueeze(1) * torch.tensor([[1.0, 0.25, 1.0, 0.25]])
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
    assert len(table._table[0]) == 0
    assert torch.equal(table(far[:1])[0], cos[:1])


def test_prepared_positions_are_computed_once() -> None:
    """Regression: the first long step of a process waited for their memory (60 ms in a VM)."""
    frequencies = Frequencies(torch.tensor([1.0, 0.25]), 1.5)
    table, other = AngleTable(frequencies, torch.empty(0)), AngleTable(frequencies, torch.empty(0))
    table.extend(3_000)
    prepared = table._table
    last = torch.tensor([0, 2_999])
    for part, expected in zip(table(last), other(last), strict=True):
        assert torch.equal(part, expected)
    assert table._table is prepared
    angles = last.unsqueeze(1) * torch.tensor([[1.0, 0.25, 1.0, 0.25]])
    assert torch.equal(table(last)[0], angles.cos() * 1.5)
    table.extend(10)
    assert table._table is prepared
