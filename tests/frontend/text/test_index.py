"""The stored texts equal those of a plain list."""

import gc
import tracemalloc
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import Namespace
from headstart.frontend.chat.conversation import ENTRY_BYTES, TextIndex

NAMESPACES = st.builds(Namespace, st.none(), st.sampled_from([None, "a"]))
TEXTS = st.text(st.sampled_from("abé"), max_size=5)
# A turn: its ids, and the texts of its first ids.
TURNS = st.tuples(
    st.lists(st.integers(0, 99), max_size=300), st.lists(TEXTS, min_size=1, max_size=3), NAMESPACES
)


class Model:
    """The reference: a list with the least recently used text first, searched linearly."""

    def __init__(self, max_texts: int, max_bytes: int) -> None:
        self.entries: list[tuple[Namespace, str, array[int], int]] = []
        self.max_texts, self.max_bytes = max_texts, max_bytes

    @property
    def num_bytes(self) -> int:
        arrays = {id(ids): 4 * len(ids) for _, _, ids, _ in self.entries}
        return sum(arrays.values()) + ENTRY_BYTES * len(self.entries)

    def add(self, text: str, token_ids: "array[int]", count: int, namespace: Namespace) -> None:
        if 4 * len(token_ids) + ENTRY_BYTES > self.max_bytes:
            return
        self.entries = [entry for entry in self.entries if entry[:2] != (namespace, text)]
        self.entries.append((namespace, text, token_ids, count))
        while len(self.entries) > self.max_texts or self.num_bytes > self.max_bytes:
            self.entries.pop(0)

    def longest(self, text: str, namespace: Namespace) -> tuple[list[int], str]:
        matches = [
            entry for entry in self.entries if entry[0] == namespace and text.startswith(entry[1])
        ]
        if not matches:
            return [], text
        best = max(matches, key=lambda entry: len(entry[1]))
        self.entries.remove(best)
        self.entries.append(best)
        return best[2][: best[3]].tolist(), text[len(best[1]) :]


@given(
    turns=st.lists(TURNS, max_size=12),
    wanted=st.lists(st.tuples(TEXTS, NAMESPACES), min_size=12, max_size=12),
    max_texts=st.integers(1, 12),
    max_bytes=st.integers(1, 8 * ENTRY_BYTES),
)
def test_stored_and_found_texts_match_a_linear_search(
    turns: list[Any], wanted: list[Any], max_texts: int, max_bytes: int
) -> None:
    index, model = TextIndex(max_texts, max_bytes), Model(max_texts, max_bytes)
    for (ids, texts, namespace), (text, other) in zip(turns, wanted, strict=False):
        token_ids = array("I", ids)
        for number, each in enumerate(texts):
            for target in (index, model):
                target.add(each, token_ids, min(number, len(ids)), namespace)
        index.check()
        assert len(index) == len(model.entries)
        assert index.num_bytes == model.num_bytes <= max_bytes
        assert index.longest(text, other) == model.longest(text, other)


def test_a_turn_larger_than_the_memory_evicts_nothing() -> None:
    index = TextIndex(10, 4 * ENTRY_BYTES)
    everybody = Namespace(None, None)
    index.add("ab", array("I", [1, 2]), 2, everybody)
    index.add("abc", array("I", [7] * ENTRY_BYTES), 3, everybody)
    assert index.longest("abc", everybody) == ([1, 2], "c")


def test_counted_bytes_match_the_allocated_memory() -> None:
    """The memory of long and short turns is close to the limit, and not above it."""
    for length in (0, 20, 5000):
        gc.collect()
        tracemalloc.start()
        index = TextIndex(10**6, 2**20)
        for turn in range(600 if length < 100 else 60):
            token_ids = array("I", [turn] * length)
            for end in ("", "a", "b"):
                index.add(f"{turn}{end}" * (turn % 50 + 1), token_ids, length, Namespace("x", "y"))
        num_allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert index.num_bytes > 0.95 * 2**20
        assert num_allocated < 1.1 * 2**20
