"""A conversation that continues in another process hits the tokens of the first."""

import json
from pathlib import Path

import pytest

from headstart import LLM, SamplingParams
from headstart.cli.messages import Conversation, Turn
from headstart.errors import RequestError
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

DRAWN = SamplingParams(temperature=3, seed=4, max_tokens=90, ignore_eos=True)
QUESTION = {"role": "user", "content": "What is a prefix, and what is it good for?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_smallest(folder, positions=2048, tokenizer=TINY_TOKENIZERS["byte_level"]())


def open_llm(model: Path, folder: Path) -> LLM:
    return make_llm(model, num_blocks=64, cache_dir=str(folder))


def hits(model: Path, folder: Path, conversation: Conversation, *, recalled: bool) -> int:
    """Return the cached tokens of the next turn in a new process."""
    llm = open_llm(model, folder)
    messages = conversation.messages("Go on.", 0)
    if recalled:
        llm.recall_chat(messages[:-1], conversation.reply_token_ids())
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.close()
    return output.num_cached_tokens


def test_the_next_turn_hits_generated_tokens(model: Path, tmp_path: Path) -> None:
    llm = open_llm(model, tmp_path / "kept")
    [output] = llm.chat([QUESTION], DRAWN, use_tqdm=False)
    llm.close()
    answer = output.outputs[0]
    turn = Turn(QUESTION["content"], answer.text, tuple(answer.token_ids))
    saved = tmp_path / "chat.json"
    Conversation(turns=[turn]).save(saved, "a model")
    conversation = Conversation.load(saved)
    assert conversation.turns == [turn]
    whole = (len(output.prompt_token_ids) + len(answer.token_ids) - 1) // 16 * 16
    assert hits(model, tmp_path / "kept", conversation, recalled=True) >= whole - 16
    assert hits(model, tmp_path / "kept", conversation, recalled=False) < whole - 48, (
        "the reply is encoded as generated: the test proves nothing"
    )


@pytest.mark.parametrize("token_ids", ["no list", [1, -2], [1.5], [True], [10**9], [3] * 500])
def test_token_ids_of_another_model_change_nothing(
    model: Path, tmp_path: Path, token_ids: object
) -> None:
    conversation = Conversation(turns=[Turn("Hello.", "A reply of some length.")])
    expected = open_llm(model, tmp_path / "kept")
    messages = conversation.messages("Go on.", 0)
    [alone] = expected.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    expected.close()
    saved = tmp_path / "chat.json"
    conversation.save(saved, "a model")
    content = json.loads(saved.read_text())
    content["messages"][1]["token_ids"] = token_ids
    saved.write_text(json.dumps(content))
    loaded = Conversation.load(saved)
    llm = open_llm(model, tmp_path / "kept")
    llm.recall_chat(loaded.messages("", 0)[:-1], loaded.reply_token_ids())
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    llm.close()
    assert output.prompt_token_ids == alone.prompt_token_ids
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_invalid_conversation_is_refused(model: Path, tmp_path: Path) -> None:
    llm = open_llm(model, tmp_path)
    with pytest.raises(RequestError):
        llm.recall_chat([{"content": "no role"}, {"role": "assistant", "content": "a"}], {1: [3]})
    llm.close()
