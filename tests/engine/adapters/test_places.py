"""Fewer places than adapters: which adapter is read again when, and what ends if reading fails."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.engine import adapter_store
from headstart.engine.request import RequestGroup
from headstart.errors import AdapterError, EngineError
from headstart.models.lora_files import LoraWeights
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 9, 14, *range(30, 60)]
NAMES = ("one", "two", "three")


class World:
    def __init__(self, folder: Path) -> None:
        self.model = save_tiny("llama", folder / "model")
        self.adapters = {
            name: make_adapter(self.model, folder / name, seed) for seed, name in enumerate(NAMES)
        }
        self.expected = {
            name: Oracle(self.model, path).greedy(PROMPT, 4) for name, path in self.adapters.items()
        }

    def open(self, places: int) -> LLM:
        llm = LLM(self.model, num_blocks=64, max_loras=places, debug=True)
        for name, path in self.adapters.items():
            llm.load_adapter(name, path)
        return llm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("llama"))


class Reader:
    """An executor whose calls end when `finish` is called."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.count = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.pending.append(lambda: future.set_result(function(*arguments)))
        self.count += 1
        assert self.count < 20, "adapters are read again for ever"
        return future

    def finish(self) -> None:
        while self.pending:
            self.pending.pop()()

    def shutdown(self, **_: Any) -> None: ...


def test_an_adapter_is_read_while_prefixes_come_from_disk(world: World, tmp_path: Path) -> None:
    """Regression: after a load, no call waited for the adapter: "the scheduler is stuck"."""
    llm = LLM(world.model, num_blocks=64, max_loras=1, debug=True, cache_dir=str(tmp_path))
    for name in NAMES[:2]:
        llm.load_adapter(name, world.adapters[name])
    for _ in range(3):
        for name in NAMES[:2]:
            [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, adapter=name)
            assert output.outputs[0].token_ids == world.expected[name]
    llm.close()


def submit(llm: LLM, *names: str) -> list[RequestGroup]:
    groups = [llm.frontend.prepare(PROMPT, GREEDY, adapter=name) for name in names]
    for group in groups:
        llm.engine.submit(group)
    return groups


def drain(llm: LLM) -> dict[RequestGroup, EngineError]:
    """Run all requests to their end; return those that ended with an error."""
    failed = {}
    while llm.engine.has_unfinished:
        failed |= {one.group: one.error for one in llm.engine.step() if one.error is not None}
    return failed


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("order", [[1, 2, 0], [2, 1, 0, 2], [1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]])
def test_adapters_whose_reading_ends_between_two_lookups_all_run(
    world: World, places: int, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: three requests for one place waited for ever.

    Each adapter was in memory while no call looked it up, and was replaced by the next before it
    ran.
    """
    llm = world.open(places)
    store, reader = llm.engine.adapters, Reader()
    monkeypatch.setattr(store, "_reader", reader)

    def finishing(call: Callable[..., Any]) -> Callable[..., Any]:
        def first_finish(*arguments: Any) -> Any:
            reader.finish()
            return call(*arguments)

        return first_finish

    for name in ("reach", "wait_for_reading"):
        monkeypatch.setattr(store, name, finishing(getattr(store, name)))
    names = [NAMES[at] for at in order]
    groups = submit(llm, *names)
    assert drain(llm) == {}
    for group, name in zip(groups, names, strict=True):
        assert group.output().outputs[0].token_ids == world.expected[name]
    llm.close()


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), PermissionError("not yours"), RuntimeError("odd")], ids=repr
)
def test_any_read_error_ends_the_requests_of_its_adapter_alone(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: exceptions other than AdapterError failed the step, and so all other requests."""
    llm = world.open(1)
    read = adapter_store.read_weights

    def fail_for_two(folder: Path, *rest: Any) -> LoraWeights:
        if folder == world.adapters["two"]:
            raise error
        return read(folder, *rest)

    monkeypatch.setattr(adapter_store, "read_weights", fail_for_two)
    plain = llm.frontend.prepare(PROMPT, GREEDY)
    llm.engine.submit(plain)
    groups = submit(llm, "two", "three", "two", "one")
    failed = drain(llm)
    assert failed.keys() == {groups[0], groups[2]}
    for failure in failed.values():
        cause = failure.__cause__
        assert isinstance(cause, AdapterError)
        assert str(world.adapters["two"]) in str(failure)
        assert str(error) in str(failure)
        assert cause.__cause__ is error
    assert plain.finished
    assert groups[1].output().outputs[0].token_ids == world.expected["three"]
    assert groups[3].output().outputs[0].token_ids == world.expected["one"]
    monkeypatch.undo()
    [again] = submit(llm, "two")
    assert drain(llm) == {}
    assert again.output().outputs[0].token_ids == world.expected["two"]
    llm.close()


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "a folder", "empty"])
def test_a_damaged_file_ends_the_requests_of_its_adapter_alone(
    world: World, tmp_path: Path, file: str, damage: str
) -> None:
    llm = world.open(1)
    mine = make_adapter(world.model, tmp_path / "mine", 11)
    llm.load_adapter("mine", mine)
    (mine / file).unlink()
    if damage == "a folder":
        (mine / file).mkdir()
    elif damage == "empty":
        (mine / file).touch()
    other, lost = submit(llm, "two", "mine")
    failed = drain(llm)
    assert failed.keys() == {lost}
    assert isinstance(failed[lost].__cause__, AdapterError)
    assert str(mine) in str(failed[lost])
    assert other.output().outputs[0].token_ids == world.expected["two"]
    llm.close()


def test_a_refusal_for_an_aborted_request_does_not_end_the_next_one(
    world: World, tmp_path: Path
) -> None:
    """Regression: the next request with the same id ended with the error of an aborted request.

    A step had been interrupted between the refusal and the end of its request.
    """
    llm = world.open(1)
    engine, store = llm.engine, llm.engine.adapters
    path = make_adapter(world.model, tmp_path / "mine", 11)
    llm.load_adapter("mine", path)
    group = llm.frontend.prepare([5], GREEDY, adapter="mine", request_id="name")
    (path / "adapter_config.json").unlink()
    while store.reach(group.requests[0], 0, 1) == 0 and not store._refused:
        store.wait_for_reading()
        store.poll()
    store.restore()
    group = llm.frontend.prepare(PROMPT, GREEDY, adapter="one", request_id="name")
    engine.submit(group)
    assert drain(llm) == {}
    assert group.output().outputs[0].token_ids == world.expected["one"]
    llm.close()
