"""A restarted server loads its cache; usage, metrics and explanations report it."""

from pathlib import Path

import httpx
import pytest

from headstart.tiers.disk import DiskStore
from tests.engine.internals import remembered_chats
from tests.engine.tiny_llm import save_smallest
from tests.server.running import Running, running
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import TINY_TOKENIZERS

pytestmark = pytest.mark.usefixtures("loads_always")

TEXT = "A prefix that was computed once stays computed, for any user, at any time. " * 4
OPTIONS = {"num_blocks": 64, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_smallest(folder, positions=512, tokenizer=TINY_TOKENIZERS["byte_level"]())


def complete(server: Running, **fields: object) -> dict[str, int]:
    """Return the numbers of prompt tokens and cached tokens."""
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return {"prompt": usage["prompt_tokens"]} | usage["prompt_tokens_details"]


def test_a_restarted_server_is_warm(model: Path, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path), **OPTIONS}
    with running(model, **options) as server:
        first = complete(server)
        assert first["cached_tokens"] == 0
        assert complete(server, cache_salt="another")["cached_tokens"] == 0
        assert complete(server, cache_salt="third", no_store=True)["cached_tokens"] == 0
    whole = (first["prompt"] - 1) // 4 * 4
    with running(model, **options) as server:
        explained = httpx.post(f"{server.url}/cache/explain", json={"prompt": TEXT}, timeout=60)
        report = explained.json()
        assert (report["cached_tokens"], report["stored_tokens"]) == (0, first["prompt"] // 4 * 4)
        assert report["stored_tokens_by_tier"] == {"disk": report["stored_tokens"]}
        assert complete(server)["cached_tokens"] == whole
        assert complete(server, cache_salt="another")["cached_tokens"] == whole
        assert complete(server, cache_salt="third")["cached_tokens"] == 0, "it was not to be stored"
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        line = next(line for line in metrics.splitlines() if "loaded_tokens_total{" in line)
        assert 'tier="disk"' in line and float(line.split()[-1]) == 2 * whole


def test_stored_tokens_of_a_model_with_recurrent_layers_end_at_a_state(tmp_path: Path) -> None:
    model = save_tiny("lfm2", tmp_path)
    prompt = [3 + i * 7 % 120 for i in range(200)]
    options = {"cache_dir": str(tmp_path / "kept"), **OPTIONS}

    def explain(server: Running, prompt: list[int]) -> int:
        answer = httpx.post(f"{server.url}/cache/explain", json={"prompt": prompt}, timeout=60)
        return int(answer.json()["stored_tokens"])

    with running(model, **options) as server:
        complete(server, prompt=prompt)
    with running(model, **options) as server:
        assert explain(server, prompt) == explain(server, [*prompt, 5]) == 199
        assert explain(server, [*prompt[:140], 5]) == 128  # the last regular state
        assert complete(server, prompt=prompt)["cached_tokens"] == 199


def test_many_clients_of_a_restarted_server_load_a_prefix_once(model: Path, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path), **OPTIONS}
    with running(model, **options) as server:
        whole = (complete(server)["prompt"] - 1) // 4 * 4
    with running(model, **options) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": [TEXT] * 6, "max_tokens": 2, "temperature": 0},
            timeout=60,
        )
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 6 * whole
        tiers = server.llm.engine.tiers
        assert tiers is not None and tiers.stats.loaded_tokens == {"disk": whole}
        blocks, free = server.pool()
        assert blocks == free


def test_a_reset_that_fails_in_a_tier_still_empties_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskStore, "clear", lambda store: False)
    template = "{{ messages[0].content }}"
    with running(model, cache_dir=str(tmp_path), chat_template=template, **OPTIONS) as server:
        complete(server)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        assert remembered_chats(server.llm) > 0
        prompt = {"prompt": TEXT}
        explained = httpx.post(f"{server.url}/cache/explain", json=prompt, timeout=60).json()
        assert explained["closest"] is not None
        answer = httpx.post(f"{server.url}/cache/reset", json={"reset_tiers": True}, timeout=60)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "tier_not_reset"
        assert "Blocks may remain in a store" in error["message"]
        explained = httpx.post(f"{server.url}/cache/explain", json=prompt, timeout=60).json()
        assert explained["cached_tokens"] == 0 and explained["closest"] is None
        assert remembered_chats(server.llm) == 0
