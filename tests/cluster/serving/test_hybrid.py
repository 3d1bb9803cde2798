"""Replicas of a model with recurrent layers share checkpoints through a store. Without Ray."""

from pathlib import Path
from typing import Any

from headstart import AsyncLLM, SamplingParams
from tests.cluster.serving.in_process import Replicas, ask
from tests.tiny_models import save_tiny

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [3 + i * 7 % 120 for i in range(150)]


def test_a_chat_continues_on_another_replica(tmp_path: Path) -> None:
    folder = save_tiny("lfm2", tmp_path)
    options: dict[str, Any] = {"num_blocks": 200, "num_states": 20}
    alone = AsyncLLM(folder, dtype="float32", **options)
    first, second = (
        Replicas(folder, cache_dir=str(tmp_path / "kept"), **options) for _ in range(2)
    )
    reply = ask(first.llm, {"prompt_token_ids": PROMPT}, PARAMS).outputs[0].token_ids
    first.close()  # saves pending blocks
    chat = {"prompt_token_ids": [*PROMPT, *reply, 9, 9]}
    output, expected = ask(second.llm, chat, PARAMS), ask(alone, chat, PARAMS)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens == 155 and output.loaded_tokens == {"disk": 155}
    again = ask(second.llm, chat, PARAMS)
    assert again.num_cached_tokens == 157 and not again.loaded_tokens
    second.close()
    alone.close()
