"""Several tiers: each is paused separately, and the others continue."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.cache import BlockHash
from headstart.engine.outputs import RequestOutput
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import Faults, make_header
from headstart.tiers.transfers import Saver
from headstart.tiers.worker import GuardedStore, StoreChain
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, block, blocks, name, names
from tests.tiers.test_deadline import GREEDY, Listener, drip
from tests.tiers.test_threads import FOREVER, Gate, Store, call


def test_a_tier_that_does_not_answer_pauses_no_other(limits: Callable[..., None]) -> None:
    limits(deadline=0.01)
    gate, far = Gate("find"), Store()
    first = GuardedStore(Store(gate))
    both = StoreChain([first, GuardedStore(far)])
    for _ in range(2):
        assert call(lambda job: both.find(names(range(9)), job)) == 9, "the second tier has them"
        assert first.pause.is_on
    assert call(lambda job: both.save(blocks(range(3)), job)) == 3 == len(far.saved)
    gate.opened.set()


def test_an_endless_save_does_not_block_saves_of_other_tiers(
    limits: Callable[..., None],
) -> None:
    limits(changing=0.05)
    gate, far = Gate("save"), Store()
    stuck = GuardedStore(Store(gate))
    saver = Saver(StoreChain([stuck, GuardedStore(far)]), 1 << 20, Faults("a test"))
    saver.offer(blocks(range(3)))
    assert gate.reached.wait(FOREVER)
    saver.offer(blocks(range(3, 6)))
    assert saver.flush(FOREVER)
    assert far.saved == names(range(6)), "in order"
    assert saver.take_saved() == names(range(6)) and saver.queued_bytes == 0
    assert stuck.is_stuck and stuck.faults.num_unsaved == 6
    gate.opened.set()
    saver.close(FOREVER)


def test_a_prompt_on_disk_is_loaded_despite_a_silent_server(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    """Regression: one pause for both tiers made requests compute it, for up to five minutes."""
    pytest.importorskip("redis")
    limits(last_saves=0.1)
    model, cache_dir = save_smallest(tmp_path / "model"), str(tmp_path / "kept")

    def generate(llm: object, first: int) -> RequestOutput:
        tokens = {"prompt_token_ids": list(range(first, first + 100))}
        [output] = llm.generate(tokens, GREEDY)  # type: ignore[attr-defined]
        assert isinstance(output, RequestOutput)
        return output

    with closing(make_llm(model, cache_dir=cache_dir)) as llm:
        generate(llm, 3)
        assert llm.engine.tiers is not None and llm.engine.tiers.flush(FOREVER)
    limits(deadline=0.3)
    with (
        closing(Listener(drip)) as listener,
        closing(make_llm(model, cache_dir=cache_dir, remote_cache=listener.url)) as llm,
    ):
        assert generate(llm, 40).num_loaded_tokens == 0, "no tier has it, and the server is silent"
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.stats.late_answers == 1
        assert generate(llm, 3).num_loaded_tokens == 96


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e9])
def test_the_size_of_a_read_fits_the_rate_of_the_link(
    monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """Regression: 8 MB over a slow link came too late, and the server was paused."""
    pytest.importorskip("redis")
    now, taken = 0.0, []
    large = MODEL._replace(block_bytes=200_000)
    stored = [block(number, model=large) for number in range(20)]
    records = {one.name: make_header(one) + bytes(one.payload) for one in stored}

    def mget(keys: Sequence[bytes]) -> list[bytes]:
        nonlocal now
        values = [records[BlockHash(key[-32:])] for key in keys]
        taken.append(sum(map(len, values)) / rate)
        now += taken[-1]
        return values

    monkeypatch.setattr("headstart.tiers.remote.time", SimpleNamespace(monotonic=lambda: now))
    with closing(RemoteStore("redis://127.0.0.1:1", large)) as store:
        monkeypatch.setattr(store, "_client", SimpleNamespace(mget=mget, close=lambda: None))
        assert len(list(store.load(names(range(20))))) == 20
    assert len(taken) == {1e5: 20, 1e6: 5, 1e9: 2}[rate]
    assert max(taken) <= max(1.01, len(records[name(0)]) / rate), "a block arrives in one answer"
