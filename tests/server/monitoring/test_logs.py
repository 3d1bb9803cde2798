"""A line for each request: what it cost and whose it was, and none of its text."""

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
    """A log's lines; reading waits, since a line is written after its answer."""

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
    """Sets the form of lines; returns where they are written to."""
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
    """An error whose text cannot be read."""

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
def telling() -> Iterator[Running]:
    """Serve with prompts and answers in the log."""
    with running(log_texts=True) as server:
        yield server


def ask(server: Running, **more: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    return httpx.post(
        f"{server.url}/v1/completions", json=body | more, headers={"X-Request-Id": "mine"}
    )


def test_a_probe_has_a_line_where_it_is_refused(written: Callable[[str], Written]) -> None:
    with running() as server:
        lines = written("json")
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.service.is_draining = True
        assert httpx.get(f"{server.url}/ready").status_code == 503
    told = json.loads(lines.read())
    assert (told["path"], told["status"]) == ("/ready", 503)


def test_lines_of_requests_may_be_left_out(written: Callable[[str], Written]) -> None:
    lines = written("off")
    logging.getLogger("headstart.server.requests").info("POST /v1/completions")
    logging.getLogger("headstart.server").warning("something else")
    assert lines.read().endswith("something else")


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_of_json(server: Running, written: Callable[[str], Written], stream: bool) -> None:
    lines = written("json")
    asked = ask(server, prompt=[SECRET, SECRET + "!"], stream=stream)
    assert asked.status_code == 200
    line = lines.read()
    told = json.loads(line)
    assert (told["request_id"], told["method"]) == ("mine", "POST")
    assert (told["path"], told["status"]) == ("/v1/completions", 200)
    assert (told["tenant"], told["generated_tokens"]) == ("everybody", 6)
    assert told["prompt_tokens"] > told["cached_tokens"] and told["seconds"] > 0
    assert "treasure" not in line and "error" not in told


@pytest.mark.parametrize("kind", ["json", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_in_a_line_where_they_are_asked_for(
    telling: Running, written: Callable[[str], Written], stream: bool, kind: str
) -> None:
    answer = ask(telling).json()["choices"][0]["text"]
    lines = written(kind)
    ask(telling, stream=stream, prompt=[SECRET, "x" * (MOST_LOGGED + 40)])
    line = lines.read()
    if kind == "text":
        assert f"prompt {SECRET!r}" in line and f"answer {answer!r}" in line
        return
    told = json.loads(line)
    assert sorted(told["prompts"]) == [SECRET, "x" * MOST_LOGGED]
    assert answer in told["answers"] and len(told["answers"]) == 2


def test_a_line_for_people(server: Running, written: Callable[[str], Written]) -> None:
    lines = written("text")
    ask(server)
    good = lines.read()
    httpx.get(f"{server.url}/health")  # asked every second: no line
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
def test_what_is_wrong_with_a_prompt_is_told_without_its_text(
    server: Running, written: Callable[[str], Written], path: str, wrong: dict[str, object]
) -> None:
    """The line of a refused request had the text that stood in a wrong place."""
    log = written("json")
    answer = httpx.post(server.url + path, json=wrong, timeout=60)
    assert answer.status_code == 400
    assert SECRET not in log.read() and SECRET not in answer.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"text": SECRET}, "message 0 has a dict as its content"),
        ([{"type": SECRET, "text": "a"}], "messages[0]"),
    ],
)
def test_what_a_refusal_quotes_of_a_prompt_is_in_no_line(
    server: Running, written: Callable[[str], Written], content: object, told: str
) -> None:
    """A content that is no list, a common mistake, was in the log with 300 characters of it."""
    lines = written("json")
    body = {"messages": [{"role": "user", "content": content}]}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    line = lines.read()
    assert refused.status_code == 400
    assert told in json.loads(line)["error"] and "treasure" not in line


def test_a_line_names_the_field_that_is_not_known(
    server: Running, written: Callable[[str], Written]
) -> None:
    lines = written("json")
    assert ask(server, max_token=1).status_code == 400
    error = json.loads(lines.read())["error"]
    assert error.startswith("max_token: the request has the unknown field ...")


def test_a_client_writes_no_line_of_its_own(
    server: Running, written: Callable[[str], Written]
) -> None:
    """A path and the name of a field went into the log as they came, line ends and escapes too."""
    lines = written("text")
    forged = "\n99:99:99 POST /v1/completions 200 forged\x1b[31m"
    assert ask(server, **{forged: 1}).status_code == 400
    assert httpx.get(f"{server.url}/nope{quote(forged)}").status_code == 404
    for expected in ("POST /v1/completions 400", "GET /nope\\n99:99:99 POST"):
        line = lines.read()
        assert expected in line and line.isprintable()
    assert lines.lines.empty()
