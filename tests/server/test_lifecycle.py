"""`headstart serve` as a process that starts, shuts down, is killed, and restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from headstart import LLM, SamplingParams
from headstart.cli.main import main
from headstart.errors import ConfigError
from headstart.server.keys import KeyFolder
from headstart.server.launch import listen
from headstart.server.options import ServerOptions
from tests.clients import openai
from tests.forked import start_headstart
from tests.house.source import ROOT
from tests.server.running import running
from tests.tiny_adapters import make_adapter

SECONDS = 60
BODY = {"model": "tiny", "prompt": "one two three", "max_tokens": 4, "ignore_eos": True}
TLS = ROOT / "tests" / "data" / "tls"
WITH_TLS = ("--tls-cert", str(TLS / "certificate.pem"), "--tls-key", str(TLS / "key.pem"))


class Process:
    """A server process and the address that it prints."""

    def __init__(self, *options: str, folder: Path) -> None:
        command = ["serve", "--num-blocks", "512", "--served-model-name", "tiny"]
        command += ["--keys-folder", str(folder), *options]
        pipes = [Path(tempfile.mkdtemp(dir=folder.parent), "pipe") for _ in range(2)]
        for pipe in pipes:
            os.mkfifo(pipe)
        self._process = start_headstart(command, (Path(os.devnull), pipes[0], pipes[1]))
        self._stdout, self._stderr = (pipe.open(encoding="utf-8") for pipe in pipes)
        self.url = self._stdout.readline().split()[-1]

    def signal(self, kind: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, kind)

    def wait(self) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        self._process.join(SECONDS)
        return self._process.exitcode

    def errors(self) -> str:
        """Return its stderr after it has exited."""
        return self._stderr.read()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._stdout.close()
        self._stderr.close()

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=SECONDS)

    @contextmanager
    def stream(self, tokens: int) -> Iterator[Iterator[str]]:
        """Yield the lines of a long answer after its first one."""
        body = BODY | {"max_tokens": tokens, "stream": True}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            yield lines


@contextmanager
def process(folder: Path, *options: str) -> Iterator[Process]:
    server = Process(*options, folder=folder)
    try:
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_are_answered_before_the_shutdown(
    kind: signal.Signals, tmp_path: Path
) -> None:
    with process(tmp_path, "--port", "0") as server:
        with server.stream(100) as lines:
            server.signal(kind)
            *_, last = filter(None, lines)
            assert last == "data: [DONE]"
        assert server.wait() == 0
        log = server.errors()
        assert log.endswith("Stopped.\n")
        assert log.count("8 million parameters") == 1
        assert "The cache at work, in a browser: http://127.0.0.1:" in log


def test_a_draining_server_is_not_ready_and_refuses_requests(tmp_path: Path) -> None:
    with process(tmp_path, "--port", "0", "--drain-seconds", "600") as server:
        with server.stream(2000) as lines:
            assert httpx.get(f"{server.url}/ready").status_code == 200
            server.signal(signal.SIGTERM)
            while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
                assert next(lines) != "data: [DONE]"
            assert ready.status_code == 503 and ready.headers["retry-after"]
            refused = server.ask()
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "the server is stopping" in refused.json()["error"]["message"]
            assert httpx.get(f"{server.url}/health").status_code == 200
            *_, last = filter(None, lines)
            assert last == "data: [DONE]"
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            server.ask()


@pytest.mark.parametrize("seconds", ["0", "0.2"])
def test_a_stream_that_takes_too_long_is_cut_off(seconds: str, tmp_path: Path) -> None:
    """The answer needs more than a second."""
    with process(tmp_path, "--port", "0", "--drain-seconds", seconds) as server:
        with server.stream(8000) as lines:
            server.signal(signal.SIGTERM)
            *_, last = filter(None, lines)
            error = json.loads(last.removeprefix("data: "))["error"]  # and no "[DONE]"
            assert error["message"] == "the server stopped before the answer was complete"
        assert server.wait() == 0
        log = server.errors()
        assert "the server stopped before the answer was complete" in log
        assert "Traceback" not in log


def test_a_whole_answer_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    with process(tmp_path, "--port", "0", "--drain-seconds", "0.2") as server, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        lines = stack.enter_context(server.stream(8000))
        body = BODY | {"max_tokens": 8000}
        url = f"{server.url}/v1/completions"
        future = pool.submit(httpx.post, url, json=body, timeout=SECONDS)
        while httpx.get(f"{server.url}/cache").json()["running"] < 2:
            assert next(lines) is not None
        server.signal(signal.SIGTERM)
        answer = future.result()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert "before the answer was complete" in answer.json()["error"]["message"]
        list(lines)
        assert server.wait() == 0
        assert "Traceback" not in server.errors()


def test_it_shuts_down_regardless_of_its_clients(tmp_path: Path) -> None:
    """One is idle, one watches, one stopped reading its answer, two are sending requests."""
    body = json.dumps(BODY | {"max_tokens": 8000, "stream": True})
    head = "{} HTTP/1.1\r\nHost: localhost\r\n"
    request = head.format("POST /v1/completions") + "Content-Type: application/json\r\n"
    request += f"Content-Length: {len(body)}\r\n\r\n{body}"
    with process(tmp_path, "--port", "0", "--drain-seconds", "0.2") as server, ExitStack() as stack:

        def send(text: str) -> socket.socket:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.settimeout(SECONDS)
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            client.sendall(text.encode())
            return client

        for text in (head.format("GET /ready"), head.format("GET /cache/live"), request):
            assert send(f"{text}\r\n").recv(15) == b"HTTP/1.1 200 OK"
        amid_head, amid_body = send(head.format("GET /ready")), send(request[:-1])
        assert server.ask().status_code == 200  # earlier requests have been read
        server.signal(signal.SIGTERM)
        assert amid_head.recv(1) == b""
        assert amid_body.recv(12) == b"HTTP/1.1 503"
        assert server.wait() == 0
        log = server.errors()
        assert log.endswith("Stopped.\n") and "Traceback" not in log


@pytest.mark.parametrize("kinds", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,) * 2])
def test_a_second_signal_stops_it_at_once(
    kinds: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    first, second = kinds
    with process(tmp_path, "--port", "0", "--drain-seconds", "600") as server:
        with server.stream(8000) as lines:
            server.signal(first)
            while server.ask().status_code == 200:  # until the first signal was handled
                assert next(lines) != "data: [DONE]"
            server.signal(second)
            *_, last = filter(None, lines)
            assert "the server stopped before" in last
        assert server.wait() == 0
        log = server.errors()
        assert re.search("waiting up to 600 s for [12] requests?; Ctrl-C again stops now", log)
        assert "ASGI callable" not in log and "running task" not in log


def test_it_restarts_after_a_kill(tmp_path: Path) -> None:
    """It uses the same port and accepts the same key, with the same salt."""
    key = KeyFolder(tmp_path).add("alice")
    headers = {"x-api-key": key}
    port, answers = "0", []
    for _ in range(2):
        with process(tmp_path, "--port", port) as server:
            port = server.url.rpartition(":")[2]
            url = f"{server.url}/v1/completions"
            assert server.ask().status_code == 401
            answer = httpx.post(url, json=BODY, headers=headers, timeout=SECONDS)
            answers.append(answer.json()["choices"][0]["text"])
            with httpx.stream(
                "POST", url, json=BODY | {"max_tokens": 8000, "stream": True}, headers=headers
            ) as streamed:
                assert next(streamed.iter_lines()).startswith("data: ")
                server.signal(signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
    assert answers[0] == answers[1]


def test_it_restarts_at_once_after_a_stop_with_open_connections(tmp_path: Path) -> None:
    """Regression: old connections in TIME_WAIT blocked the port for a minute."""
    port = "0"
    for _ in range(2):
        with process(tmp_path, "--port", port) as server:
            port = server.url.rpartition(":")[2]
            with httpx.Client(base_url=server.url) as client:
                assert client.get("/health").status_code == 200
                server.signal(signal.SIGTERM)
                assert server.wait() == 0


def test_adapters_are_listed_as_models(demo_model: Path, tmp_path: Path) -> None:
    sea = make_adapter(demo_model, tmp_path / "adapter", lora_alpha=64)
    with closing(LLM(demo_model, num_blocks=64)) as llm:
        llm.load_adapter("sea", sea)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        expected = [
            llm.generate(BODY["prompt"], params, adapter=name)[0].outputs[0].text
            for name in (None, "sea")
        ]
    assert expected[0] != expected[1]
    model = ["--model", str(demo_model), "--port", "0", "--lora-modules", f"sea={sea}"]
    with process(tmp_path / "keys", *model) as server:
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [entry["id"] for entry in models] == ["tiny", "sea"]
        for name, text in zip(("tiny", "sea"), expected, strict=True):
            body = BODY | {"model": name, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)
            assert answer.json()["choices"][0]["text"] == text


def test_connections_send_each_write_at_once() -> None:
    """Regression: an answer's body waited 40 ms for the client to acknowledge its head."""
    with listen(ServerOptions(port=0)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_https_with_a_certificate(tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    with process(tmp_path, "--port", "0", "--host", "localhost", *WITH_TLS) as server:
        assert server.url.startswith("https://127.0.0.1:")
        url = server.url.replace("127.0.0.1", "localhost")
        assert httpx.get(f"{url}/health", verify=context).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with (
            httpx.Client(verify=context) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client,
        ):
            messages = [{"role": "user", "content": "Hello"}]
            body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 8}
            whole = client.chat.completions.create(**body, temperature=0)
            chunks = client.chat.completions.create(**body, temperature=0, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text and text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (WITH_TLS[:2], "allowed: both or none"),
        ((*WITH_TLS[:3], "/no/such/file"), "there is no file '/no/such/file'"),
        ((*WITH_TLS[:3], WITH_TLS[1]), "cannot be used"),
        ((*WITH_TLS[:3], str(TLS / "encrypted.pem")), "cannot be used"),
        (("--request-timeout", "0"), "request_timeout is 0"),
        (("--max-requests-per-tenant", "0"), "max_requests_per_tenant is 0"),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_loaded(
    options: tuple[str, ...], says: str
) -> None:
    command = ["serve", "--model", "/no/such/model", "--port", "0", *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and says in result.stderr


def test_only_configured_origins_may_send_requests() -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    allow_origin = "access-control-allow-origin"
    with running(cors_origin="https://a.example, https://b.example") as server:
        url = f"{server.url}/v1/completions"
        allowed = httpx.options(url, headers=headers)
        assert allowed.status_code == 200 and allowed.headers[allow_origin] == "https://a.example"
        refused = httpx.options(url, headers=headers | {"Origin": "https://c.example"})
        assert refused.status_code == 400 and allow_origin not in refused.headers
        answer = httpx.post(url, json={}, headers={"Origin": "https://b.example"})
        assert answer.status_code == 400 and answer.headers[allow_origin] == "https://b.example"
    with running() as server:
        answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
        assert answer.status_code == 403 and allow_origin not in answer.headers
        assert json.loads(answer.text)["error"]


def test_a_port_in_use_is_reported_with_a_remedy() -> None:
    with listen(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*another program.*--port N"):
            listen(ServerOptions(port=port))
