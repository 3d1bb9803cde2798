"""The number of KV blocks fills the memory that all other allocations leave."""

from pathlib import Path

import pytest

from headstart import LLM, OutOfMemoryError
from headstart.engine import parts as sizing
from tests.tiny_vision import save_tiny_vision

ROW = 64 * 4  # hidden size of the tiny models, fp32
BLOCK = 3 * 2 * (2 * 16) * 4 * 16  # layers, K and V, heads, fp32, tokens
FREE = 10_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sizing, "free_memory", lambda device: FREE)
    return save_tiny_vision("llava", tmp_path)


@pytest.mark.parametrize("rows", [100, 20_000])
def test_memory_is_reserved_for_the_encoder_cache(folder: Path, rows: int) -> None:
    """Regression: it was allocated from unreserved memory, of which there may be none."""
    llm = LLM(folder, encoder_cache_rows=rows, kv_cache_fraction=1.0)
    assert llm.engine.manager.config.num_blocks == (FREE - rows * ROW) // BLOCK
    llm.close()


def test_blocks_that_fit_only_without_the_encoder_cache_are_refused(folder: Path) -> None:
    most = (FREE - 20_000 * ROW) // BLOCK
    LLM(folder, encoder_cache_rows=20_000, num_blocks=most).close()
    with pytest.raises(OutOfMemoryError, match="5,120,000 for image embeddings"):
        LLM(folder, encoder_cache_rows=20_000, num_blocks=most + 1)
    with pytest.raises(OutOfMemoryError, match="at least 12,288, for one block"):
        LLM(folder, encoder_cache_rows=FREE // ROW)
