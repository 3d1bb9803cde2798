"""Requests under overload are refused on arrival or time out, without delaying others."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.server.keys import KeyFolder
from headstart.server.service import Call
from headstart.server.tenants import Tenant
from tests.server.running import Running, running
from tests.server.tenants.test_isolation import picture
from tests.tiny_vision import save_tiny_vision

PATH = "/v1/completions"
PROMPT = list(range(40, 90))
SECONDS = 60


class Watch:
    """Counts running calls, and waits for a count."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._open = server.service.calls.call
        self._changed = threading.Condition()
        self._count = 0
        server.service.calls.call = self._call  # type: ignore[method-assign]

    @contextmanager
    def _call(self, tenant: Tenant) -> Iterator[Call]:
        slot = self._open(tenant)
        call = slot.__enter__()  # a call that is refused ends here
        self._add(1)
        try:
            yield call
        finally:
            slot.__exit__(None, None, None)
            self._add(-1)

    def _add(self, change: int) -> None:
        with self._changed:
            self._count += change
            self._changed.notify()

    def until(self, count: int) -> bool:
        """Wait for `count` running calls; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == count, SECONDS)

    def all_free(self) -> bool:
        """Wait until no call runs; return True if all blocks and slots are free."""
        if not self.until(0):
            return False
        blocks, free = self._server.pool()
        return blocks == free and self._server.service.calls.num_slots == 0


def body(**change: object) -> bytes:
    return json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 1, **change}).encode()


def connect(server: Running, small: bool = False) -> socket.socket:
    url = httpx.URL(server.url)
    client = socket.socket()
    if small:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(SECONDS)
    client.connect((url.host, url.port))
    return client


def send(
    to: socket.socket, content: bytes, key: str = "", *, whole: bool = True, header: str = ""
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"{header}x-api-key: {key}\r\nContent-Length: {len(content)}\r\n\r\n"
    to.sendall(head.encode() + (content if whole else content[:5]))


def ask(server: Running, key: str = "", **change: object) -> httpx.Response:
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    return httpx.post(server.url + PATH, content=body(**change), headers=headers, timeout=SECONDS)


@contextmanager
def held(server: Running) -> Iterator[None]:
    """Stop the engine's steps within the block."""
    gate, inside = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        gate.wait(SECONDS)

    thread = threading.Thread(target=server.llm.driver.call, args=[wait])
    thread.start()
    assert inside.wait(SECONDS)
    try:
        yield
    finally:
        gate.set()
        thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Any, Watch]]:
    """Run a server with four slots, of which a tenant may use two."""
    folder = KeyFolder(tmp_path_factory.mktemp("keys"))
    secrets = {name: folder.add(name) for name in ("alice", "bob", "carl")}
    options = {"max_num_seqs": 1, "max_waiting": 3, "keys_folder": str(folder.folder)}
    with running(api_keys=True, **options) as server:
        yield server, secrets, Watch(server)


def test_slots_are_bounded_in_total_and_per_tenant(keys: tuple[Running, Any, Watch]) -> None:
    """Requests occupy slots before their bodies arrive."""
    server, key, watch = keys
    with ExitStack() as clients:
        for count, name in enumerate(("alice", "alice", "bob", "bob"), 1):
            if name == "bob":
                refused = ask(server, key["alice"])
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert "2 requests of 'alice'" in refused.json()["error"]["message"]
                assert refused.json()["error"]["type"] == "rate_limit_error"
            send(clients.enter_context(connect(server)), body(), key[name], whole=False)
            assert watch.until(count)
        response = httpx.get(f"{server.url}/cache/advice", headers={"x-api-key": key["bob"]})
        assert response.status_code == 429, "a tenant's queries of the cache need a slot too"
        refused = ask(server, key["carl"])
        assert refused.status_code == 429 and "4 requests are" in refused.json()["error"]["message"]
        assert httpx.get(server.url + "/health").status_code == 200
    assert watch.until(0)
    assert ask(server, key["alice"]).status_code == 200 and watch.all_free()


def test_each_prompt_of_a_call_needs_a_slot(keys: tuple[Running, Any, Watch]) -> None:
    server, key, watch = keys
    assert ask(server, key["alice"], prompt=[PROMPT] * 2).status_code == 200
    for stream in (False, True):
        refused = ask(server, key["alice"], prompt=[PROMPT] * 3, stream=stream)
        assert refused.status_code == 429 and watch.all_free()


def test_a_request_times_out() -> None:
    with running(request_timeout=0.2) as server:
        watch = Watch(server)
        with held(server):
            whole, stream = ask(server), ask(server, stream=True)
        assert whole.status_code == 504
        assert whole.json()["error"]["type"] == "timeout_error"
        event = stream.text.strip().removeprefix("data: ")
        assert json.loads(event)["error"]["message"] == "the request took longer than 0.2 s"
        assert watch.all_free()


def test_a_body_that_never_arrives_times_out() -> None:
    with running(request_timeout=0.2) as server, connect(server) as slow:
        watch = Watch(server)
        send(slow, body(), whole=False)
        assert slow.recv(1000).startswith(b"HTTP/1.1 504")
        assert watch.all_free()


def test_requests_are_refused_while_the_server_drains() -> None:
    """This includes requests without generation, and those whose body arrived too late."""
    with running() as server, connect(server) as slow:
        watch = Watch(server)
        send(slow, body(), whole=False)
        assert watch.until(1)
        server.service.is_draining = True
        refused = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, timeout=SECONDS)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        slow.sendall(body()[5:])
        assert slow.recv(1000).startswith(b"HTTP/1.1 503")
        assert watch.all_free()


class Steps:
    """Counts an engine's steps, and records when a request was cancelled and aborted."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, driver = server.llm.engine, server.llm.driver
        self.count = self.cancelled_at = self.aborted_at = 0
        self.queued, self.aborted = threading.Semaphore(0), threading.Event()
        step, submit, abort, cancel = engine.step, engine.submit, engine.abort, driver.cancel

        def count() -> object:
            self.count += 1
            return step()

        def note_queued(group: Any) -> None:
            submit(group)
            self.queued.release()

        def note_cancelled(groups: Any, *, wait: bool = True) -> None:
            self.cancelled_at = self.count
            cancel(groups, wait=wait)

        def note_aborted(request_id: str) -> object:
            output = abort(request_id)
            self.aborted_at, self.waiting = self.count, len(engine.requests[1])
            self.aborted.set()
            return output

        monkeypatch.setattr(engine, "step", count)
        monkeypatch.setattr(engine, "submit", note_queued)
        monkeypatch.setattr(engine, "abort", note_aborted)
        monkeypatch.setattr(driver, "cancel", note_cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_is_aborted_within_one_step(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(max_num_seqs=1) as server, connect(server) as runs:
        steps, watch = Steps(server, monkeypatch), Watch(server)
        send(runs, body(max_tokens=4000, ignore_eos=True, stream=True))
        assert b"data: " in runs.recv(65_536) + runs.recv(65_536) and steps.queued.acquire()
        with connect(server) as waits:
            send(waits, body(stream=stream))
            assert steps.queued.acquire(timeout=SECONDS)
        assert steps.aborted.wait(SECONDS)
        assert steps.waiting == 0 and steps.aborted_at - steps.cancelled_at <= 1
        steps.aborted.clear()
        runs.close()
        assert steps.aborted.wait(SECONDS)
        assert ask(server).status_code == 200 and watch.all_free()


def test_a_stream_with_pipelined_requests_is_aborted_within_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(max_num_seqs=1) as server:
        steps, watch = Steps(server, monkeypatch), Watch(server)
        with connect(server) as client:
            send(client, body(max_tokens=4000, ignore_eos=True, stream=True))
            assert steps.queued.acquire(timeout=SECONDS)
            send(client, body())
            send(client, body())
        assert steps.aborted.wait(SECONDS)
        assert steps.aborted_at - steps.cancelled_at <= 1 and watch.all_free()


def test_pipelined_requests_are_answered_in_order(
    keys: tuple[Running, Any, Watch],
) -> None:
    """There are more of them than the server reads ahead."""
    server, key, watch = keys
    prompts = [f"{i} of twelve" for i in range(12)]
    with connect(server) as client:
        for prompt in prompts:
            send(client, body(prompt=prompt, echo=True, max_tokens=0), key["bob"])
        received = b""
        while received.count(b'"usage"') < len(prompts):
            received += client.recv(65_536)
    assert re.findall(rb'"text":"(\d+ of twelve)"', received) == [text.encode() for text in prompts]
    assert watch.all_free()


def test_the_size_of_prompts_and_images_is_bounded(tmp_path: Path) -> None:
    model = save_tiny_vision("llava", tmp_path)
    with running(model, max_model_len=100, max_image_pixels=1000) as server:
        refused = ask(server, prompt=[5] * 100)
        assert refused.status_code == 400 and "the prompt has 100 tokens" in refused.text
        content = [{"type": "image_url", "image_url": {"url": picture(1)}}]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=SECONDS)
        assert refused.status_code == 400 and "max_image_pixels" in refused.text
        assert server.pool()[0] == server.pool()[1]
