"""`LLM.chat` from messages to messages: the next turn computes only what is new.

The model is random but for its taste: it says ASCII pieces only, and they are seldom those that
the tokenizer would cut its words into.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from headstart import LLM, AsyncLLM, RequestOutput, SamplingParams
from headstart.errors import RequestError
from tests.tiny_models import tiny_config
from tests.tiny_tokenizers import END_OF_TURN, TINY_TOKENIZERS

MakeLLM = Callable[..., LLM]
Messages = list[dict[str, str]]
# Among the twenty likeliest tokens are only those that the model has a taste for.
PARAMS = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30)


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config: Any = tiny_config("llama")
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 2048
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    liked = torch.zeros(len(tokenizer), 1)
    for token_id in range(len(tokenizer)):
        text = str(tokenizer.decode([token_id]))
        liked[token_id] = 40.0 if text.isascii() and text.isprintable() else 0.0
    with torch.no_grad():
        model.lm_head.weight.mul_(liked)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return TINY_TOKENIZERS["byte_level"]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("chat")
    save_model(path, tokenizer)
    return path


@pytest.fixture
def make_llm(folder: Path) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(folder, **({"num_blocks": 200, "debug": True, "num_threads": 1} | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def go_on(messages: Messages, output: RequestOutput, text: str, index: int = 0) -> Messages:
    """Return the conversation with the answer and the next question."""
    answer = {"role": "assistant", "content": output.outputs[index].text}
    return [*messages, answer, *ask(text)]


def all_ids(output: RequestOutput, index: int = 0) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[index].token_ids]


def tokens(tokenizer: PreTrainedTokenizerBase, output: RequestOutput) -> list[int]:
    """Tokenize the prompt without remembered turns."""
    token_ids: list[int] = tokenizer.encode(output.prompt or "", add_special_tokens=False)
    return token_ids


def spell(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def test_every_turn_hits_all_of_the_last_but_one_token(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last sampled token misses, because its K/V were not computed."""
    llm = make_llm()
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS)
    assert output.num_cached_tokens == 0
    surprises = 0
    for question in ("and then?", "the weather", "日本語", "so"):
        seen = all_ids(output)
        messages = go_on(messages, output, question)
        [output] = llm.chat(messages, PARAMS)
        assert output.prompt_token_ids[: len(seen)] == seen
        assert output.num_cached_tokens == len(seen) - 1
        assert spell(tokenizer, output.prompt_token_ids) == output.prompt
        surprises += tokens(tokenizer, output)[: len(seen)] != seen
    assert surprises == 4  # each of these turns would have missed otherwise


def test_several_conversations_at_once(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    llm = make_llm()
    conversations = [ask(text) for text in ("hello", "the other day", "then", "hello there")]
    outputs = llm.chat(conversations, PARAMS, use_tqdm=False)
    for question in ("so", "and"):
        seen = [all_ids(output) for output in outputs]
        conversations = [
            go_on(messages, output, question)
            for messages, output in zip(conversations, outputs, strict=True)
        ]
        outputs = llm.chat(conversations, PARAMS, use_tqdm=False)
        for output, ids in zip(outputs, seen, strict=True):
            assert output.num_cached_tokens == len(ids) - 1
            assert tokens(tokenizer, output)[: len(ids)] != ids


def test_a_streamed_answer_is_remembered(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    *_, output = llm.stream_chat(messages, PARAMS)
    assert output.finished
    seen = all_ids(output)
    *_, later = llm.stream_chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.num_cached_tokens == len(seen) - 1


def test_an_aborted_answer_is_remembered_as_far_as_it_went(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    stream = llm.stream_chat(messages, PARAMS)
    assert stream.progress() == (len(stream.prompt_token_ids), 0, 0)
    for _ in range(3):
        next(stream)
    stream.abort()
    *_, output = stream
    assert output.finished and output.outputs[0].finish_reason == "abort"
    seen = all_ids(output)
    *_, later = llm.stream_chat(go_on(messages, output, "and then?"), PARAMS)
    assert len(output.prompt_token_ids) + 2 <= later.num_cached_tokens <= len(seen)


def test_a_stream_may_be_aborted_before_it_begins(make_llm: MakeLLM) -> None:
    stream = make_llm().stream_chat(ask("hello there"), PARAMS)
    stream.abort()
    *_, output = stream
    assert output.outputs[0].finish_reason == "abort"


def test_a_stream_that_is_left_remembers_nothing_wrong(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A client may send the partial text as a turn, which is tokenized like any text."""
    llm = make_llm()
    messages = ask("hello there")
    stream: Any = llm.stream_chat(messages, PARAMS)
    output = [next(stream) for _ in range(9)][-1]
    stream.close()
    assert not llm.engine.has_unfinished
    [later] = llm.chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.prompt_token_ids == tokens(tokenizer, later)
    assert later.num_cached_tokens >= len(output.prompt_token_ids)


def test_an_answer_that_ends_by_itself_is_hit_whole(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last token ends the turn; the template writes this token again, once."""
    llm = make_llm()
    [end] = tokenizer.encode(END_OF_TURN)
    messages = ask("hello there")
    let_end(llm, end, after=11)
    [output] = llm.chat(messages, PARAMS)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == end
    seen = all_ids(output)
    assert len(output.outputs[0].token_ids) == 12
    [later] = llm.chat(go_on(messages, output, "and then?"), PARAMS)
    assert later.prompt_token_ids[: len(seen)] == seen
    assert later.prompt_token_ids.count(end) == 3
    assert later.num_cached_tokens == len(seen) - 1


def let_end(llm: LLM, end: int, after: int) -> None:
    """Make the end-of-turn token the likeliest token after `after` tokens."""
    model: Any = llm.engine.model
    forward = model.forward
    steps = iter(range(10**6))

    def forcing(*inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(*inputs).clone()
        if next(steps) == after:
            logits[:, end] = 1e4
        return logits

    model.forward = forcing


def test_an_answer_cut_by_a_stop_string_is_hit_up_to_there(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    llm = make_llm()
    messages = ask("hello there")
    [whole] = llm.chat(messages, PARAMS)
    ids = whole.outputs[0].token_ids
    stop = spell(tokenizer, ids[20:22])
    kept = len(spell(tokenizer, ids[:22]).partition(stop)[0])
    params = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30, stop=stop)
    [output] = llm.chat(messages, params, cache_salt="other")
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].text) == kept
    boundaries = [len(spell(tokenizer, ids[:count])) for count in range(len(ids))]
    count = max(count for count, length in enumerate(boundaries) if length <= kept)
    [later] = llm.chat(go_on(messages, output, "and then?"), params, cache_salt="other")
    seen = len(output.prompt_token_ids) + count
    assert later.prompt_token_ids[:seen] == all_ids(output)[:seen]
    assert later.num_cached_tokens >= seen
    assert spell(tokenizer, later.prompt_token_ids) == later.prompt


def test_each_of_several_answers_may_be_the_one_that_is_continued(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = ask("hello there")
    params = SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=30, n=3)
    [output] = llm.chat(messages, params)
    assert len({completion.text for completion in output.outputs}) == 3
    for index in range(3):
        [later] = llm.chat(go_on(messages, output, "and then?", index), PARAMS)
        assert later.num_cached_tokens == len(all_ids(output, index)) - 1


def test_salts_remember_nothing_of_one_another(
    make_llm: MakeLLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """No K/V, ids or token counts depend on another tenant."""
    llm = make_llm()
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS, cache_salt="a")
    seen = all_ids(output)
    messages = go_on(messages, output, "and then?")
    for salt in ("b", None):
        [stranger] = llm.chat(messages, PARAMS, cache_salt=salt)
        assert stranger.prompt_token_ids == tokens(tokenizer, stranger)
        assert stranger.prompt_token_ids[: len(seen)] != seen
        assert stranger.num_cached_tokens == 0
    [same] = llm.chat(messages, PARAMS, cache_salt="a")
    assert same.num_cached_tokens == len(seen) - 1


def test_remembered_turns_are_answered_as_if_computed_anew(make_llm: MakeLLM) -> None:
    """An engine without a cache gives the same answer for the same ids."""
    llm = make_llm()
    greedy = SamplingParams(temperature=0, max_tokens=20)
    messages = ask("hello there")
    [output] = llm.chat(messages, PARAMS)
    [later] = llm.chat(go_on(messages, output, "and then?"), greedy)
    fresh = make_llm(enable_prefix_caching=False)
    [expected] = fresh.generate(later.prompt_token_ids, greedy)
    assert expected.num_cached_tokens == 0
    assert later.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_prompt_is_what_the_template_makes_of_the_messages(make_llm: MakeLLM) -> None:
    llm = make_llm()
    [output] = llm.chat([{"role": "system", "content": "be kind"}, *ask("hello")], PARAMS)
    assert output.prompt == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [ask("hello"), [{"role": "user"}]],
        [ask("hello"), []],
        [ask("hello"), ask("hello " * 3000)],
    ],
)
def test_one_bad_conversation_is_refused_before_any_work(
    make_llm: MakeLLM, messages: list[Messages]
) -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.chat(messages, PARAMS)
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.stats.requests == 0


def test_a_conversation_streamed_must_have_a_message(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        next(make_llm().stream_chat([], PARAMS))


def test_async_chat_hits_the_last_turn_too(folder: Path) -> None:
    """Two conversations stream concurrently; each next turn hits the reply of its conversation."""

    async def last(llm: AsyncLLM, messages: Messages) -> RequestOutput:
        return [output async for output in llm.chat(messages, PARAMS)][-1]

    async def two_turns(llm: AsyncLLM, text: str) -> tuple[RequestOutput, RequestOutput]:
        first = await last(llm, ask(text))
        return first, await last(llm, go_on(ask(text), first, "and then?"))

    async def converse(llm: AsyncLLM) -> list[tuple[RequestOutput, RequestOutput]]:
        return await asyncio.gather(two_turns(llm, "hello"), two_turns(llm, "good day"))

    llm = AsyncLLM(folder, num_blocks=200, debug=True)
    conversations = asyncio.run(converse(llm))
    llm.close()
    for first, second in conversations:
        assert second.num_cached_tokens == len(all_ids(first)) - 1
