"""Blocks belong to an adapter's content, after any loads, renames and requests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import LLM, SamplingParams
from headstart.engine.runner import StepLogits
from headstart.engine.step import Batch
from headstart.errors import RequestError
from tests.engine.internals import runner_of
from tests.tiny_adapters import make_adapter
from tests.tiny_models import VOCABULARY, save_tiny

BLOCK = 4
NAMES = ("a", "b")


class Watched:
    """An engine without a model, and a record of which adapter each row was written for.

    The record is derived from batches, block tables and the folders of the adapters alone: it uses
    neither names nor digests.
    """

    def __init__(self, model: Path, folders: list[Path]) -> None:
        self.llm = LLM(
            model, speculation="off", num_blocks=14, block_size=BLOCK, max_loras=2, debug=True
        )
        self.folders = folders
        self.at: dict[str, int] = {}  # folder number by name
        self.owner: dict[str, int | None] = {}  # folder number by request id
        self.rows: dict[tuple[int, int], int | None] = {}
        runner_of(self.llm.engine).run = self._run  # type: ignore[method-assign]

    def _run(self, batch: Batch) -> StepLogits:
        copied = {
            (copy.target_block, row): self.rows[copy.source_block, row]
            for copy in batch.copies
            for row in range(copy.num_rows)
        }
        self.rows |= copied
        for part in batch.scheduled:
            mine = self.owner[part.request.group.request_id]
            sequence = part.request.sequence
            written = {s for s in sequence.slots(part.start, part.stop, BLOCK, -1) if s >= 0}
            for position in range(part.stop):
                block, row = sequence.block_ids[position // BLOCK], position % BLOCK
                if block * BLOCK + row in written:
                    self.rows[block, row] = mine
                else:
                    assert self.rows[block, row] == mine, "a block of another adapter"
        counts = [int(part.samples) for part in batch.scheduled]
        ends = [len(part.request.sequence.token_ids) for part in batch.scheduled if part.samples]
        logits = torch.zeros(len(ends), VOCABULARY)
        for row, end in enumerate(ends):
            logits[row, 3 + end % 5] = 1.0
        return StepLogits(logits, counts)

    def submit(self, name: str | None, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, n=1 + prompt[0] % 2, ignore_eos=True)
        try:
            group = self.llm.frontend.prepare(prompt, params, adapter=name)
        except RequestError:
            assert name not in self.at
            return
        assert name is None or name in self.at
        self.owner[group.request_id] = None if name is None else self.at[name]
        self.llm.engine.submit(group)

    def load(self, name: str, number: int) -> None:
        self.llm.load_adapter(name, self.folders[number])
        self.at[name] = number

    def unload(self, name: str) -> None:
        if self.at.pop(name, None) is not None:
            self.llm.unload_adapter(name)

    def step(self) -> None:
        for result in self.llm.engine.step():
            assert result.error is None
        assert len(self.llm.engine.adapters.resident) <= 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three adapters; the last two are identical, in two places."""
    base = tmp_path_factory.mktemp("adapters")
    adapters = [
        make_adapter(model, base / str(seed), seed, target_modules=["q_proj"]) for seed in (0, 1)
    ]
    return [*adapters, Path(shutil.copytree(adapters[1], base / "copy"))]


@pytest.fixture(scope="module")
def watched(model: Path, folders: list[Path]) -> Iterator[Watched]:
    watched = Watched(model, folders)
    yield watched
    watched.llm.close()


OPERATIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from([None, *NAMES]),
        st.lists(st.integers(3, 4), min_size=1, max_size=13),
    ),
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(0, 2)),
    st.tuples(st.just("unload"), st.sampled_from(NAMES)),
    st.tuples(st.just("step")),
)


@settings(max_examples=60)
@given(st.lists(OPERATIONS, min_size=4, max_size=30))
def test_no_request_hits_a_block_of_another_adapter(
    watched: Watched, operations: list[tuple[Any, ...]]
) -> None:
    """Adapters are loaded, reloaded, unloaded and evicted while requests run, stop and resume."""
    for name, number in zip(NAMES, (0, 1), strict=True):
        watched.load(name, number)
    same = {1: 1, 2: 1}  # the copy is the same adapter
    for operation, *arguments in operations:
        getattr(watched, operation)(*arguments)
        watched.at = {name: same.get(number, number) for name, number in watched.at.items()}
    while watched.llm.engine.has_unfinished:
        watched.step()


def test_the_record_detects_a_wrong_hit(watched: Watched) -> None:
    """A digest that names two adapters is detected; otherwise the property would prove nothing."""
    watched.load("a", 0)
    watched.load("b", 1)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    store = watched.llm.engine.adapters
    watched.submit("a", prompt)
    while watched.llm.engine.has_unfinished:
        watched.step()
    right = store._named["b"]
    store._named["b"] = store._named["a"]
    watched.submit("b", prompt)
    with pytest.raises(AssertionError):
        while watched.llm.engine.has_unfinished:
            watched.step()
    store._named["b"] = right
