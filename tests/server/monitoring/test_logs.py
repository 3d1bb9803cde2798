"""Each request has a log line with its cost and tenant, and without its text."""

from __future__ import annotations

import json
import logging
import queue
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx
import pytest

from headstart.errors import EngineError
from headstart.server.monitoring.logs import set_up_logs
from headstart.server.options import MOST_LOGGED
from tests.server.running import Running, running
from tests.server.scripted import scripted

SECRET = "The treasure lies below the third oak"


class Written:
    """The lines of a log. Reading waits, since a line is written after its answer."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write(self, text: str) -> None:
        for line in text.splitlines():
            self.lines.put(line)

    def flush(self) -> None:
        pass

    def read(self) -> str:
        return self.lines.get(timeout=30)


@pytest.fixture
def written() -> Iterator[Callable[[str], Written]]:
    """Return a function that sets the format of lines and returns the log."""
    names = ("headstart", "granian", "_granian", "headstart.server", "headstart.server.requests")
    loggers = [logging.getLogger(name) for name in names]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]

    def set_up(kind: str) -> Written:
        set_up_logs(kind)
        [handler] = logging.getLogger("headstart").handlers
        assert isinstance(handler, logging.StreamHandler)
        written = Written()
        handler.setStream(written)
        return written

    yield set_up
    for log, handlers, level, propagate in before:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


class UnreadableError(EngineError):
    """An error whose `__str__` raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_is_answered_and_logged(
    server: Running, written: Callable[[str], Written]
) -> None:
    log = written("text")
    body = {"model": "tiny", "prompt": "x"}
    with scripted(server, [UnreadableError()]):
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed; its log has the reason"
    assert log.read().endswith("a request failed: no text")
    lines = iter(log.read, None)
    assert any("UnreadableError" in line for line in lines)
    assert any("/v1/completions 500 " in line for line in lines)


@pytest.fixture(scope="module")
def verbose_server() -> Iterator[Running]:
    """Run a server with prompts and answers in its log."""
    with running(log_texts=True) as server:
        yield server


def ask(server: Running, **more: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    return httpx.post(
        f"{server.url}/v1/completions", json=body | more, headers={"X-Request-Id": "mine"}
    )


def test_a_failed_probe_is_logged(written: Callable[[str], Written]) -> None:
    with running() as server:
        lines = written("json")
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.service.is_draining = True
        assert httpx.get(f"{server.url}/ready").status_code == 503
    entry = json.loads(lines.read())
    assert (entry["path"], entry["status"]) == ("/ready", 503)


def test_lines_of_requests_can_be_disabled(written: Callable[[str], Written]) -> None:
    lines = written("off")
    logging.getLogger("headstart.server.requests").info("POST /v1/completions")
    logging.getLogger("headstart.server").warning("something else")
    assert lines.read().endswith("something else")


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_of_json(server: Running, written: Callable[[str], Written], stream: bool) -> None:
    lines = written("json")
    response = ask(server, prompt=[SECRET, SECRET + "!"], stream=stream)
    assert response.status_code == 200
    line = lines.read()
    entry = json.loads(line)
    assert (entry["request_id"], entry["method"]) == ("mine", "POST")
    assert (entry["path"], entry["status"]) == ("/v1/completions", 200)
    assert (entry["tenant"], entry["generated_tokens"]) == ("everybody", 6)
    assert entry["prompt_tokens"] > entry["cached_tokens"] and entry["seconds"] > 0
    assert "treasure" not in line and "error" not in entry


@pytest.mark.parametrize("kind", ["json", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_logged_if_enabled(
    verbose_server: Running, written: Callable[[str], Written], stream: bool, kind: str
) -> None:
    answer = ask(verbose_server).json()["choices"][0]["text"]
    lines = written(kind)
    ask(verbose_server, stream=stream, prompt=[SECRET, "x" * (MOST_LOGGED + 40)])
    line = lines.read()
    if kind == "text":
        assert f"prompt {SECRET!r}" in line and f"answer {answer!r}" in line
        return
    entry = json.loads(line)
    assert sorted(entry["prompts"]) == [SECRET, "x" * MOST_LOGGED]
    assert answer in entry["answers"] and len(entry["answers"]) == 2


def test_a_line_for_people(server: Running, written: Callable[[str], Written]) -> None:
    lines = written("text")
    ask(server)
    good = lines.read()
    httpx.get(f"{server.url}/health")  # a probe, without a line
    ask(server, temperature=-1)
    bad = lines.read()
    assert "POST /v1/completions 200" in good and "3 generated" in good
    assert "POST /v1/completions 400" in bad and "temperature is -1" in bad
    assert "treasure" not in good + bad


CALL = {"id": "1", "type": "function", "function": SECRET}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": SECRET}]}]}),
        ("/v1/chat/completions", {"prompt": SECRET, "messages": []}),
        ("/v1/completions", {"messages": [{"role": "user", "content": SECRET}], "prompt": "x"}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/messages", {"messages": SECRET, "model": "tiny", "max_tokens": 1}),
        ("/cache/explain", {"input": SECRET}),
    ],
)
def test_errors_of_prompts_are_logged_without_their_text(
    server: Running, written: Callable[[str], Written], path: str, wrong: dict[str, object]
) -> None:
    """Regression: text in a wrong field appeared in the log line."""
    log = written("json")
    answer = httpx.post(server.url + path, json=wrong, timeout=60)
    assert answer.status_code == 400
    assert SECRET not in log.read() and SECRET not in answer.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text": SECRET}, "message 0 has a dict as its content"),
        ([{"type": SECRET, "text": "a"}], "messages[0]"),
    ],
)
def test_quotes_of_a_prompt_in_errors_are_not_logged(
    server: Running, written: Callable[[str], Written], content: object, message: str
) -> None:
    """Regression: 300 characters of a content that is not a list, a common mistake, were logged."""
    lines = written("json")
    body = {"messages": [{"role": "user", "content": content}]}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    line = lines.read()
    assert refused.status_code == 400
    assert message in json.loads(line)["error"] and "treasure" not in line


def test_a_line_names_an_unknown_field(server: Running, written: Callable[[str], Written]) -> None:
    lines = written("json")
    assert ask(server, max_token=1).status_code == 400
    error = json.loads(lines.read())["error"]
    assert error.startswith("max_token: the request has the unknown field ...")


def test_a_client_cannot_forge_a_log_line(
    server: Running, written: Callable[[str], Written]
) -> None:
    """Regression: paths and names of fields were logged with their line feeds and escapes."""
    lines = written("text")
    forged = "\n99:99:99 POST /v1/completions 200 forged\x1b[31m"
    assert ask(server, **{forged: 1}).status_code == 400
    assert httpx.get(f"{server.url}/nope{quote(forged)}").status_code == 404
    for expected in ("POST /v1/completions 400", "GET /nope\\n99:99:99 POST"):
        line = lines.read()
        assert expected in line and line.isprintable()
    assert lines.lines.empty()
