"""A server in a separate process, for benchmarks over a socket."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from headstart.server.keys import KeyFolder

__all__ = ["Answer", "Server", "serving"]


class Answer(NamedTuple):
    """A streamed answer.

    first_token, last_token: seconds to its first and its last event. cached, prompt, accepted: its
    cached tokens, those of its prompt, and those of drafts that were accepted.
    """

    first_token: float
    last_token: float
    events: int
    cached: int
    prompt: int
    accepted: int


class Server:
    """An address, and the key of every tenant."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self.url = url
        self._keys = keys
        self._client = httpx.Client(base_url=url, timeout=600)

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the headers that identify the tenant."""
        return {"Authorization": f"Bearer {self._keys.get(tenant, 'none')}"}

    def ask(self, tenant: str, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a tenant's request, and read the whole answer."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        times: list[float] = []
        usage: dict[str, Any] = {}
        start = time.perf_counter()
        with self._client.stream("POST", path, json=body, headers=self.headers(tenant)) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter() - start)
                    usage = json.loads(line[6:]).get("usage") or usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        return Answer(times[0], times[-1], len(times), cached, usage["prompt_tokens"], accepted)


@contextmanager
def serving(
    model: str, tenants: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve a model, with a key for each tenant, or without keys if there are no tenants."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeyFolder(folder)
        keys = {name: kept.add(name) for name in tenants}
        ask_for = "--api-keys" if keys else "--no-api-keys"
        command = [sys.executable, "-m", "headstart", "serve", "--model", model, "--port", "0"]
        process = subprocess.Popen(
            [*command, "--keys-folder", str(Path(folder)), ask_for, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server of {model} did not start")
            yield Server(line.split()[-1], keys)
        finally:
            process.terminate()
            process.wait()
