"""Clients that do not read their answers: unread data is bounded in bytes and time, and other
clients do not wait."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.engine.outputs import RequestOutput
from tests.server.running import Running, running
from tests.server.scripted import scripted
from tests.server.test_overload import SECONDS, Steps, Watch, ask, body, connect, send


def test_a_slow_reader_does_not_delay_others() -> None:
    """The answer of the slow client exceeds all buffers."""
    with running(send_buffer=4096) as server, connect(server, small=True) as slow:
        watch = Watch(server)
        many = {"max_tokens": 100, "n": 16, "logprobs": 20, "ignore_eos": True, "stream": True}
        expected = ask(server, max_tokens=8).json()["choices"]
        assert watch.until(0)
        send(slow, body(**many))
        assert watch.until(1)
        others = 0
        while others < 3 or server.llm.driver.call(lambda: server.llm.engine.has_unfinished):
            assert ask(server, max_tokens=8).json()["choices"] == expected
            others += 1
        assert watch.until(1) and server.service.calls.num_slots == 1, (
            "the unread answer lost its slot"
        )
        slow.close()
        assert watch.all_free()


def count_outputs() -> int:
    """Return the number of outputs in this process."""
    gc.collect()
    return sum(isinstance(value, RequestOutput) for value in gc.get_objects())


def test_unread_outputs_are_bounded_and_freed_on_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three clients read nothing of long answers while others are answered.

    An output has the whole answer so far. If each were stored until it is read, the memory of a
    slow reader would grow with the square of its answer.
    """
    slow_ones = 3
    options: dict[str, Any] = {"num_blocks": 512, "speculation": "off"}
    with running(send_buffer=4096, **options) as server, ExitStack() as stack:
        num_others = count_outputs()  # of the servers of other tests
        expected = ask(server, max_tokens=8).json()["choices"]
        steps, watch = Steps(server, monkeypatch), Watch(server)
        long = body(max_tokens=2000, logprobs=20, ignore_eos=True, stream=True)
        clients = [stack.enter_context(connect(server, small=True)) for _ in range(slow_ones)]
        for client in clients:
            send(client, long)

        def lengths() -> list[int]:
            running = [entry for entry in server.running() if entry.group.params.max_tokens == 2000]
            return [len(entry.sampling.output_token_ids) for entry in running]

        def read_until(least: int) -> int:
            """Send requests until slow answers have `least` tokens; count the stored outputs."""
            while len(lengths()) < slow_ones or min(lengths()) < least:
                assert ask(server, max_tokens=8).json()["choices"] == expected
            return count_outputs() - num_others

        before = read_until(600)  # of about 1 KB each: more than is buffered
        assert max(before, read_until(1200)) <= 5 * slow_ones, "outputs pile up"
        for left, client in enumerate(reversed(clients)):
            client.close()
            assert steps.aborted.wait(SECONDS)
            steps.aborted.clear()
            assert steps.aborted_at - steps.cancelled_at <= 1, left
        assert watch.all_free()


LONG = "A long answer that stays unread. " * 32_768


class Counted(list[str]):
    """Pieces of an answer with a count of those that were iterated over."""

    taken = 0

    def __iter__(self) -> Iterator[str]:
        for piece in super().__iter__():
            self.taken += 1
            yield piece


def is_connected(server: Running, client: socket.socket) -> bool:
    """Return True if the server's end of a client's connection is open."""
    ends = f":{httpx.URL(server.url).port:04X}", f":{client.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(
        fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]) and fields[3] == "01"
        for fields in lines
    )


def test_a_stream_is_generated_only_as_far_as_buffers_take() -> None:
    pieces = Counted(["word " * 2000] * 1000)  # 10 KB each
    with running(send_buffer=4096) as server, scripted(server, pieces):
        watch = Watch(server)
        with connect(server, small=True) as client:
            send(client, body(stream=True))
            assert watch.until(1)
            for _ in range(50):
                assert httpx.get(server.url + "/health").status_code == 200
            assert 0 < pieces.taken < 40, "400 KB"
        assert watch.all_free()


def test_an_unread_answer_occupies_its_slot() -> None:
    """Regression: a megabyte was written at once, and its slot was free for another slow reader."""
    with running(send_buffer=4096) as server, scripted(server, [LONG]), ExitStack() as stack:
        watch = Watch(server)
        clients = [stack.enter_context(connect(server, small=True)) for _ in range(2)]
        for client in clients:
            send(client, body())
        assert watch.until(2)
        for _ in range(50):
            assert httpx.get(server.url + "/health").status_code == 200
        assert watch.until(2) and server.service.calls.num_slots == 2
        late, leaving = clients
        leaving.close()
        assert watch.until(1)
        received = b""
        while not received.endswith(b"}"):
            received += late.recv(1 << 20)
        assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == LONG
        assert watch.all_free()


@pytest.mark.parametrize(
    ("pieces", "stream", "header"),
    [
        ([LONG], False, ""),
        ([LONG[:200_000]] * 2, True, ""),
        ([LONG[:60_000]], False, "Connection: close\r\n"),
        ([LONG[:60_000]], False, ""),
    ],
    ids=["whole", "stream", "all is sent", "kept alive"],
)
@pytest.mark.parametrize("behind", [b"", b"G", b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections")
def test_an_unread_answer_is_dropped_at_the_timeout(
    pieces: list[str], stream: bool, header: str, behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: answer and connection stayed until the client closed the connection."""
    monkeypatch.setattr("headstart.server.middleware._GRACE", 0.0)
    with running(send_buffer=4096, request_timeout=0.3) as server, scripted(server, pieces):
        watch = Watch(server)
        with connect(server, small=True) as client:
            send(client, body(stream=stream), header=header)
            client.sendall(behind)
            while is_connected(server, client):
                assert httpx.get(server.url + "/health").status_code == 200
            assert watch.all_free()
            received = b""
            with suppress(ConnectionResetError):
                while part := client.recv(1 << 20):
                    received += part
            assert len(received) < len(pieces[0]), "what the system had taken, and nothing after it"
