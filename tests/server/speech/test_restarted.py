"""A restarted speaking server loads its cache, which usage and metrics report."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.omni.omni import AsyncOmni
from headstart.server.app import create_speech_app
from headstart.server.options import ServerOptions
from tests.omni.tiny_omni import save_qwen25
from tests.server.running import listening

BODY = {
    "model": "omni",
    "messages": [{"role": "user", "content": "A prefix that was computed once stays computed."}],
    "max_tokens": 4,
    "temperature": 0,
}


def ask(model: Path, cache_dir: Path) -> tuple[int, dict[str, Any], str]:
    """Return a new server's cached tokens, answer and metrics."""
    omni = AsyncOmni(
        model, options={"num_blocks": 64, "block_size": 4, "cache_dir": str(cache_dir)}
    )
    try:
        with listening(create_speech_app(omni, "omni", ServerOptions(api_keys=False))) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60).json()
            metrics = httpx.get(f"{url}/metrics").text
    finally:
        omni.close()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["choices"][0]["message"], metrics


@pytest.mark.usefixtures("loads_always")
def test_a_restarted_speaking_server_is_warm(tmp_path: Path) -> None:
    model = save_qwen25(tmp_path / "model")
    cached, message, _ = ask(model, tmp_path / "kept")
    assert cached == 0
    cached, again, metrics = ask(model, tmp_path / "kept")
    assert cached > 0 and again["content"] == message["content"]
    [loaded] = re.findall(r'stage_loaded_tokens_total\{.*stage="thinker"\} (\S+)', metrics)
    assert float(loaded) == cached
