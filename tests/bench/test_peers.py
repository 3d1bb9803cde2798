"""Loads of a comparison of engines: their prompts, and the comparison of times."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peer import Engine, Headstart, Ids, Transformers, chat, document, together
from peers import Bench, Peer
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCABULARY, save_tiny

HEAD = [(7 * at) % VOCABULARY for at in range(40)]
PROMPTS = [[*HEAD, own, own + 1, own + 2] for own in (3, 50, 90)]


class Recorder:
    """An engine that answers with the length of each prompt, and stores the prompts."""

    def __init__(self) -> None:
        self.prompts: list[Ids] = []

    def stream(self, prompt: Ids, count: int) -> Iterator[int]:
        return iter(self.answer([prompt], count)[0])

    def answer(self, prompts: list[Ids], count: int) -> list[Ids]:
        self.prompts += prompts
        return [[len(prompt)] * count for prompt in prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("peers"))


def generate(folder: Path, prompt: Ids, count: int) -> Ids:
    """Return the answer of transformers' `generate`, which caches no prefixes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([prompt])
    length = {"min_new_tokens": count, "max_new_tokens": count}
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, do_sample=False, **length)
    return answer[0, -count:].tolist()


@pytest.mark.parametrize("make", [Headstart, Transformers])
def test_an_engine_answers_like_generate(make: type[Engine], folder: Path) -> None:
    threads = torch.get_num_threads()
    engine = make(str(folder), threads, "auto")  # type: ignore[call-arg]
    expected = [generate(folder, prompt, 5) for prompt in PROMPTS]
    assert [list(engine.stream(prompt, 5)) for prompt in PROMPTS] == expected
    assert engine.answer(PROMPTS, 5) == expected
    longer = [prompt + answer + HEAD[:3] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    assert engine.answer(longer, 5) == [generate(folder, prompt, 5) for prompt in longer]
    assert engine.answer(PROMPTS[:1], 5) == expected[:1]


def test_questions_follow_the_document() -> None:
    engine = Recorder()
    result = document(engine, [1, 2], [[3], [4], [5]], 2)
    assert engine.prompts == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert set(result["seconds"]) == {"cold", "warm", "per token"}


def test_a_turn_begins_with_all_earlier_turns() -> None:
    engine = Recorder()
    result = chat(engine, [[[1], [2]], [[3], [4]]], 2)
    assert engine.prompts == [[1], [2], [1, 1, 1, 3], [2, 1, 1, 4]]
    assert result["tokens"] == [[4, 4], [4, 4]]


def test_the_shared_prefix_is_sent_first() -> None:
    engine = Recorder()
    together(engine, [1, 2], [[1, 2, 3], [1, 2, 4]], 2)
    assert engine.prompts == [[1, 2], [1, 2, 3], [1, 2, 4]]


def test_the_ratio_compares_rounds_with_the_best_peer() -> None:
    peers = [Peer(name, "python", "auto") for name in ("headstart", "slow", "fast")]
    bench = Bench(1, peers, "wall")
    for i, seconds in enumerate([(1, 9, 2), (2, 9, 4), (30, 9, 6)]):
        for peer, value in zip(peers, seconds, strict=True):
            bench.add("cold", peer, value)
        assert bench.turns(i)[0] == peers[i]
    assert bench.ratio("cold") == 0.5  # of the medians, 2 and 4, too; of the means 2.75
    bench.add("warm", peers[0], 1)
    assert bench.ratio("warm") is None
