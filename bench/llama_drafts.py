"""llama.cpp's server on the loads of `drafts.py`, with its kinds of n-gram drafts."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")
"""Values of `--spec-type`."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Answer(NamedTuple):
    """A load's seconds, its tokens, and the drafted tokens among them."""

    seconds: float
    tokens: int
    accepted: int


class LlamaServer:
    """A server process of llama.cpp with one model."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, threads: int) -> None:
        self._process = process
        self._url = f"http://127.0.0.1:{port}"
        self._threads = threads

    def answer(self, texts: list[str], count: int) -> Answer:
        """Answer chats at the same time."""
        start = self._read_clock()
        with ThreadPoolExecutor(len(texts)) as pool:
            timings = list(pool.map(lambda text: self._chat(text, count), texts))
        seconds = self._read_clock() - start
        tokens = sum(timing["predicted_n"] for timing in timings)
        return Answer(seconds, tokens, sum(t.get("draft_n_accepted", 0) for t in timings))

    def wait_until_ready(self) -> None:
        for _ in range(600):
            try:
                urlopen(f"{self._url}/health").close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise
                time.sleep(0.1)
        raise TimeoutError("llama-server does not answer")

    def _chat(self, text: str, count: int) -> dict[str, int]:
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": count,
            "ignore_eos": True,
        }
        headers = {"Content-Type": "application/json"}
        url = f"{self._url}/v1/chat/completions"
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as response:
            timings: dict[str, int] = json.load(response)["timings"]
        return timings

    def _read_clock(self) -> float:
        """Return CPU seconds of the process with one thread, else the time."""
        if self._threads > 1:
            return time.perf_counter()
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / _TICKS


@contextmanager
def run_server(
    program: str, model: str, kind: str, threads: int, slots: int
) -> Iterator[LlamaServer]:
    """Start a server, whose cache is empty, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [program, "-m", model, "--port", str(port), "-t", str(threads), "-c", "16384"]
    command += ["-np", str(slots), "--kv-unified", "--spec-type", kind]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent) as process:
        try:
            server = LlamaServer(process, port, threads)
            server.wait_until_ready()
            server.answer(["Good morning."], 4)
            yield server
        finally:
            process.terminate()
