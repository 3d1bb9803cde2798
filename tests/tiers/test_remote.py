"""The remote store against a real server: blocks are loaded as saved, and faults are misses."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers import remote
from headstart.tiers import store as records
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import ModelRecord
from tests.engine.test_hybrid import Harness
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, Clock, blocks, held, name, names

redis = pytest.importorskip("redis")
PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no valkey-server and no redis-server")


class Server:
    """A server that listens at a socket file."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        arguments += ["--dir", str(self.socket.parent), "--maxmemory", "64mb"]
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, *arguments, "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"ready to accept connections" in line.lower():
                return
        raise AssertionError("the server did not start")

    @property
    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


def test_blocks_are_loaded_on_another_machine(server: Server) -> None:
    with closing(RemoteStore(server.url, MODEL)) as store:
        assert store.save(blocks(range(30))) == 30
        assert store.save(blocks(range(20, 40))) == 10
    with closing(RemoteStore(server.url, MODEL)) as again:
        assert again.find(names(range(60))) == held(again, range(60)) == 40
        assert again.find(names(range(50, 60))) == 0
        assert not again.faults.counts
    other = ModelRecord("other weights", "another", 16, MODEL.block_bytes)
    with closing(RemoteStore(server.url, other)) as store:
        assert store.find(names(range(40))) == 0
        store.save(blocks(range(3)))
    with closing(RemoteStore(server.url, MODEL)) as store:
        assert store.clear()
        assert store.find(names(range(40))) == 0
    with closing(RemoteStore(server.url, other)) as store:
        assert store.find(names(range(40))) == 3, "blocks of other models remain"


def test_a_damaged_block_is_a_miss_and_is_forgotten(server: Server) -> None:
    with closing(RemoteStore(server.url, MODEL)) as store:
        store.save(blocks(range(10)))
        for number, damage in ((2, lambda value: value[:-9]), (5, lambda value: value[::-1])):
            [key] = [key for key in server.client.scan_iter() if key.endswith(name(number))]
            server.client.set(key, damage(server.client.get(key)))
        assert held(store, range(10)) == 2
        assert store.find(names(range(2, 10))) == 0
        assert held(store, range(3, 10)) == 2
        assert store.faults.counts == {"a block is damaged": 2}
        assert store.save(blocks(range(10))) == 2
        assert held(store, range(10)) == 10


def test_engines_of_two_versions_do_not_touch_each_other_s_blocks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each took the other's blocks for damaged, and forgot one with each lookup."""
    with closing(RemoteStore(server.url, MODEL)) as store:
        store.save(blocks(range(10)))
    for module in (records, remote):
        monkeypatch.setattr(module, "VERSION", records.VERSION + 1, raising=False)
    monkeypatch.setattr(records, "_MAGIC", b"hsblock_")
    with closing(RemoteStore(server.url, MODEL)) as newer:
        assert newer.find(names(range(10))) == held(newer, range(10)) == 0
        assert newer.save(blocks(range(3))) == 3 == held(newer, range(10))
        assert not newer.faults.counts
    monkeypatch.undo()
    with closing(RemoteStore(server.url, MODEL)) as store:
        assert held(store, range(10)) == 10 and not store.faults.counts


def test_a_server_that_is_down_causes_a_miss_and_is_tried_again(
    server: Server, clock: Clock
) -> None:
    with closing(RemoteStore(server.url, MODEL)) as store:
        store.save(blocks(range(4)))
        loading = store.load(names(range(4)))
        next(loading)
        server.stop()
        assert len([next(loading), *loading]) == 3, "the blocks that were read are loaded"
        assert store.find(names(range(4))) == 0
        assert store.save(blocks(range(4))) == 0
        assert held(store, range(4)) == 0
        assert sum(store.faults.counts.values()) == 1, "it is paused"
        server.start()
        clock.now += 60
        assert store.save(blocks(range(4))) == 4
        assert held(store, range(4)) == 4


@pytest.mark.parametrize("why", ["full", "replica", "reader"])
def test_a_server_that_refuses_saves_still_serves_loads(
    server: Server, why: str, clock: Clock
) -> None:
    """Regression: each refused save paused the server for loads too."""
    orders = {
        "full": [("CONFIG SET maxmemory-policy", "noeviction"), ("CONFIG SET maxmemory", "1")],
        "replica": [("REPLICAOF", "127.0.0.1", "1")],
        "reader": [("ACL SETUSER", "default", "-@write")],
    }
    undo = {
        "full": ("CONFIG SET maxmemory", "0"),
        "replica": ("REPLICAOF", "NO", "ONE"),
        "reader": ("ACL SETUSER", "default", "+@all"),
    }
    with closing(RemoteStore(server.url, MODEL)) as store:
        assert store.save(blocks(range(4))) == 4
        for order in orders[why]:
            server.client.execute_command(*order)
        for _ in range(2):
            assert store.save(blocks(range(8))) == 0
            assert store.find(names(range(8))) == held(store, range(8)) == 4
        assert store.faults.counts == {"the server refuses new blocks": 1}
        assert store.faults.num_unsaved == 4 + 8, "those refused, and those that were not offered"
        server.client.execute_command(*undo[why])
        clock.now += 60
        assert store.save(blocks(range(8))) == 4
        assert held(store, range(8)) == 8


@pytest.mark.parametrize("url", ["", "host", "http://host", "redis://host:port/x"])
def test_a_wrong_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(ConfigError, match="remote_cache"):
        RemoteStore(url, MODEL)


def prompt_names(llm: LLM, prompt: dict[str, Any]) -> list[BlockHash]:
    group = llm.frontend.prepare(prompt, SamplingParams(max_tokens=1))
    return llm.engine.manager.block_hashes(group.requests[0].sequence)


def test_engines_share_computed_blocks(server: Server, tmp_path: Path) -> None:
    """Remote blocks are stored on each machine's disk."""
    model = save_smallest(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(3, 103))}
    tiers, answers, stored = [], [], []
    for folder in (None, "one", "two", "two"):
        cache_dir = str(tmp_path / folder) if folder is not None else None
        if len(tiers) == 3:
            server.stop()
        llm = make_llm(model, debug=True, remote_cache=server.url, cache_dir=cache_dir)
        assert llm.engine.tiers is not None
        stored.append(llm.engine.tiers.count_stored(prompt_names(llm, prompt)))
        [output] = llm.generate(prompt, params)
        tiers.append(dict(llm.engine.tiers.stats.loaded_tokens))
        answers.append(output.outputs[0].token_ids)
        llm.close()
    assert tiers == [{}, {"remote": 96}, {"remote": 96}, {"disk": 96}]
    assert answers == [answers[0]] * 4
    disk = {"disk": 0, "remote": 96}
    assert stored == [{"remote": 0}, disk, disk, {"disk": 96, "remote": 0}]


@pytest.mark.usefixtures("loads_always")
def test_engines_share_states_of_recurrent_layers(server: Server) -> None:
    prompt = [i * 7 % 50 for i in range(90)]
    for hit in (0, 89):
        harness = Harness(remote_cache=server.url)
        assert harness.run(prompt) == hit
        harness.core.close()
