"""The server of a speaking model shuts down as that of a text model does."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.omni.tiny_omni import save_qwen25
from tests.server.test_lifecycle import SECONDS, Process, process

LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Who was there?"}],
    "max_tokens": 30_000,
    "ignore_eos": True,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    model = save_qwen25(tmp_path / "model")
    options = ("--port", "0", "--drain-seconds", "0", "--max-num-seqs", "1")
    options += ("--max-waiting", "1")
    with process(tmp_path / "keys", "--model", str(model), *options) as server:
        yield server


def test_streams_and_whole_answers_end_with_an_error_on_shutdown(server: Process) -> None:
    """Regression: answers were cut off as if the network had failed."""
    url = f"{server.url}/v1/chat/completions"
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        body = LONG | {"stream": True}
        answer = stack.enter_context(httpx.stream("POST", url, json=body, timeout=SECONDS))
        lines = filter(None, answer.iter_lines())
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        whole = pool.submit(httpx.post, url, json=LONG, timeout=SECONDS)
        metrics = ""
        while 'headstart:requests_in_pipeline{model_name="tiny"} 2.0' not in metrics:
            assert next(lines) != "data: [DONE]"
            metrics = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
        server.signal(signal.SIGTERM)
        *_, last = lines
        error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
        refused = whole.result()
    assert error["message"] == "the server stopped before the answer was complete"
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["message"] == error["message"]
    assert server.wait() == 0
    log = server.errors()
    assert "the server stopped before the answer was complete" in log
    assert "Traceback" not in log
